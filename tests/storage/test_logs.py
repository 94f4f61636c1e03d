"""Logs in an object store: each file has its own name, is uploaded while it grows, and can be fetched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.storage import Location, RemoteDirectory, StorageError, logs
from dray.storage.logs import LogUploader, fetch_logs, stored_as

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
    uploader = LogUploader()
    uploader.begin(path, trial)
    uploader.close()


def test_the_name_in_the_store_has_the_time_of_the_first_line(tmp_path: Path) -> None:
    assert stored_as(log(tmp_path, f"{MORNING} one", f"{EVENING} two")) == "rank_0.20261121T090202.123Z.log"
    assert stored_as(log(tmp_path, "of an older version", rank=12)) == "rank_12.log"


def test_logs_of_several_machines_are_stored_and_fetched_once_each(tmp_path: Path, trial: Location) -> None:
    first = log(tmp_path / "first", f"{MORNING} one")
    copied(first, trial)
    log(tmp_path / "first", f"{MORNING} one", f"{MORNING} two")
    copied(first, trial)
    copied(log(tmp_path / "second", f"{EVENING} three"), trial)
    assert names(trial) == ["logs/rank_0.20261121T090202.123Z.log", "logs/rank_0.20261121T190202.456Z.log"]
    fetch_logs(trial, tmp_path / "nowhere", tmp_path / "all")
    assert [path.read_text() for path in sorted((tmp_path / "all").iterdir())] == [
        f"{MORNING} one\n{MORNING} two\n",
        f"{EVENING} three\n",
    ]
    fetch_logs(trial, tmp_path / "first", tmp_path / "others")
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["rank_0.20261121T190202.456Z.log"]


def test_a_log_is_uploaded_while_its_trial_runs(
    tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "EVERY_S", 0.01)
    uploader = LogUploader()
    path = tmp_path / "rank_0.log"
    remote = RemoteDirectory(trial.child("logs"))
    uploader.begin(path, trial)  # there is no such file yet
    for lines in ([f"{MORNING} one"], [f"{MORNING} one", f"{EVENING} two"]):
        log(tmp_path, *lines)
        until(lambda: bool(remote.sizes()) and remote.read(stored_as(path)) == path.read_bytes())
    uploader.end(path)
    uploader.close()
    uploader.end(path)


def test_an_unreachable_store_is_one_warning_and_gets_the_log_later(
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
    uploader = LogUploader()
    path = log(tmp_path, f"{MORNING} one")
    with caplog.at_level(logging.WARNING):
        uploader.begin(path, trial)
        uploader.end(path)
        until(lambda: len(tries) == 3)
        uploader.close()
    assert names(trial) == ["logs/rank_0.20261121T090202.123Z.log"]
    assert [record.getMessage() for record in caplog.records] == [
        "can't upload the trials' logs to the checkpoint storage, will retry: no store",
        "the trials' logs are uploaded to the checkpoint storage again, and none is missing",
    ]
