"""The command on experiments in an object store (a local one), from a machine that has nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dray.records import driver_lock
from dray.records.directory import ExperimentDirectory
from dray.records.driver_lock import DriverLock
from dray.records.result import Result
from dray.report import write_report
from dray.storage import RemoteDirectory, store_at
from searchers.journal import Journal
from tests.cli.conftest import checkpoint
from tests.cli.said import Said
from tests.report.simulated import simulated
from tests.storage.s3 import LocalS3

Dray = Callable[..., Said]

pytestmark = pytest.mark.slow

TRIALS = 3
CHECKPOINTS = {1: [10, 160]}
"""Batches of the checkpoints by trial; the others have one after 10. The best validation of all is after 160."""
NUM_CHECKPOINTS = TRIALS + 1

PRINTED = "2026-11-21T19:02:02.123Z hello"


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    server = LocalS3()
    yield server
    server.stop()


@pytest.fixture
def original(s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExperimentDirectory]:
    """In the store's ``results/digits-1`` as its driver's machine left it there; and as that machine has it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    directory = simulated(tmp_path / "driver" / "digits-1", TRIALS)
    remote = RemoteDirectory(s3.place("results", "digits-1"))
    for path in directory.path.rglob("*"):
        if path.is_file():
            remote.write(path.relative_to(directory.path).as_posix(), path.read_bytes())
    for trial in range(TRIALS):
        store = store_at(remote.location.child(f"trial_{trial}"), tmp_path / f"scratch-{trial}")
        for batches in CHECKPOINTS.get(trial, [10]):
            checkpoint(store, batches)
    remote.write("trial_0/logs/rank_0.20261121T190202.123Z.log", f"{PRINTED}\n".encode())
    directory.write_storage(remote.location)
    yield directory
    RemoteDirectory(s3.place()).delete()


def test_it_is_listed_and_read_and_nothing_changes_there(
    original: ExperimentDirectory, s3: LocalS3, dray: Dray
) -> None:
    before = s3.files()
    [found] = dray("e", "list", s3.uri("results"), "--json").value
    assert (found["name"], found["state"], found["trials"]) == ("digits-1", "COMPLETED", TRIALS)
    where = s3.uri("results", "digits-1")
    expected = Result(original.path).trials.set_index("trial_id")
    described = dray("e", "describe", where, "--json").value
    assert described["best"]["metric"] == pytest.approx(expected["best_metric"].min())
    assert described["best"]["checkpoint"].startswith("s3://bucket/results/digits-1/trial_")
    assert len(dray("t", "list", where, "--json").value) == TRIALS
    assert dray("e", "logs", where, "--json").value == Journal.read(original.journal)
    assert dray("c", "verify", where).out == f"{NUM_CHECKPOINTS} checkpoints verified, 0 damaged\n"
    assert len(dray("c", "list", where, "--json").value) == NUM_CHECKPOINTS
    assert dray("t", "logs", where, "0").out == f"{PRINTED}\n"
    assert "has printed nothing" in dray("t", "logs", where, "1").err
    assert s3.files() == before


def test_what_a_driver_runs_elsewhere_is_shown_as_running_and_cannot_be_deleted(
    original: ExperimentDirectory, s3: LocalS3, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lock, "EVERY_S", 0.1)
    lock = DriverLock(ExperimentDirectory.open(original.path))
    lock.acquire()
    try:
        [found] = dray("e", "list", s3.uri("results"), "--json").value
        assert found["state"] == "RUNNING"
        where = s3.uri("results", "digits-1")
        said = dray("e", "delete", where, "--yes")
        assert said.code == 1
        assert f"({original.path}) is running this experiment, in s3://bucket/results/digits-1" in said.err
        assert dray("c", "verify", where).out == f"{NUM_CHECKPOINTS} checkpoints verified, 0 damaged\n"
    finally:
        lock.close()
    assert dray("e", "delete", where, "--yes").code == 0
    assert not s3.files("results", "digits-1")


@pytest.mark.long
def test_a_result_reads_it_from_a_copy_that_goes_with_it(original: ExperimentDirectory, s3: LocalS3) -> None:
    result = Result(s3.uri("results", "digits-1"))
    assert result.trials.equals(Result(original.path).trials)
    assert repr(result).startswith(f"<dray.Result digits-1, COMPLETED, {TRIALS} trials, best validation_loss 0.")
    assert result.best_trial.checkpoint.filesystem.type_name == "s3"
    assert write_report(s3.uri("results", "digits-1")) == Path("digits-1-report.html")
    copy = result.path
    assert copy.exists()
    del result
    assert not copy.exists()


@pytest.mark.long
def test_checkpoints_come_from_there(original: ExperimentDirectory, s3: LocalS3, dray: Dray) -> None:
    where = s3.uri("results", "digits-1")
    assert dray("c", "download", where, "2", "--at", "last", "-o", "two").out == "two\n"
    assert dray("c", "export", where, "-o", "weights").code == 0
    assert (Path("weights") / "model.pt").exists()
    assert dray("c", "export", s3.uri("results", "digits-1", "trial_2", "checkpoint_10"), "-o", "three").code == 0
    assert "there is no checkpoint" in dray("c", "verify", s3.uri("results", "digits-1", "trial_2", "checkpoint_9")).err


def test_a_download_is_the_whole_experiment_without_the_store(
    original: ExperimentDirectory, s3: LocalS3, dray: Dray
) -> None:
    assert dray("e", "download", s3.uri("results", "digits-1"), "-o", "copy").out == "copy\n"
    assert dray("e", "delete", s3.uri("results", "digits-1"), "--yes").code == 0
    assert s3.files() == {}, "nothing is left there"
    assert dray("e", "list", s3.uri("results"), "--json").value == []
    assert Result(Path("copy")).trials.equals(Result(original.path).trials)
    assert dray("c", "verify", "./copy").out == f"{NUM_CHECKPOINTS} checkpoints verified, 0 damaged\n"


@pytest.mark.long
def test_on_its_drivers_machine_it_is_the_local_one(
    original: ExperimentDirectory, s3: LocalS3, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(original.path.parent))
    with Journal(original.journal):
        found = dray("e", "describe", s3.uri("results", "digits-1"), "--json").value
        assert (found["path"], found["state"]) == (str(original.path), "RUNNING")
    assert dray("e", "delete", "digits-1", "--yes").code == 0
    assert not original.path.exists()
    assert s3.files() == {}


@pytest.mark.long
def test_what_is_not_there_is_one_line(original: ExperimentDirectory, s3: LocalS3, dray: Dray) -> None:
    assert "it has no experiment.yaml" in dray("e", "describe", s3.uri("results", "digits-2")).is_one_line()
    assert "it has no experiment.yaml" in dray("e", "delete", s3.uri("results"), "--yes").is_one_line()
    assert "can't list" in dray("e", "list", s3.uri("results", port=1)).is_one_line()


def test_credentials_in_the_uri_are_used_and_not_shown(
    original: ExperimentDirectory, s3: LocalS3, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    where = s3.uri("results", "digits-1").replace("s3://", "s3://test:hush@")
    said = [
        dray("e", "list", where.replace("/digits-1", ""), "--json"),
        dray("e", "describe", where, "--json"),
        dray("c", "list", where, "--json"),
        dray("c", "export", where, "-o", "weights"),
        dray("e", "delete", where, "--yes"),
    ]
    assert [each.code for each in said] == [0] * len(said)
    assert not any("hush" in each.out + each.err for each in said)
    assert "hush" not in Path("weights/checkpoint.json").read_text()
    assert "hush" not in dray("e", "describe", where).is_one_line()
