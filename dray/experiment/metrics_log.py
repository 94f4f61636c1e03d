"""The metrics of an experiment: appended while it runs, read as one table.

Rows go to `tail.jsonl`, and from there, in large pieces, to Parquet. A row that comes twice (a trial that went on from
a checkpoint measures some batches again) counts once, the last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

COLUMNS = {
    "trial_id": "int64",
    "batches": "int64",
    "epochs": "float64",
    "kind": "str",
    "name": "str",
    "value": "float64",
    "time": "float64",
}
KEY = ["trial_id", "batches", "kind", "name"]
ROWS_PER_PART = 50_000


class MetricsLog:
    """The metrics below `directory`, open for appending by the experiment's driver alone.

    Args:
        directory: made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._tail = directory / "tail.jsonl"
        _cut_torn_line(self._tail)
        self._rows = len(_tail_rows(self._tail))
        self._file = self._tail.open("ab")

    def append(self, trial_id: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of one trial; they survive this process's death when the call returns."""
        lines = [json.dumps({"trial_id": trial_id, **row}).encode() + b"\n" for row in rows]
        if not lines:
            return
        self._file.write(b"".join(lines))
        self._file.flush()
        self._rows += len(lines)
        if self._rows >= ROWS_PER_PART:
            self._pack()

    def close(self) -> None:
        """Pack what is left. Idempotent."""
        if not self._file.closed:
            self._pack()
            self._file.close()

    def _pack(self) -> None:
        """Move the tail into a new Parquet part. Killed in between, some rows are in both, and are read once."""
        if self._rows:
            number = 1 + max((int(path.stem.split("-")[1]) for path in _parts(self._directory)), default=0)
            unnamed = self._directory / f".part-{number:05}.tmp"
            _frame(_tail_rows(self._tail)).to_parquet(unnamed, index=False)
            os.replace(unnamed, self._directory / f"part-{number:05}.parquet")
        self._file.truncate(0)
        self._rows = 0


def read_metrics(directory: Path) -> pd.DataFrame:
    """All rows, in order of trial, batches, kind, name: columns trial_id, batches, epochs, kind, name, value, time.

    Works while another process appends.
    """
    # The tail first: rows that move to a part meanwhile are then seen twice, not never.
    tail = _frame(_tail_rows(directory / "tail.jsonl"))
    frames = [pd.read_parquet(path) for path in _parts(directory)]
    table = pd.concat([*frames, tail], ignore_index=True) if frames else tail
    table = table.drop_duplicates(KEY, keep="last").sort_values(KEY, kind="stable", ignore_index=True)
    return table.astype({"time": "float64"})


def _parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("part-*.parquet"))


def _tail_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
