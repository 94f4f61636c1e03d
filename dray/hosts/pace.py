"""How fast work advances, for the time that is left of it: of a local run's training, and of a search."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
"""Speed is measured over the last half of the time, and over at least this long."""


class Pace:
    """What was done lately, and in how long."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()
        self._began = 0.0

    def begin(self) -> None:
        """Forget what came before."""
        self._seen.clear()

    def note(self, now: float, done: float, busy_s: float) -> None:
        """So much is done, after so many seconds in which it was worked on; `now` is of a monotonic clock."""
        self._began = self._began if self._seen else now
        self._seen.append((now, done, busy_s))
        while len(self._seen) > 2 and now - self._seen[1][0] >= max(WINDOW_S, (now - self._began) / 2):
            self._seen.popleft()

    def lately(self) -> tuple[float, float, float]:
        """Seconds, what was done in them, and for how many of them it was worked on; zeros before the second note."""
        if not self._seen:
            return 0.0, 0.0, 0.0
        first, last = self._seen[0], self._seen[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]
