"""The speed of a local run's training or of a search, from which the remaining time is estimated."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0  # speed is measured over the last half of the time, and over at least this long


class Pace:
    """Recent work, and the time that it took."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()
        self._began = 0.0

    def begin(self) -> None:
        """Forget earlier work."""
        self._seen.clear()

    def note(self, now: float, done: float, busy_s: float) -> None:
        """Note the total work `done` in `busy_s` seconds of working on it; `now` is a monotonic clock's time."""
        self._began = self._began if self._seen else now
        self._seen.append((now, done, busy_s))
        while len(self._seen) > 2 and now - self._seen[1][0] >= max(WINDOW_S, (now - self._began) / 2):
            self._seen.popleft()

    def recent(self) -> tuple[float, float, float]:
        """(seconds, work done in them, seconds spent working); zeros before the second note."""
        if not self._seen:
            return 0.0, 0.0, 0.0
        first, last = self._seen[0], self._seen[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]
