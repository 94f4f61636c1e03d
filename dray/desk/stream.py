"""One side of a session, whose messages arrive once each and in order however often its connection is lost. No I/O.

Both sides count messages. A frame has how many its sender has received, and at most one message. A message is kept
until the other side has counted it; on a new connection both sides first exchange their counts, then send what the
other one lacks.
"""

from __future__ import annotations

from collections import deque

from dray.desk.wire import Malformed

_COUNT = 8
END = b"\xff" * _COUNT
"""The frame that ends a session: nothing comes after it."""
_OWED = 32
"""Messages, or units of 32 KiB of them, after which a side that sends nothing acknowledges what it has received."""


class Stream:
    """What one side has sent and received."""

    def __init__(self) -> None:
        self._received = self._confirmed = self._owed = 0
        self._kept: deque[bytes] = deque()  # sent, after the first `_confirmed`

    def send(self, message: bytes) -> tuple[bytes, bytes]:
        """Number a message, which is not empty, and keep it. Returns the parts of its frame."""
        self._kept.append(message)
        return self.count(), message

    def receive(self, frame: bytes) -> memoryview | None:
        """Take a frame; returns its message, if it has one."""
        self._confirm(frame)
        if len(frame) == _COUNT:
            return None
        self._received += 1
        self._owed += 1 + (len(frame) >> 15)
        return memoryview(frame)[_COUNT:]

    def count(self) -> bytes:
        """A frame without a message: how many have been received."""
        self._owed = 0
        return self._received.to_bytes(_COUNT, "big")

    @property
    def owes_count(self) -> bool:
        """Whether it should send one, so that the other side does not keep much."""
        return self._owed >= _OWED

    def resume(self, frame: bytes) -> list[tuple[bytes, bytes]]:
        """Take the first frame of a new connection; returns the frames to send again."""
        self._confirm(frame)
        return [(self.count(), message) for message in self._kept]

    def _confirm(self, frame: bytes) -> None:
        count = int.from_bytes(frame[:_COUNT], "big")
        if len(frame) < _COUNT or not self._confirmed <= count <= self._confirmed + len(self._kept):
            raise Malformed("it acknowledges what was never sent")
        while self._confirmed < count:
            self._kept.popleft()
            self._confirmed += 1
