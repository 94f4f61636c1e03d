"""Logs in an object store: each file under a name of its own, copied while it grows, brought together again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.storage import Location, RemoteDirectory, StorageError, logs
from dray.storage.logs import LogCopies, bring_logs, stored_as

MORNING, EVENING = "2026-11-21T09:02:02.123Z", "2026-11-21T19:02:02.456Z"


def log(directory: Path, *lines: str, rank: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{rank}.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def trial(tmp_path: Path) -> Location:
    return Location.of(f"memory://results/{tmp_path.name}/trial_3")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


def names(trial: Location) -> list[str]:
    return sorted(RemoteDirectory(trial).sizes())


def copied(path: Path, trial: Location) -> None:
    copies = LogCopies()
    copies.begin(path, trial)
    copies.close()


def test_name_is_that_of_the_first_line(tmp_path: Path) -> None:
    assert stored_as(log(tmp_path, f"{MORNING} one", f"{EVENING} two")) == "rank_0.20261121T090202.123Z.log"
    assert stored_as(log(tmp_path, "of an older version", rank=12)) == "rank_12.log"


def test_logs_of_several_machines_are_side_by_side_and_each_there_once(tmp_path: Path, trial: Location) -> None:
    first = log(tmp_path / "first", f"{MORNING} one")
    copied(first, trial)
    log(tmp_path / "first", f"{MORNING} one", f"{MORNING} two")
    copied(first, trial)
    copied(log(tmp_path / "second", f"{EVENING} three"), trial)
    assert names(trial) == ["logs/rank_0.20261121T090202.123Z.log", "logs/rank_0.20261121T190202.456Z.log"]
    bring_logs(trial, tmp_path / "nowhere", tmp_path / "all")
    assert [path.read_text() for path in sorted((tmp_path / "all").iterdir())] == [
        f"{MORNING} one\n{MORNING} two\n",
        f"{EVENING} three\n",
    ]
    bring_logs(trial, tmp_path / "first", tmp_path / "others")
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["rank_0.20261121T190202.456Z.log"]


def test_a_log_is_copied_while_its_trial_runs(tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "EVERY_S", 0.01)
    copies = LogCopies()
    path = tmp_path / "rank_0.log"
    remote = RemoteDirectory(trial.child("logs"))
    copies.begin(path, trial)  # there is no such file yet
    for lines in ([f"{MORNING} one"], [f"{MORNING} one", f"{EVENING} two"]):
        log(tmp_path, *lines)
        until(lambda: bool(remote.sizes()) and remote.read(stored_as(path)) == path.read_bytes())
    copies.end(path)
    until(lambda: not copies._growing)
    copies.close()
    copies.end(path)


def test_a_store_that_is_away_is_told_of_once_and_written_to_when_it_is_back(
    tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "EVERY_S", 0.01)
    write, tries = RemoteDirectory.write, []

    def refused(self: RemoteDirectory, name: str, content: bytes) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise StorageError("no store")
        write(self, name, content)

    monkeypatch.setattr(RemoteDirectory, "write", refused)
    copies = LogCopies()
    path = log(tmp_path, f"{MORNING} one")
    with caplog.at_level(logging.WARNING):
        copies.begin(path, trial)
        copies.end(path)
        until(lambda: not copies._growing)
    copies.close()
    assert names(trial) == ["logs/rank_0.20261121T090202.123Z.log"]
    assert [record.getMessage() for record in caplog.records] == [
        "the trials' logs can't be copied beside their checkpoints for now, will try again: no store",
        "the trials' logs are copied beside their checkpoints again, and nothing is missing there",
    ]


def test_a_last_copy_that_fails_names_the_log(
    tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: RemoteDirectory, name: str, content: bytes) -> None:
        raise StorageError("no store")

    monkeypatch.setattr(RemoteDirectory, "write", refused)
    path = log(tmp_path, f"{MORNING} one")
    copied(path, trial)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"the end of {path} on ")
    assert record.getMessage().endswith("is not in the trial's store: no store")


def test_a_long_log_is_copied_more_rarely(tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(tmp_path, f"{MORNING} {'x' * (30 * logs.BYTES_PER_S)}")
    waits: list[float] = []

    class Over:
        def wait(self, timeout_s: float) -> bool:
            waits.append(timeout_s)
            return len(waits) == 3

    copies = LogCopies()
    copies._over = Over()  # type: ignore[assignment]
    copies._growing[path] = RemoteDirectory(trial.child("logs"))
    copies._run()
    assert waits == [logs.EVERY_S, pytest.approx(30, rel=0.01), logs.EVERY_S]
