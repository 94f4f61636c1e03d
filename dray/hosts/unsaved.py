"""What was reported since the last checkpoint; the next one carries it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any


class Unsaved:
    """Rows of metrics in order, each with the `batches` at which it was measured.

    Attributes:
        saved: batches of the last checkpoint that was committed. Another thread may set it; all else is for one thread.
    """

    def __init__(self) -> None:
        self.saved = -1
        self._rows: deque[dict[str, Any]] = deque()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add what was reported."""
        for row in rows:
            if row["batches"] < self.saved:  # another run has begun from the start
                self.saved = -1
            self._rows.append(row)
        self._forget()

    def now(self) -> list[dict[str, Any]]:
        """The rows that a checkpoint made now has to carry."""
        self._forget()
        return list(self._rows)

    def _forget(self) -> None:
        while self._rows and self._rows[0]["batches"] <= self.saved:
            self._rows.popleft()
