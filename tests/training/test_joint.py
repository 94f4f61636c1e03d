"""One checkpoint of several ranks, and objects between ranks, which are threads here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dray import pytorch
from dray.storage import StorageFull
from dray.storage.manifest import Listed, listed_in, parse_manifest
from dray.training.checkpoint.joint import JointCheckpoint
from dray.training.errors import PeerFailed
from dray.training.host import Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.transport import TorchTransport
from tests.core.test_distributed import nodes, on_ranks
from tests.forks.process import ROOT, Forked
from tests.pytorch.fakes import FakeHost


def saved(directory: Path, fault: Callable[[str, int], None], *, machines: tuple[int, ...] = (2,)) -> list[Any]:
    """The results of a save on two ranks, an id or an error each. `fault` is called at each step of each rank."""

    class Host(FakeHost):
        is_remote = len(machines) > 1

        def new_checkpoint(self, batches: int) -> Path:
            fault("stage", self.trial_id)
            return super().new_checkpoint(batches)

        def add_to_checkpoint(self, staging: Path, batches: int, known: Any) -> dict[str, Listed]:
            fault("upload", self.trial_id)
            for path in staging.iterdir():
                (directory / "uploaded" / path.name).write_text(path.read_text())
            return listed_in(staging, known)

        def commit(self, staging: Path, report: Report, known: Any) -> str:
            fault("commit", self.trial_id)
            return super().commit(staging, report, known)

    def work(peers: DistributedContext) -> Any:
        host = Host(directory / f"machine_{peers.cross_rank}")
        host.trial_id = peers.rank

        def write() -> dict[str, Listed]:
            fault("write", peers.rank)
            (joint.staging / f"rank_{peers.rank}").write_text("part")
            return {f"rank_{peers.rank}": Listed(4, f"checksum {peers.rank}")}

        try:
            joint = JointCheckpoint.begin(peers, host, Report(batches=1))
            return joint.save(write)
        except Exception as error:
            return error

    (directory / "uploaded").mkdir(exist_ok=True)
    return on_ranks(nodes(*machines), work)


def checksums(checkpoint: str) -> dict[str, str]:
    listed = parse_manifest((Path(checkpoint) / "manifest.json").read_bytes(), checkpoint)
    return {name: each.sha256 for name, each in listed.items()}


def test_all_ranks_get_the_id_of_a_checkpoint_with_all_parts(tmp_path: Path) -> None:
    chief, other = saved(tmp_path, lambda step, rank: None)
    assert chief == other
    assert checksums(chief) == {"rank_0": "checksum 0", "rank_1": "checksum 1"}
    assert sorted(path.name for path in Path(chief).glob("rank_*")) == ["rank_0", "rank_1"]


def test_what_another_machine_uploads_is_in_the_manifest(tmp_path: Path) -> None:
    """With the checksums of who has written it: nobody reads it again."""
    chief, _ = saved(tmp_path, lambda step, rank: None, machines=(1, 1))
    assert checksums(chief) == {"rank_0": "checksum 0", "rank_1": "checksum 1"}
    assert [path.name for path in (tmp_path / "uploaded").iterdir()] == ["rank_1"]


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (OSError(errno.EIO, "broken"), PeerFailed),
        (OSError(errno.ENOSPC, "full"), StorageFull),
        (pytorch.ShouldExit(), pytorch.ShouldExit),
    ],
)
@pytest.mark.parametrize(
    ("step", "rank", "machines"),
    [
        ("stage", 0, (2,)),
        ("stage", 1, (1, 1)),
        ("write", 0, (2,)),
        ("write", 1, (2,)),
        ("write", 1, (1, 1)),
        ("upload", 1, (1, 1)),
        ("commit", 0, (2,)),
        ("commit", 0, (1, 1)),
    ],
)
def test_a_failure_of_one_is_an_error_on_all_and_leaves_nothing(
    tmp_path: Path, step: str, rank: int, machines: tuple[int, ...], error: Exception, others: type[Exception]
) -> None:
    def fault(at: str, on: int) -> None:
        if (at, on) == (step, rank):
            raise error

    found = saved(tmp_path, fault, machines=machines)
    assert found[rank] is error or (isinstance(found[rank], StorageFull) and found[rank].__cause__ is error)
    assert isinstance(found[1 - rank], others)
    assert not [path for path in tmp_path.glob("machine_*/*") if path.name != "tensorboard"]


HANGS_S = 250

RANK = """
import sys, time
from pathlib import Path

import torch.distributed as dist
from dray.training.parallel.transport import TorchTransport

rank, directory = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
transport = TorchTransport()
assert transport.allgather(rank) == [0, 1]
if rank == 0:
    try:
        transport.allgather("still there?", timeout_s=0.1)
    except TimeoutError:
        transport.close()
        del transport
        dist.destroy_process_group()
else:
    time.sleep(600)
"""


def test_ranks_wait_for_a_chief_that_works_alone_for_any_time() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        transport = TorchTransport()
        backend = transport._group._get_backend(torch.device("cpu"))  # noqa: SLF001 - torch has no public way to ask it
        assert backend.options._timeout > timedelta(days=30)  # noqa: SLF001
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_after_a_timeout_a_rank_ends_without_waiting_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [Forked(str(tmp_path / "rank.py"), str(n), str(tmp_path), environment=environment) for n in range(2)]
    try:
        _, errors = ranks[0].communicate(timeout=HANGS_S)
        assert ranks[0].returncode == 0, errors
        assert ranks[1].returncode is None
    finally:
        for rank in ranks:
            rank.kill()
