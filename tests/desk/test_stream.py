"""Both sides of a session, with connections between them that are cut at random."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from dray.desk.stream import Stream
from dray.desk.wire import Malformed


class Side:
    """Sends numbers, and notes what has come; it is its own connection too."""

    def __init__(self) -> None:
        self.stream, self.sent = Stream(), 0
        self.wire = deque[bytes]()  # to the other side
        self.got: list[int] = []

    def send(self, *parts: bytes) -> None:
        self.wire.append(b"".join(parts))

    def abort(self) -> None:
        raise AssertionError("there is no connection in place of which this one could be")

    def say(self) -> None:
        self.sent += 1
        self.stream.send(b"%d" % self.sent)

    def take(self, frame: bytes) -> None:
        connection: Any = self
        if self.stream.channel is None:
            self.stream.resume(connection, frame)
        elif message := self.stream.receive(frame):
            self.got.append(int(bytes(message)))

    def reconnect(self) -> None:
        """What is on its way is lost."""
        self.wire.clear()
        self.stream.channel = None
        self.send(self.stream.count())


@pytest.mark.parametrize("cuts", [0, 0.01, 0.2])
def test_each_message_arrives_once_and_in_order_whatever_is_cut(cuts: float) -> None:
    for seed in range(30):
        rng = random.Random(f"{seed}:{cuts}")
        sides = Side(), Side()
        for each in sides:
            each.reconnect()
        for _ in range(1000):
            at = rng.random() < 0.5
            if rng.random() < cuts:
                for each in sides:
                    each.reconnect()
            elif rng.random() < 0.5:
                sides[at].say()
            else:
                for _ in range(rng.randrange(10)):
                    if sides[not at].wire:
                        sides[at].take(sides[not at].wire.popleft())
        while sides[0].wire or sides[1].wire:
            for at in (0, 1):
                if sides[not at].wire:
                    sides[at].take(sides[not at].wire.popleft())
        for at in (0, 1):
            assert sides[at].got == list(range(1, sides[not at].sent + 1)), seed


def test_what_has_arrived_is_not_kept_for_long() -> None:
    one, other = Side(), Side()
    for each in (one, other):
        each.reconnect()
    one.take(other.wire.popleft())
    other.take(one.wire.popleft())
    for number in range(1000):
        one.say()
        other.take(one.wire.popleft())
        if other.wire:
            one.take(other.wire.popleft())
        if number % 100 == 99:
            one.stream.send(bytes(1 << 20))
            other.stream.receive(one.wire.popleft())
            one.take(other.wire.popleft())  # the count comes at once after a large message
    one.stream.channel = None
    connection: Any = one
    one.stream.resume(connection, other.stream.count())
    assert not one.wire


@pytest.mark.parametrize("frame", [b"", b"1234567", (2).to_bytes(8, "big"), (0).to_bytes(8, "big")])
def test_acknowledgements_that_can_not_be_are_refused(frame: bytes) -> None:
    stream = Stream()
    stream.send(b"one")
    stream.receive((1).to_bytes(8, "big"))
    with pytest.raises(Malformed):
        stream.receive(frame)
