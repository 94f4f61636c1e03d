"""Both sides of a session, with connections between them that are cut at random."""

from __future__ import annotations

import random
from collections import deque

import pytest

from dray.desk.stream import Stream
from dray.desk.wire import Malformed


class Side:
    """Sends numbers, and notes what has come."""

    def __init__(self) -> None:
        self.stream, self.sent = Stream(), 0
        self.wire = deque[bytes]()  # to the other side
        self.got: list[int] = []
        self.is_resumed = False

    def put(self, *parts: bytes) -> None:
        self.wire.append(b"".join(parts))

    def send(self) -> None:
        self.sent += 1
        parts = self.stream.send(b"%d" % self.sent)
        if self.is_resumed:
            self.put(*parts)

    def take(self, frame: bytes) -> None:
        if not self.is_resumed:
            self.is_resumed = True
            for parts in self.stream.resume(frame):
                self.put(*parts)
        elif message := self.stream.receive(frame):
            self.got.append(int(bytes(message)))
            if self.stream.owes_count:
                self.put(self.stream.count())

    def reconnect(self) -> None:
        """What is on its way is lost."""
        self.wire.clear()
        self.is_resumed = False
        self.put(self.stream.count())


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
                sides[at].send()
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
            assert len(sides[at].stream.resume(sides[not at].stream.count())) == 0, "what has arrived is not kept"


def test_what_has_arrived_is_acknowledged_also_if_nothing_is_sent() -> None:
    one, other = Stream(), Stream()
    acknowledged = 0
    for message in [b"small"] * 100 + [bytes(1 << 20)]:
        other.receive(b"".join(one.send(message)))
        if other.owes_count:
            one.receive(other.count())
            acknowledged += 1
    assert 2 <= acknowledged < 10
    assert one.resume(other.count()) == [], "the large one was acknowledged at once"


@pytest.mark.parametrize("frame", [b"", b"1234567", (2).to_bytes(8, "big"), (0).to_bytes(8, "big")])
def test_acknowledgements_that_can_not_be_are_refused(frame: bytes) -> None:
    stream = Stream()
    stream.send(b"one")
    stream.receive((1).to_bytes(8, "big"))
    with pytest.raises(Malformed):
        stream.receive(frame)
