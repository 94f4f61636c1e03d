"""Rows of metrics that no committed checkpoint has; the next checkpoint carries them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Staged(NamedTuple):
    """What a staged checkpoint carries.

    Attributes:
        rows: reported since the last commit.
        value: the search's metric at the checkpoint's batch, if it was known when the checkpoint was staged.
        began: when it was staged, by `time.monotonic`.
    """

    rows: Sequence[dict[str, Any]]
    value: float | None
    began: float


class UnsavedRows:
    """Rows in order, each with the `batches` at which it was measured. `saved`: batches of the last committed
    checkpoint.

    `add` and `stage` belong to one thread. A checkpoint may be committed by another: `take`, then set `saved`.
    """

    def __init__(self) -> None:
        self.saved = -1
        self._rows: deque[dict[str, Any]] = deque()
        self._staged: dict[Path, Staged] = {}

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add reported rows."""
        for row in rows:
            if row["batches"] < self.saved:  # another run has begun, from the start
                self.saved = -1
            self._rows.append(row)
        self._drop_saved()

    def stage(self, staging: Path, value: float | None = None) -> None:
        """Keep the present rows, and a value, for the checkpoint that is staged in this directory."""
        self._drop_saved()
        for path in list(self._staged):
            if not path.exists():  # writing it failed
                self._staged.pop(path, None)
        self._staged[staging] = Staged(list(self._rows), value, time.monotonic())

    def take(self, staging: Path) -> Staged:
        """What was kept for a checkpoint that is being committed."""
        return self._staged.pop(staging)

    def _drop_saved(self) -> None:
        while self._rows and self._rows[0]["batches"] <= self.saved:
            self._rows.popleft()
