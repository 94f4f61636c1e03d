"""What test_sharded_ranks.py runs in several real processes: `python sharded_ranks.py <directory>`, once a rank.

What each rank has made of its runs is saved to <directory>/rank_<n>.pt; all ranks share the directory.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dray.core import DistributedContext
from dray.storage import Location
from dray.storage.checkpoints import RemoteStore
from dray.training.checkpoint import files, joint, saver, shard_file, sharded
from dray.training.parallel import exchange
from tests import queued
from tests.pytorch.fakes import FakeHost, RemoteHost, RungHost
from tests.pytorch.sharding import Sharded, foreach_by_default, fsdp, replicated, run, tensor_parallel, trial, whole
from tests.storage.s3 import KEYS

CUTS = (3, 4)
"""In the middle of an epoch and of an aggregation, and between two aggregations."""
LATER = (5, 6)


def go(trial_class: type[Sharded], directory: Path | FakeHost, **arguments: Any) -> dict[str, Any]:
    return run(trial_class, directory, distributed=DistributedContext.from_torch_distributed("127.0.0.1"), **arguments)


def go_on(
    trial_class: type[Sharded], directory: Path, source: Path, cuts: Sequence[int] = CUTS
) -> dict[int, dict[str, Any]]:
    """The runs that go on from two checkpoints of `source`."""
    return {
        cut: go(trial_class, directory / str(cut), latest_checkpoint=str(source / f"checkpoint_{cut}")) for cut in cuts
    }


@contextmanager
def writing_of(rank: int, does: Callable[[], None]) -> Iterator[None]:
    """A block in which one rank's third file of shards fails."""
    original, count = shard_file.write, 0

    def write(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 3 and dist.get_rank() == rank:
            does()
        original(*arguments)

    shard_file.write = write
    try:
        yield
    finally:
        shard_file.write = original


def broken() -> None:
    raise OSError(errno.EIO, "the disk is broken")


def full() -> None:
    raise OSError(errno.ENOSPC, "no space left")


@contextmanager
def in_background() -> Iterator[None]:
    """A block in which small states too are written in the background."""
    before, saver.AT_ONCE_BYTES = saver.AT_ONCE_BYTES, 0
    try:
        yield
    finally:
        saver.AT_ONCE_BYTES = before


def two(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dropout = trial(fsdp, dropout=0.3)
    found["dropout"] = go(dropout, directory / "dropout")
    found["dropout, resumed"] = go_on(dropout, directory / "dropout_resumed", directory / "dropout")
    found["fsdp"] = go(trial(fsdp), directory / "fsdp")
    found["from one"] = go_on(trial(fsdp), directory / "from_one", directory / "one")
    found["ddp"] = go(trial(whole), directory / "ddp")
    found["ddp to fsdp"] = go_on(trial(fsdp), directory / "ddp_to_fsdp", directory / "ddp")
    found["fsdp to ddp"] = go_on(trial(whole), directory / "fsdp_to_ddp", directory / "fsdp")
    found["full"] = go(trial(fsdp), directory / "full", full=True)
    found["from full"] = go_on(trial(fsdp), directory / "from_full", directory / "full")
    with in_background():
        found["background"] = go(trial(fsdp), directory / "background")
        found["rung"] = go(trial(fsdp), RungHost(directory / "rung"))
        found["stopped at a rung"] = go(trial(fsdp), RungHost(directory / "stopped", stop_at=4))
    found["from background"] = go_on(trial(fsdp), directory / "from_background", directory / "background")
    for rank in (0, 1):
        for name, does in {"broken": broken, "full disk": full}.items():
            with writing_of(rank, does), in_background():
                found[f"{name} on {rank}"] = go(trial(fsdp), directory / f"{name}_{rank}", batches=5)
    found["tensor parallel"] = loaded(tensor_parallel, directory / "fsdp" / "checkpoint_8")
    found["keeper"] = go(trial(fsdp, keeps_shards=True), directory / "keeper", batches=1)
    checkpoint = str(directory / "fsdp" / "checkpoint_4")
    found["wider"] = go(trial(fsdp, width=9), directory / "wider", latest_checkpoint=checkpoint)
    return found


def two_machines(directory: Path) -> dict[str, Any]:
    """Each rank on a machine of its own, with checkpoints in the object store that `directory / "uri"` names."""
    rank = dist.get_rank()

    def host(name: str) -> RemoteHost:
        place = Location(Location.of(f"{(directory / 'uri').read_text()}").uri, KEYS).child(name)
        return RemoteHost(RemoteStore(place, directory / f"machine_{rank}" / name), directory / name)

    found: dict[str, Any] = {"whole": go(trial(fsdp), host("whole"))}
    source = host("whole").store
    found["resumed"] = {
        cut: go(trial(fsdp), host(f"resumed_{cut}"), latest_checkpoint=source.id_of(cut)) for cut in CUTS
    }
    return found


def killed(directory: Path, victim: int) -> None:
    """Rank `victim` is killed while it writes its part of the third checkpoint, in the background."""
    with writing_of(victim, lambda: os.kill(os.getpid(), signal.SIGKILL)), in_background():
        sys.exit(go(trial(fsdp), directory)["error"])


def loaded(shard: Callable[[nn.Module], nn.Module], checkpoint: Path) -> dict[str, Any]:
    """The first model of a checkpoint, loaded into one that is sharded otherwise; and which tensors this rank saves."""
    model = shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Dropout(0.0), nn.Linear(5, 1)))
    state = files.read_state(checkpoint, [], mmap=True)
    sharded.load(state, checkpoint, [model])
    model.load_state_dict(state["models_state_dict"][0])
    _, tensors = sharded.split(model.state_dict())
    return {"saves": set(sharded.shards_of(tensors)), "state": sharded.gathered(model.state_dict(), keep=True)}


def four(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["from one"] = go_on(trial(fsdp), directory / "four_from_one", directory / "one_from_two" / "3", LATER)
    found["replicated"] = loaded(replicated, directory / "fsdp" / "checkpoint_8")
    return found


def main(directory: Path, victim: str = "") -> None:
    torch.set_num_threads(1)
    foreach_by_default()
    rank, size, machines = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"))
    # By a file, not by a port: no other program can take it first.
    queued.init(directory / f"rendezvous_{size}", rank, size)
    joint.FAIL_S = exchange.FAIL_S = 1.0 if victim else exchange.FAIL_S
    if victim == "rung":
        with in_background():
            sys.exit(go(trial(fsdp), RungHost(directory, kills=True))["error"])
    if victim:
        killed(directory, int(victim))
        return
    run_all = two_machines if machines > 1 else {2: two, 4: four}[size]
    torch.save(run_all(directory), directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
