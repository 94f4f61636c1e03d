"""Both sides of a session: what is kept for a connection that may be cut. Cuts are in test_connection.py and the
simulation."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from dray.desk.stream import Stream
from dray.desk.wire import Malformed


class Side:
    """Sends numbers; it is its own connection too."""

    def __init__(self) -> None:
        self.stream, self.sent = Stream(), 0
        self.wire = deque[bytes]()  # to the other side

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
        else:
            self.stream.receive(frame)


def test_what_has_arrived_is_not_kept_for_long() -> None:
    one, other = Side(), Side()
    for each in (one, other):
        each.send(each.stream.count())
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
