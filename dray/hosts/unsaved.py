"""Rows of metrics since the last committed checkpoint; the next checkpoint carries them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Staged(NamedTuple):
    """Metrics that a staged checkpoint carries."""

    rows: Sequence[dict[str, Any]]  # reported since the last commit
    value: float | None  # the search's metric at the checkpoint's batch, if already known
    staged_at: float  # by `time.monotonic`


class UnsavedRows:
    """Rows in order, each with the `batches` at which it was measured.

    One thread calls `add` and `stage`. Another may commit a checkpoint: `take` its rows, then set `saved`.
    """

    def __init__(self) -> None:
        self.saved = -1  # batches at the last committed checkpoint
        self._rows: deque[dict[str, Any]] = deque()
        self._staged: dict[Path, Staged] = {}

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            if row["batches"] < self.saved:  # another run has begun, from the start
                self.saved = -1
            self._rows.append(row)
        self._drop_saved()

    def stage(self, staging: Path, value: float | None = None) -> None:
        """Keep the current rows, and a value, for the checkpoint that is staged in this directory."""
        self._drop_saved()
        for path in list(self._staged):
            if not path.exists():  # writing it failed
                self._staged.pop(path, None)
        self._staged[staging] = Staged(list(self._rows), value, time.monotonic())

    def take(self, staging: Path) -> Staged:
        """Remove and return the metrics kept for a checkpoint that is being committed."""
        return self._staged.pop(staging)

    def _drop_saved(self) -> None:
        while self._rows and self._rows[0]["batches"] <= self.saved:
            self._rows.popleft()
