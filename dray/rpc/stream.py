"""One side of a session, whose messages arrive exactly once and in order however often its connection is lost. No I/O.

Both sides count messages. A frame has the number of messages that its sender has received, and at most one message. A
message is kept until the other side has acknowledged it; on a new connection, both sides first exchange their counts,
and then send the messages that the other side lacks.
"""

from __future__ import annotations

from collections import deque

from dray.rpc.channel import Channel
from dray.rpc.wire import Malformed

_COUNT = 8
END = b"\xff" * _COUNT  # the frame that ends a session: nothing comes after it
_OWED = 32
"""Messages, or units of 32 KiB of them, after which a side without messages of its own acknowledges them."""


class Stream:
    """The messages of one side. `channel`: the current connection, or None. `is_ending`: nothing more is sent."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.is_ending = False
        self._received = self._confirmed = self._owed = 0
        self._kept: deque[bytes] = deque()  # sent, after the first `_confirmed`

    def resume(self, channel: Channel, first: bytes) -> None:
        """Continue on a new connection, given its first frame, which is the other side's `count`."""
        self._confirm(first)
        if self.channel is not None:
            self.channel.abort()
        self.channel = channel
        for message in self._kept:
            channel.send(self.count(), message)
        if self.is_ending:
            channel.send(END)

    def send(self, message: bytes) -> None:
        """Send a nonempty message; a no-op after `end`."""
        if not self.is_ending:
            self._kept.append(message)
            if self.channel is not None:
                self.channel.send(self.count(), message)

    def end(self) -> None:
        """Tell the other side that no more messages follow."""
        self.is_ending = True
        if self.channel is not None:
            self.channel.send(END)

    def receive(self, frame: bytes) -> memoryview | None:
        """Process a frame, and return its message, if it has one."""
        self._confirm(frame)
        if len(frame) == _COUNT:
            return None
        self._received += 1
        self._owed += 1 + (len(frame) >> 15)
        if self._owed >= _OWED and self.channel is not None:
            self.channel.send(self.count())
        return memoryview(frame)[_COUNT:]

    def count(self) -> bytes:
        """A frame without a message, which acknowledges all received messages."""
        self._owed = 0
        return self._received.to_bytes(_COUNT, "big")

    def _confirm(self, frame: bytes) -> None:
        count = int.from_bytes(frame[:_COUNT], "big")
        if len(frame) < _COUNT or not 0 <= count - self._confirmed <= len(self._kept):
            raise Malformed("it acknowledges what was never sent")
        for _ in range(count - self._confirmed):
            self._kept.popleft()
        self._confirmed = count
