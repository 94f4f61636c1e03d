"""Two drivers and one experiment in an object store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dray.config.load import load_config
from dray.errors import ExperimentError, NoExperiment
from dray.records import driver_lock
from dray.records.directory import ExperimentDirectory
from dray.records.driver_lock import FILE, Driver, DriverLock, last_driver, read_driver, write_driver
from dray.records.listing import list_experiments, open_experiment
from dray.records.mirror import Mirror, fetch_to
from dray.storage import Location, RemoteDirectory, StorageError
from searchers.journal import Journal
from tests.ray.harness import wait_for

RAW = {"entrypoint": "m:T", "searcher": {"name": "single", "metric": "m", "max_length": {"batches": 1}}}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lock, "EVERY_S", 0.05)
    monkeypatch.setattr(driver_lock, "SILENT_S", 0.5)
    monkeypatch.setattr(driver_lock, "POLL_S", 0.05)


@pytest.fixture
def first(tmp_path: Path) -> ExperimentDirectory:
    """An experiment with a journal."""
    (tmp_path / "model").mkdir()
    config = load_config({**RAW, "checkpoint_storage": f"memory://locks/{tmp_path.name}"})
    directory = ExperimentDirectory.create(tmp_path / "first" / "digits", config, tmp_path / "model")
    with Journal(directory.journal) as journal:
        journal.append({"event": "start", "actions": [{"action": "create", "trial": 0}]})
        journal.append({"event": "started", "trial": 0})
    return directory


@pytest.fixture
def lock_of() -> Iterator[Callable[[ExperimentDirectory], DriverLock]]:
    """Acquires locks, which are released in the end."""
    locks = []

    def acquire(directory: ExperimentDirectory) -> DriverLock:
        locks.append(DriverLock(directory))
        locks[-1].acquire()
        return locks[-1]

    yield acquire
    for lock in locks:
        lock.close()


def dies(lock: DriverLock) -> None:
    """Its process is frozen, or gone: it says no more, not even that it has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_lock, "write_driver", lambda *_: None)
        lock.close()


def copied(first: ExperimentDirectory, lock: DriverLock) -> None:
    Mirror(first, lock.is_held).close()


def fetched(first: ExperimentDirectory, name: str = "second") -> ExperimentDirectory:
    path = first.path.parents[1] / name / "digits"
    path.parent.mkdir()
    fetch_to(path, first.storage)
    return ExperimentDirectory.open(path)


Lock = Callable[[ExperimentDirectory], DriverLock]


def test_what_a_driver_runs_is_not_fetched_to_be_continued(first: ExperimentDirectory, lock_of: Lock) -> None:
    copied(first, lock_of(first))
    with pytest.raises(
        ExperimentError, match=r"the driver on .*first/digits\) is running this experiment, in memory://.*; stop it"
    ):
        fetched(first)
    assert not (first.path.parents[1] / "second" / "digits").exists()


def test_a_driver_that_has_ended_is_not_waited_for(
    first: ExperimentDirectory, lock_of: Lock, caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(first)
    copied(first, lock)
    lock.close()
    second = fetched(first)
    assert lock_of(second).is_held()
    assert caplog.text == ""
    assert (first.path / FILE).read_text() != (second.path / FILE).read_text(), "each directory has its own id"


def test_a_silent_driver_is_replaced_and_ends_when_it_finds_out(
    first: ExperimentDirectory, lock_of: Lock, caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(first)
    copied(first, lock)
    dies(lock)
    second = fetched(first)
    assert "did not exit cleanly, or is still running the experiment in memory://locks/" in caplog.text
    assert "watching its heartbeat for 0.5 s" in caplog.text
    mine = lock_of(second)
    with Journal(first.journal) as journal:
        journal.append({"event": "started", "trial": 7})
    Mirror(first, lock.is_held).close()
    assert lock.lost_to is not None
    assert "second/digits" in lock.lost_to
    stored = RemoteDirectory(first.storage).read("journal.jsonl")
    assert stored == second.journal.read_bytes() != first.journal.read_bytes(), "the old one copies nothing more"
    assert mine.is_held()


def test_running_driver_finds_out_that_it_was_replaced(first: ExperimentDirectory, lock_of: Lock) -> None:
    lock = lock_of(first)
    found = read_driver(RemoteDirectory(first.storage))
    assert found is not None
    other = {"directory": "another", "host": "elsewhere", "path": "/x", "time": found.time}
    RemoteDirectory(first.storage).write(FILE, json.dumps(other).encode())
    wait_for(lambda: lock.lost_to, "the thread has found out", 10)
    assert lock.lost_to == "the driver on elsewhere (/x)"
    lock.close()
    after = read_driver(RemoteDirectory(first.storage))
    assert after is not None
    assert after.directory == "another", "it is not written over"


def test_the_same_directory_goes_on_at_once(
    first: ExperimentDirectory, lock_of: Lock, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal's lock shows that the driver there is gone."""
    dies(lock_of(first))
    assert lock_of(first).is_held()
    assert caplog.text == ""


def test_directory_that_was_continued_elsewhere_is_too_old(first: ExperimentDirectory, lock_of: Lock) -> None:
    lock = lock_of(first)
    copied(first, lock)
    lock.close()
    lock = lock_of(fetched(first))
    lock.close()
    with pytest.raises(ExperimentError, match=r"second/digits\) has continued this experiment since, so .*first"):
        lock_of(first)
    filesystem, path = first.storage.child(FILE).filesystem()
    filesystem.delete_file(path)
    assert lock_of(first).is_held(), "as the error says"


def test_driver_that_died_before_its_first_copy_locks_nobody_out(
    first: ExperimentDirectory, lock_of: Lock, tmp_path: Path
) -> None:
    dies(lock_of(first))
    with pytest.raises(NoExperiment):
        fetched(first)
    again = ExperimentDirectory.create(tmp_path / "again" / "digits", first.config(), None)
    assert lock_of(again).is_held()


def test_a_copy_that_could_not_take_over_is_made_again(
    first: ExperimentDirectory, lock_of: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(first)
    copied(first, lock)
    lock.close()

    def away(*_: object) -> None:
        raise StorageError("away")

    with monkeypatch.context() as patch:
        patch.setattr(driver_lock, "write_driver", away)
        with pytest.raises(StorageError):
            fetched(first, "second")
    assert not (first.path.parents[1] / "second" / "digits").exists(), "it could not be resumed"
    third = fetched(first, "third")
    found = read_driver(RemoteDirectory(first.storage))
    assert found is not None
    assert (found.path, found.runs) == (str(third.path), False)
    assert lock_of(third).is_held()


def test_a_store_that_is_away_for_a_while_costs_nothing(
    first: ExperimentDirectory, lock_of: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(first)
    with monkeypatch.context() as patch:

        def away(*_: object) -> None:
            raise StorageError("away")

        patch.setattr(RemoteDirectory, "read", away)
        with pytest.raises(StorageError):
            lock.is_held()
        assert lock.lost_to is None
    before = read_driver(RemoteDirectory(first.storage))
    wait_for(lambda: read_driver(RemoteDirectory(first.storage)) != before, "it says again that it runs", 10)


def test_an_experiment_on_a_disk_has_none(first: ExperimentDirectory, lock_of: Lock) -> None:
    first.storage_file.unlink()
    on_disk = ExperimentDirectory.open(first.path)
    lock = lock_of(on_disk)
    assert lock.lost_to is None
    assert last_driver(on_disk) is None
    assert not (first.path / FILE).exists()


def test_from_anywhere_one_sees_whether_a_driver_runs(
    first: ExperimentDirectory, lock_of: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lock, "SILENT_S", 30.0)

    def states() -> list[str]:
        with open_experiment(first.storage.uri) as stored:
            assert stored.is_copy
            return [
                stored.overview().state,
                *(each.state for each in list_experiments(first.storage.uri.rpartition("/")[0])),
            ]

    lock = lock_of(first)
    copied(first, lock)
    assert states() == ["RUNNING"] * 2
    lock.close()
    assert states() == ["STOPPED"] * 2
    lock = lock_of(first)
    dies(lock)
    monkeypatch.setattr(driver_lock, "SILENT_S", 0.0)
    assert states() == ["UNKNOWN"] * 2


def test_heartbeat_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    class Replaced(RemoteDirectory):
        reads = 0

        def read(self, name: str) -> bytes:
            self.reads += 1
            content = super().read(name)
            return content[:-1] if self.reads == 1 else content

    remote = Replaced(Location.of(tmp_path))
    driver = Driver(directory="a", host="here", path="/x", time=1.5)
    write_driver(remote, driver)
    assert read_driver(remote) == driver
