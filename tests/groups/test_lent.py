"""What an experiment's process does about its server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dray.desk.connection import Call, ConnectionLost
from dray.desk.loop import EventLoop
from dray.groups.lent import GroupServer, LentGroups
from tests.ray.harness import wait_for


class Answers:
    def take(self, call: Call) -> None:
        call.answer()

    def lost(self, session: Any) -> None:
        pass

    def settle(self) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("test-server")
    loop.listen("127.0.0.1")
    loop.attach(Answers())
    yield loop
    loop.close()


def lent(loop: EventLoop) -> LentGroups:
    server = GroupServer(address="", endpoint=loop.endpoint, local=True)
    return LentGroups(server, "run-1", None, loop.endpoint, {}, lambda message: None)  # type: ignore[arg-type]


def test_one_that_its_server_has_forgotten_does_not_wait_forever(loop: EventLoop) -> None:
    groups = lent(loop)
    groups.step()
    loop.close()
    wait_for(lambda: groups._desk.is_lost, "the loss", 5)  # noqa: SLF001
    with pytest.raises(ConnectionLost, match="lost the connection to the server"):
        groups.step()


def test_one_that_has_ended_has_lost_nothing(loop: EventLoop) -> None:
    groups = lent(loop)
    groups.end()
    wait_for(lambda: groups._desk._stream.is_ending, "the end")  # noqa: SLF001
    groups.step()
