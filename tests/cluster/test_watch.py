"""The thread that looks after the cluster, without one: its head is a socket here."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest
import ray

from dray.cluster import watch as watch_module
from dray.cluster.watch import Watch


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(watch_module, "EVERY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(head: socket.socket) -> str:
    return f"127.0.0.1:{head.getsockname()[1]}"


def test_draining_nodes_are_reported_while_there_are_any(head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()

    def drained() -> Iterator[set[str]]:
        yield from (set(), {"a"}, {"a", "b"}, set())
        # Nobody accepts the head's connections: were it looked at for long, it would not answer any more.
        seen.wait()

    looks = drained()
    monkeypatch.setattr(watch_module, "draining_nodes", lambda: next(looks, set()))
    told: queue.Queue[object] = queue.Queue()
    watch = Watch([address(head)], draining=told.put, silent=lambda: told.put("silent"))
    try:
        assert [told.get(timeout=30), told.get(timeout=30)] == [{"a"}, {"a", "b"}]
    finally:
        seen.set()
        watch.close()
    assert told.empty()


@pytest.mark.parametrize("alive", [0, 1])
def test_a_silent_process_is_reported_once_and_the_head_asked_nothing(
    head: socket.socket, monkeypatch: pytest.MonkeyPatch, alive: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(watch_module, "draining_nodes", lambda: asked.append(1) or set())
    told: queue.Queue[str] = queue.Queue()
    with socket.socket() as deaf:  # the port is its own, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        watch = Watch(
            [address(head)] * alive + [address(deaf)], draining=lambda nodes: None, silent=lambda: told.put("silent")
        )
        try:
            assert told.get(timeout=30) == "silent"
            assert (watch.answers(), watch.answers(only_head=True)) == (False, alive == 1)
            with pytest.raises(queue.Empty):
                told.get(timeout=0.1)
        finally:
            watch.close()
    assert not asked


def test_only_a_head_that_is_gone_is_no_news(
    head: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anything else that fails would leave trials unsaved on nodes that are taken away; it is reported once."""
    seen = threading.Event()

    def drained() -> set[str]:
        for error in errors:
            raise error
        seen.set()
        return set()

    gone = ray.exceptions.RaySystemError("Failed to connect to GCS")
    errors = iter([gone, AttributeError("renamed"), gone, AttributeError("renamed")])
    monkeypatch.setattr(watch_module, "draining_nodes", drained)
    watch = Watch([address(head)], draining=lambda nodes: None, silent=lambda: None)
    try:
        assert seen.wait(30)
    finally:
        watch.close()
    [record] = caplog.records
    assert record.getMessage() == "can't save the trials on nodes that will be removed; will try again every second"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "renamed"
