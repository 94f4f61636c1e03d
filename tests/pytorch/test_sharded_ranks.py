"""Checkpoints of sharded models, by real processes: cut and resumed, on other numbers of ranks, and with failures."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.storage import CheckpointError, CheckpointStore, Location, verify
from dray.storage.checkpoints import RemoteStore
from dray.training.checkpoint import checkpointer, files, joint, shard_file, sharded
from dray.training.parallel import exchange
from tests import queued
from tests.pytorch.fakes import FakeHost, RemoteHost, RungHost
from tests.pytorch.processes import HANGS_S, results_of, serve, two_processes
from tests.pytorch.resuming import assert_equal
from tests.pytorch.sharding import Sharded, foreach_by_default, fsdp, run, tensor_parallel, trial, whole
from tests.storage.s3 import KEYS, LocalS3

pytestmark = pytest.mark.slow

CUT = 3
"""In the middle of an epoch and of an aggregation."""


def go(trial_class: type[Sharded], directory: Path | FakeHost, **arguments: Any) -> dict[str, Any]:
    return run(trial_class, directory, distributed=DistributedContext.from_torch_distributed("127.0.0.1"), **arguments)


def go_on(trial_class: type[Sharded], directory: Path, source: Path) -> dict[str, Any]:
    """The run that goes on from a checkpoint of `source`."""
    return go(trial_class, directory, latest_checkpoint=str(source / f"checkpoint_{CUT}"))


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
    before, checkpointer.AT_ONCE_BYTES = checkpointer.AT_ONCE_BYTES, 0
    try:
        yield
    finally:
        checkpointer.AT_ONCE_BYTES = before


def all_runs(directory: Path) -> dict[str, Any]:
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
        found["rung"] = go(trial(fsdp), RungHost(directory / "rung"))
        found["stopped at a rung"] = go(trial(fsdp), RungHost(directory / "stopped", stop_at=4))
    found["from background"] = go_on(trial(fsdp), directory / "from_background", directory / "rung")
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
        place = Location(Location.of((directory.parent / "uri").read_text()).uri, KEYS).child(name)
        return RemoteHost(RemoteStore(place, directory / f"machine_{rank}" / name), directory / name)

    found: dict[str, Any] = {"whole": go(trial(fsdp), host("whole"))}
    source = host("whole").store
    found["resumed"] = go(trial(fsdp), host("resumed"), latest_checkpoint=source.id_of(CUT))
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


# ---------------------------------------------------------------------------------------------------------------- tests

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded_ranks") / "all_runs"


@pytest.fixture(scope="module")
def one(directory: Path) -> dict[str, Any]:
    """What one process with a whole model makes of the trial."""
    return run(trial(), directory / "one")


@pytest.fixture(scope="module")
def two(directory: Path, one: dict[str, Any]) -> Found:
    return [found["all_runs"] for found in results_of(2, __file__, directory.parent)]


def assert_close(mine: Any, other: Any) -> None:
    """As `assert_equal`, but for the order of additions."""
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            assert_close(mine[key], other[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for left, right in zip(mine, other, strict=True):
            assert_close(left, right)
    elif isinstance(mine, float):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    else:
        assert mine == other


def after(reports: list[Any], cut: int) -> list[Any]:
    return [report for report in reports if report[0] > cut]


def assert_goes_on(resumed: dict[str, Any], expected: dict[str, Any], cut: int = CUT) -> None:
    """Weights, optimizers and all that was reported after the cut are those of another run, to float tolerance."""
    assert_close(resumed["state"], expected["state"])
    assert_close(after(resumed["reports"], cut), after(expected["reports"], cut))
    assert resumed["epochs"] == expected["epochs"]


def test_the_same_ranks_go_on_bit_for_bit(two: Found) -> None:
    for rank in two:
        resumed, whole = rank["dropout, resumed"], rank["dropout"]
        assert_equal(resumed["state"], whole["state"])
        assert_equal(resumed["rng"], whole["rng"])
        assert_equal(resumed["reports"], after(whole["reports"], CUT))
        assert resumed["epochs"] == whole["epochs"]


def test_a_checkpoint_has_each_shard_once_and_no_weight_outside(two: Found, directory: Path) -> None:
    checkpoint = directory / "fsdp" / "checkpoint_3"
    state = torch.load(checkpoint / "state-dict.pth", weights_only=True)
    model, scale = state["models_state_dict"]
    assert all(weight.device.type == "meta" for weight in model.values())
    assert all(weight.device.type == "cpu" for weight in scale.values())
    pieces = [shard_file.read(checkpoint / sharded.file_of(rank)) for rank in (0, 1)]
    assert [piece["models_state_dict.0.0.weight"].shape for piece in pieces] == [(4, 6), (4, 6)]
    assert [piece["models_state_dict.0.0.weight"].offsets for piece in pieces] == [(0, 0), (4, 0)]
    assert "models_state_dict.0.4.bias" not in pieces[1], "one element, which the first rank has"
    assert {name.partition(".")[0] for name in pieces[0]} == {
        "models_state_dict",
        "optimizers_state_dict",
        "gradients",
    }
    manifest = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for rank in (0, 1):
        content = (checkpoint / sharded.file_of(rank)).read_bytes()
        assert manifest[sharded.file_of(rank)] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_torchs_own_reader_reads_the_shards(two: Found, directory: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    loaded = {"models_state_dict.0.0.weight": torch.empty(8, 6), "models_state_dict.0.2.bias": torch.empty(5)}
    reader = dcp.HuggingFaceStorageReader(str(directory / "fsdp" / "checkpoint_8" / "sharded"))
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, storage_reader=reader)
    for name, tensor in loaded.items():
        expected = two[0]["fsdp"]["state"]["models_state_dict"][0]
        assert torch.equal(tensor, expected[name.removeprefix("models_state_dict.0.")])


def test_one_goes_on_from_two_and_two_from_one(
    two: Found, one: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    assert_goes_on(two[0]["fsdp"], one, 0)
    assert_goes_on(two[0]["from one"], one)
    checkpoint = directory / "fsdp" / f"checkpoint_{CUT}"
    assert_goes_on(run(trial(), tmp_path, latest_checkpoint=str(checkpoint)), one)


@pytest.mark.parametrize("kind", ["ddp to fsdp", "fsdp to ddp", "from full", "from background"])
def test_whole_and_sharded_models_load_each_others_checkpoints(two: Found, one: dict[str, Any], kind: str) -> None:
    assert_goes_on(two[0][kind], one)


def test_a_tensor_parallel_model_loads_what_fsdp_saved(two: Found) -> None:
    expected = two[0]["fsdp"]["state"]["models_state_dict"][0]
    for rank, found in enumerate(each["tensor parallel"] for each in two):
        assert_equal(dict(found["state"]), dict(expected))
        # The bias of the rows is whole on both ranks, and the last layer no DTensor.
        assert found["saves"] == {"0.weight", "0.bias", "2.weight"} | ({"2.bias"} if rank == 0 else set())


def test_a_full_checkpoint_is_one_state_dict(two: Found, directory: Path) -> None:
    checkpoint = directory / "full" / "checkpoint_8"
    assert not (checkpoint / "sharded").exists()
    state = torch.load(checkpoint / "state-dict.pth", weights_only=True)
    assert_equal(state["models_state_dict"], two[0]["full"]["state"]["models_state_dict"])
    assert_equal(state["optimizers_state_dict"], two[0]["full"]["state"]["optimizers_state_dict"])


def test_a_sharded_checkpoint_gives_a_whole_trial(two: Found, directory: Path) -> None:
    checkpoint = directory / "fsdp" / "checkpoint_8"
    made: Any = pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=trial())
    assert_equal(dict(made.model.state_dict()), dict(two[0]["fsdp"]["state"]["models_state_dict"][0]))


@pytest.mark.parametrize("rank", [0, 1])
def test_in_the_background_a_rank_that_cant_write_is_an_error_on_all(two: Found, directory: Path, rank: int) -> None:
    errors = [found[f"broken on {rank}"]["error"] for found in two]
    assert all("the disk is broken" in error for error in errors), errors
    place = directory / f"broken_{rank}"
    assert sorted(path.name for path in place.iterdir() if "checkpoint" in path.name or "staging" in path.name) == [
        "checkpoint_1",
        "checkpoint_2",
    ]
    verify(place / "checkpoint_2")


@pytest.mark.parametrize("rank", [0, 1])
def test_in_the_background_a_full_disk_costs_one_checkpoint(two: Found, rank: int) -> None:
    assert [found[f"full disk on {rank}"].get("error") for found in two] == [None, None]
    assert two[0][f"full disk on {rank}"]["saved"] == [1, 2, 4, 5]


def test_a_checkpoint_of_another_architecture_is_one_error(two: Found) -> None:
    for rank in two:
        assert rank["wider"]["error"].startswith("ValueError: model 0 of the checkpoint does not fit the trial's")
        assert "size mismatch for 0.weight" in rank["wider"]["error"]


def test_a_shard_in_the_state_of_a_callback_is_one_error(two: Found, directory: Path) -> None:
    what = "the state of callback 'keeper' at ['first'] is a DTensor, and the chief has only its shard"
    assert all(what in rank["keeper"]["error"] for rank in two)
    assert not list((directory / "keeper").glob(".staging-*"))


def test_at_a_rung_training_continues_until_the_search_hears_of_it_after_the_commit(two: Found) -> None:
    for rank in two:
        assert_equal(rank["rung"]["state"], rank["fsdp"]["state"])
    chief = two[0]
    assert chief["rung"]["saved"] == chief["fsdp"]["saved"]
    assert chief["stopped at a rung"]["saved"] == [1, 2, 3, 4]
    assert [report[:2] for report in chief["stopped at a rung"]["reports"]] == [
        report[:2] for report in chief["fsdp"]["reports"][:4]
    ]


def test_a_kill_between_a_rung_and_its_commit_costs_that_checkpoint(one: dict[str, Any], tmp_path: Path) -> None:
    with two_processes(__file__, tmp_path, "rung") as processes:
        for process, code in zip(processes, (-signal.SIGKILL, 1), strict=True):
            process.communicate(timeout=HANGS_S)
            assert process.returncode == code
    latest = CheckpointStore(tmp_path).latest()
    assert latest == str(tmp_path / "checkpoint_3")
    assert_goes_on(run(trial(), tmp_path / "resumed", latest_checkpoint=latest), one, 3)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_in_the_middle_of_a_save_costs_that_checkpoint(one: dict[str, Any], tmp_path: Path, victim: int) -> None:
    with two_processes(__file__, tmp_path, victim) as processes:
        for rank, process in enumerate(processes):
            process.communicate(timeout=HANGS_S)
            assert process.returncode == (-signal.SIGKILL if rank == victim else 1)
    assert any(path.name.startswith(".staging-3-") for path in tmp_path.iterdir()) == (victim == 0)
    latest = CheckpointStore(tmp_path).latest()
    assert latest == str(tmp_path / "checkpoint_2")
    assert_goes_on(run(trial(), tmp_path / "resumed", latest_checkpoint=latest), one, 2)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Found, LocalS3]]:
    """Two machines of a rank each, with an object store."""
    directory = tmp_path_factory.mktemp("two_machines")
    server = LocalS3()
    (directory / "uri").write_text(server.uri("sharded"))
    yield [found["two_machines"] for found in results_of(2, __file__, directory, local_sizes=(1, 1))], server
    server.stop()


@pytest.mark.long
def test_each_machine_uploads_its_shards(machines: tuple[Found, LocalS3], one: dict[str, Any]) -> None:
    ranks, server = machines
    assert_goes_on(ranks[0]["whole"], one, 0)
    for rank in ranks:
        assert_equal(rank["resumed"]["state"], rank["whole"]["state"])
    uploaded = server.files("sharded", "whole", "checkpoint_3")
    assert {name for name in uploaded if name.startswith("sharded/")} == {sharded.file_of(rank) for rank in (0, 1)}


def copied(directory: Path, target: Path) -> Path:
    return shutil.copytree(directory / "fsdp" / "checkpoint_8", target / "checkpoint_8")


def test_a_damaged_shard_is_never_loaded(two: Found, directory: Path, tmp_path: Path) -> None:
    checkpoint = copied(directory, tmp_path)
    file = checkpoint / sharded.file_of(1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"sharded/rank_1.safetensors does not match its checksum"):
        pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=trial())


def test_shards_of_another_checkpoint_are_refused_even_without_a_manifest(
    two: Found, directory: Path, tmp_path: Path
) -> None:
    checkpoint = copied(directory, tmp_path)
    (checkpoint / "manifest.json").unlink()
    file = checkpoint / sharded.file_of(1)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"of the 48 elements of models_state_dict\.0\.0\.weight, .* has 24"):
        pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=trial())
    shutil.copy(directory / "from_one" / "checkpoint_8" / sharded.file_of(0), file)
    with pytest.raises(CheckpointError, match="another checkpoint's"):
        pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=trial())
    file.write_bytes(b"\x10\0\0\0\0\0\0\0not JSON, 16 bytes")
    with pytest.raises(ValueError, match=r"rank_1.safetensors is damaged"):
        pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=trial())


def main(directory: Path, victim: str) -> None:
    """A run in which a rank is killed: at the rung, or rank `victim` while it writes its part of a checkpoint."""
    queued.init(directory / "rendezvous", int(os.environ["RANK"]), 2)
    joint.FAIL_S = exchange.FAIL_S = 1.0
    if victim == "rung":
        with in_background():
            sys.exit(go(trial(fsdp), RungHost(directory, kills=True))["error"])
    killed(directory, int(victim))


if __name__ == "__main__":
    foreach_by_default()
    if sys.argv[2:]:
        main(Path(sys.argv[1]), sys.argv[2])
    else:
        serve([two_machines if os.environ["GROUP_WORLD_SIZE"] == "2" else all_runs])
