"""How a server takes the end of an experiment's process, without Ray: its process and its disk are fakes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dray.config.load import load_config
from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.serve import manager
from dray.serve.control import Share
from dray.serve.driver import FULL, Failed, Opened
from dray.serve.manager import Manager
from dray.serve.queue import Item, Queue

CONFIG: dict[str, Any] = {
    "name": "run",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 2}},
}


class Offline(Manager):
    """A server without a cluster, with one experiment whose search has not ended."""

    def __init__(self, results: Path) -> None:
        self._results, self._lock, self._drivers = results, threading.RLock(), {}
        self._closing, self._full, self._say = False, "", print
        self._directory, self._had_slots, self._leaving = results, set(), {}
        self._lender: Any = SimpleNamespace(demands={})
        self._queue = Queue(results / "queue.jsonl")
        code = results / "code"
        code.mkdir()
        (code / "train.py").write_text("import dray\n")
        self.item: Item = self._queue.add(
            ExperimentDirectory.create(results / "run", load_config(CONFIG), code).path, Share()
        )

    def start(self) -> Any:
        """A process of the experiment."""
        process: Any = SimpleNamespace(met_full_disk=False, exit_code=None, failure=None, how_ended=f"exit code {FULL}")
        self._drivers[self.item.name] = process
        return process

    def ends(self, process: Any) -> None:
        """The process could not write, and has ended."""
        process.exit_code, process.failure = FULL, Failed("can't write: No space left on device")
        self._ended(process)


def test_a_process_that_met_a_full_disk_is_not_counted_though_it_ends_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"why": "the disk is full"}
    monkeypatch.setattr(manager, "why_full", lambda results: free["why"])
    server = Offline(tmp_path)
    process = server.start()
    server._look_at_disk()  # noqa: SLF001 - a step of its loop
    free["why"] = ""
    server._look_at_disk()  # noqa: SLF001
    server.ends(process)
    assert (server.item.restarts, server.item.error, server.item.is_due) == (0, "", True)
    # The disk of something else is full: this process has met no full disk of the results.
    server.ends(server.start())
    assert (server.item.restarts, server.item.error) == (1, "can't write: No space left on device")


def test_a_desk_that_dies_as_it_starts_is_started_again_and_is_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = {"dies": 3}
    holder = ["the desk that has died"]  # of the desk's name, until it is freed

    def start_desk(*_: object, **__: object) -> Any:
        if holder:
            raise ValueError("the name is taken")
        holder.append("a desk")
        return SimpleNamespace(demands=SimpleNamespace(remote=lambda _: None))

    def get(_: object) -> None:
        starts["dies"] -= 1
        if starts["dies"] >= 0:
            raise ray.exceptions.RayActorError

    monkeypatch.setattr(manager, "RETRY_S", 0)
    monkeypatch.setattr(manager, "start_desk", start_desk)
    monkeypatch.setattr(manager, "_free_name", holder.clear)
    monkeypatch.setattr(ray, "get", get)
    server = Offline(tmp_path)
    server._cluster = SimpleNamespace(local=True)  # type: ignore[assignment]  # noqa: SLF001
    server._new_desk()  # noqa: SLF001
    assert holder == ["a desk"]
    holder.clear()
    starts["dies"] = 9
    with pytest.raises(ExperimentError, match="the server's desk can't start"):
        server._new_desk()  # noqa: SLF001


def test_a_process_that_ends_before_its_experiment_is_in_the_queue_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever notice its end: it would be queued for ever."""
    server = Offline(tmp_path)
    path = ExperimentDirectory.create(tmp_path / "next", load_config(CONFIG), tmp_path / "code").path
    process: Any = SimpleNamespace(exit_code=None, opened=Opened(path, Share()))

    def take_number(path: Path) -> None:
        process.exit_code = -9
        server._ended(process)  # noqa: SLF001 - called by the process's thread

    monkeypatch.setattr(manager, "take_number", take_number)
    monkeypatch.setattr(server, "_spares", SimpleNamespace(create=lambda config, code: process), raising=False)
    monkeypatch.setattr(Offline, "_may_start", lambda self, priority: True)
    assert server.submit("", tmp_path / "code").state == "QUEUED"
    assert not server._is_up("next"), "the loop starts another one"  # noqa: SLF001
