"""The metrics of an experiment: appended while it runs, read as one table.

Rows go to `_tail.jsonl` at once, and every few seconds from there to Parquet: the newest part is rewritten with them
until it is large. So any tool can read `metrics/*.parquet` at any time, some seconds behind, and `read_metrics` adds
the rest. If a row repeats, because a trial that resumed from a checkpoint measured some batches again, only the last
one counts, and the parts keep only that one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dray.errors import ExperimentError
from dray.records.by_trial import ByTrial
from dray.text import one_line

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = pa.schema(
    {
        "trial_id": pa.int64(),
        "batches": pa.int64(),
        "epochs": pa.float64(),
        "kind": pa.string(),
        "name": pa.string(),
        "value": pa.float64(),
        "time": pa.float64(),
    }
)
NAMES = ("kind", "name")
SYSTEM = "system"
"""The kind of rows about a trial's use of its machine and its time, which are not metrics of the trial."""
TAIL = "_tail.jsonl"
"""Tools that read the directory as one table skip names with an underscore. The name sorts before the parts, so that
`dray.records.mirror` copies a row that moves meanwhile twice rather than never."""
PACKED = ".packed.jsonl"
"""The previous tail, whose rows are in a part now, for readers that have not read its end; see `growing`."""
NEXT = ".next.jsonl"
"""The next tail while it is being made."""
ROWS_PER_PART = 50_000
PACK_EVERY_S = 5.0
PACK_SHARE = 0.01
"""The largest share of the driver's time for writing parts: slow writes happen less often."""


class MetricsLog:
    """The metrics in `directory`, open for appending by the experiment's driver. Creates the directory."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        directory.mkdir(parents=True, exist_ok=True)
        self._tail = directory / TAIL
        #: For each trial, the last batch in the full parts, and the first batch that was measured again since.
        self._last = ByTrial()
        self._remeasured: dict[int, int] = {}
        self._full, self._open = 0, SCHEMA.empty_table()
        parts = _parts(directory)
        for path in parts:
            part = _read_part(path)
            if path == parts[-1] and part.num_rows < ROWS_PER_PART:
                self._open = part
            else:
                self._count_full(part)
        self._rows, end = _whole(self._tail)
        for row in self._rows:
            self._note(row["trial_id"], row["batches"])
        self._due = clock()
        self._file = self._tail.open("ab")
        self._file.truncate(end)

    def append(self, trial_id: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of one trial. They survive the death of this process once the call returns."""
        added = [{"trial_id": trial_id, **row} for row in rows]
        if added:
            self._file.write("".join([json.dumps(row) + "\n" for row in added]).encode())
            self._file.flush()
            self._rows += added
            for row in added:
                self._note(trial_id, row["batches"])
        if len(self._rows) >= ROWS_PER_PART:
            self._pack()

    def pack(self) -> None:
        """Write rows to Parquet if they are due. Call it regularly, also while nothing is appended."""
        if self._rows and self._clock() >= self._due:
            self._pack()

    def close(self) -> None:
        """Pack the remaining rows. Idempotent."""
        if not self._file.closed:
            self._pack()
            self._file.close()

    def _note(self, trial_id: int, batches: int) -> None:
        if batches <= self._last[trial_id]:
            self._remeasured[trial_id] = min(batches, self._remeasured.get(trial_id, batches))

    def _count_full(self, part: pa.Table) -> None:
        self._full += 1
        last = part.select(["trial_id", "batches"]).group_by("trial_id").aggregate([("batches", "max")])
        for trial_id, batches in zip(last["trial_id"].to_pylist(), last["batches_max"].to_pylist(), strict=True):
            self._last[trial_id] = max(batches, self._last[trial_id])

    def _pack(self) -> None:
        """Move the tail into the newest part. A kill in between leaves rows in both; readers count them once."""
        began = self._clock()
        if self._rows:
            packed = _deduplicated(pa.concat_tables([self._open, _table(self._rows)]))
            self._drop_remeasured(packed)
            self._write(self._full + 1, packed)
            self._open = packed
            if packed.num_rows >= ROWS_PER_PART:
                self._count_full(packed)
                self._open = SCHEMA.empty_table()
            # The tail is not truncated: a reader may not have read its end. The next one is opened first, because that
            # may fail on a full disk.
            fresh = self._tail.with_name(NEXT)
            file = fresh.open("ab")
            self._tail.rename(self._tail.with_name(PACKED))
            fresh.rename(self._tail)
            self._file.close()
            self._file = file
        self._rows = []
        pa.default_memory_pool().release_unused()  # otherwise the pool keeps tens of MB
        now = self._clock()
        self._due = now + max(PACK_EVERY_S, (now - began) / PACK_SHARE)

    def _drop_remeasured(self, packed: pa.Table) -> None:
        if not self._remeasured:
            return
        for number in range(1, self._full + 1):
            part = _read_part(self._path(number))
            trials = part["trial_id"].to_numpy()
            since = np.array(
                [self._remeasured.get(trial, np.iinfo(np.int64).max) for trial in trials.tolist()], np.int64
            )
            if (part["batches"].to_numpy() >= since).any():
                kept = _deduplicated(pa.concat_tables([part, packed]), among=part.num_rows)
                if kept.num_rows < part.num_rows:
                    self._write(number, kept)
        self._remeasured.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"part-{number:05}.parquet"

    def _write(self, number: int, table: pa.Table) -> None:
        temporary = self._directory / f".part-{number:05}.tmp"
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            # A power failure must not replace a complete part with an empty one.
            os.fsync(file.fileno())
        os.replace(temporary, self._path(number))


def read_metrics(directory: Path) -> pd.DataFrame:
    """All rows, sorted by trial, batches, kind, name: columns trial_id, batches, epochs, kind, name, value, time.

    Works while another process appends rows.
    """
    return _read(directory, system=False)


def read_system(directory: Path, trials: Collection[int] | None = None) -> pd.DataFrame:
    """The rows of kind "system", which `read_metrics` leaves out; of these trials, or of all."""
    return _read(directory, system=True, trials=None if trials is None else list(trials))


def read_trials(directory: Path, trials: Collection[int]) -> pd.DataFrame:
    """The rows of these trials, as from `read_metrics`."""
    return _read(directory, system=False, trials=list(trials))


def read_series(directory: Path, kind: str, name: str, trials: Collection[int] | None = None) -> pd.DataFrame:
    """The rows of one metric, as from `read_metrics`; of these trials, or of all."""
    return _read(directory, system=kind == SYSTEM, trials=None if trials is None else list(trials), series=(kind, name))


def read_parts(directory: Path) -> pa.Table:
    """The rows in Parquet, in the order of writing; kinds and names are dictionary-encoded."""
    names = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema({name: names if name in NAMES else SCHEMA.field(name).type for name in SCHEMA.names})
    parts = [_read_part(path, schema) for path in _parts(directory)] or [schema.empty_table()]
    return pa.concat_tables(parts) if len(parts) > 1 else parts[0]


def _read(
    directory: Path, *, system: bool, trials: list[int] | None = None, series: tuple[str, str] | None = None
) -> pd.DataFrame:
    # The tail first: rows that move to a part meanwhile are read twice rather than never.
    rows, _ = _whole(directory / TAIL)
    chosen = None if trials is None else set(trials)
    tail = _table(
        [
            row
            for row in rows
            if (chosen is None or row.get("trial_id") in chosen)
            and (series is None or (row.get("kind"), row.get("name")) == series)
        ]
    )
    wanted: list[tuple[str, str, Any]] = [] if trials is None else [("trial_id", "in", trials)]
    wanted += [] if series is None else [("kind", "==", series[0]), ("name", "==", series[1])]
    try:
        parts = [
            pq.read_table(path, columns=SCHEMA.names, filters=wanted or None).cast(SCHEMA) for path in _parts(directory)
        ]
    except pa.ArrowInvalid as error:
        raise ExperimentError(f"the metrics in {directory} can't be read: {one_line(error)}") from error
    table = pa.concat_tables([*parts, tail])
    order = _latest(table)
    is_system = np.array(table["kind"].to_pylist(), object) == SYSTEM
    found: pd.DataFrame = table.take(order[is_system[order] == system]).to_pandas()
    return found


def _deduplicated(table: pa.Table, among: int | None = None) -> pa.Table:
    """The rows that do not repeat later, in their order; with `among`, only those of the first so many rows."""
    kept = np.sort(_latest(table))
    return table.take(kept[kept < (table.num_rows if among is None else among)])


def _latest(table: pa.Table) -> np.ndarray[Any, Any]:
    """Indices that sort the rows by trial, batches, kind, name, keeping only the last of equal rows."""
    columns = [table["trial_id"].to_numpy(), table["batches"].to_numpy()]
    for name in NAMES:
        column = table[name].combine_chunks().dictionary_encode()
        rank = np.argsort(np.argsort(np.array(column.dictionary.to_pylist(), object)))
        columns.append(rank.astype(np.int64)[column.indices.to_numpy()])
    # One number for all four if they fit: sorting it is three times as fast.
    sizes = [1 + int(column.max(initial=0)) for column in columns]
    if math.prod(sizes) < 2**62 and all(int(column.min(initial=0)) >= 0 for column in columns):
        key = columns[0]
        for column, size in zip(columns[1:], sizes[1:], strict=True):
            key = key * size + column
        columns = [key]
    order = np.lexsort(columns[::-1]) if len(columns) > 1 else np.argsort(columns[0], kind="stable")
    last = np.ones(len(order), bool)
    last[:-1] = np.logical_or.reduce([np.diff(column[order]) != 0 for column in columns])
    return order[last]


def _parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("part-*.parquet"))


def _read_part(path: Path, schema: pa.Schema = SCHEMA) -> pa.Table:
    names = [name for name in NAMES if pa.types.is_dictionary(schema.field(name).type)]
    # `read_table` takes three times as long for a small part.
    part = pq.ParquetFile(pa.BufferReader(path.read_bytes()), read_dictionary=names)
    table = part.read(columns=schema.names, use_threads=False)
    return table if table.schema.equals(schema) else table.cast(schema)


def _whole(tail: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a tail, which need not exist, before the first incomplete one, and the offset of their end.

    After a kill only the last row can be incomplete; after a power failure, any row.
    """
    rows, end = list[dict[str, Any]](), 0
    for line in tail.read_bytes().split(b"\n")[:-1] if tail.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
        end += len(line) + 1
    return rows, end


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    for name in ("epochs", "value", "time"):  # Arrow does not accept a bool as a number
        columns[name] = [None if value is None else float(value) for value in columns[name]]
    return pa.table(columns, SCHEMA)
