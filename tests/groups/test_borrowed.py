"""What an experiment's process does about its server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from dray.config.resources import Resources
from dray.desk.connection import Call, Connection, ConnectionLost
from dray.desk.loop import EventLoop
from dray.desk.wire import Malformed
from dray.errors import ConfigError
from dray.groups.borrowed import BorrowedGroups, GroupServer
from dray.groups.capacity import find_slots
from tests.groups.clusters import HEAD_NODE, cluster
from tests.ray.harness import wait_for


class Answers:
    def take(self, call: Call) -> None:
        if call.method == "nonsense":
            raise Malformed(call.method)
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


def lent(loop: EventLoop) -> BorrowedGroups:
    server = GroupServer(address="", endpoint=loop.endpoint, local=True)
    return BorrowedGroups(server, "run-1", None, loop.endpoint, {}, lambda message: None)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("is_early", [True, False])
def test_a_client_that_calls_what_none_calls_is_let_go_with_one_line(
    is_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EventLoop("test-server")
    loop.listen("127.0.0.1")
    bad, good = Connection(loop.endpoint), Connection(loop.endpoint)
    attach = partial(loop.attach, Answers())
    for step in (bad.nonsense, attach) if is_early else (attach, bad.nonsense):
        step()
    wait_for(lambda: bad.is_lost, "the end of its session")
    good.call("sense").result(30)
    assert [record.getMessage() for record in caplog.records] == [
        "ended a session that called what no client calls: nonsense"
    ]
    good.close()
    loop.close()


def test_a_cluster_that_a_server_lends_is_one_thing_in_messages(loop: EventLoop) -> None:
    asked = Resources(slots_per_trial=5)
    server = GroupServer(address="10.0.0.1:6379", endpoint=loop.endpoint, local=False)
    told = r"5 slots requested, but the Ray cluster of the server at 10\.0\.0\.1:6379 has, or can grow to, 4 cpu slots"
    with pytest.raises(ConfigError, match=told):
        find_slots(cluster(HEAD_NODE), asked, 5, server.cluster().description)
