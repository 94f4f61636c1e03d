"""The metrics of an experiment: appended while it runs, read as one table.

Rows go to `_tail.jsonl` at once, and every few seconds from there to Parquet: the newest part is rewritten with them
until it is large. So any tool can read `metrics/*.parquet` at any time, some seconds behind, and `read_metrics` adds
the rest. If a row repeats, because a trial that resumed from a checkpoint measured some batches again, only the last
one counts, and the parts keep only that one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dray.private import replaced
from dray.records.trial_record import ByTrial
from searchers import rows as row_files
from searchers.rows import NUMBER, OPTIONAL_NUMBER, has_fields

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
_MOST_TRIALS = 2**27  # a row of another trial is not one of dray's
_fields_of = has_fields(
    {
        "trial_id": (int,),
        "batches": (int,),
        "epochs": OPTIONAL_NUMBER,
        "kind": (str,),
        "name": (str,),
        "value": (*OPTIONAL_NUMBER, bool),
        "time": NUMBER,
    },
    unbounded="value",
)


class MetricsLog:
    """The metrics in `directory`, open for appending by the experiment's driver. Creates the directory."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        directory.mkdir(parents=True, exist_ok=True)
        self._tail = directory / TAIL
        #: For each trial, the last batch in the full parts, and the first batch that was measured again since.
        self._last = ByTrial()
        self._remeasured: dict[int, int] = {}
        #: The full parts, and the number and the rows of the one that is not.
        self._full = list[Path]()
        self._number, self._open = 1, _empty()
        parts = _parts(directory)
        for path in parts:
            part, self._number = _read_part(path), int(path.stem.removeprefix("part-"))
            if path == parts[-1] and part.num_rows < ROWS_PER_PART:
                self._open = part
            else:
                self._count_full(part)
        row_files.cut_incomplete(self._tail)
        self._rows = _tail_rows(directory)
        for row in self._rows:
            self._note(row["trial_id"], row["batches"])
        self._due = clock()
        self._file = self._tail.open("ab")

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
        self._full.append(self._path(self._number))
        self._number += 1
        last = part.select(["trial_id", "batches"]).group_by("trial_id").aggregate([("batches", "max")])
        for trial_id, batches in zip(last["trial_id"].to_pylist(), last["batches_max"].to_pylist(), strict=True):
            self._last[trial_id] = max(batches, self._last[trial_id])

    def _pack(self) -> None:
        """Move the tail into the newest part. A kill in between leaves rows in both; readers count them once."""
        began = self._clock()
        if self._rows:
            packed = _deduplicated(pa.concat_tables([self._open, _table(self._rows)]))
            self._drop_remeasured(packed)
            self._write(self._path(self._number), packed)
            self._open = packed
            if packed.num_rows >= ROWS_PER_PART:
                self._count_full(packed)
                self._open = _empty()
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
        for path in self._full:
            part = _read_part(path)
            trials = part["trial_id"].to_numpy()
            since = np.array(
                [self._remeasured.get(trial, np.iinfo(np.int64).max) for trial in trials.tolist()], np.int64
            )
            if (part["batches"].to_numpy() >= since).any():
                kept = _deduplicated(pa.concat_tables([part, packed]), among=part.num_rows)
                if kept.num_rows < part.num_rows:
                    self._write(path, kept)
        self._remeasured.clear()

    def _path(self, number: int) -> Path:
        return self._directory / f"part-{number:05}.parquet"

    def _write(self, path: Path, table: pa.Table) -> None:
        with replaced(path) as unnamed, unnamed.open("wb") as file:
            pq.write_table(table, file, write_page_checksum=True)


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


def validated_at(directory: Path, batches: Mapping[int, int]) -> dict[str, dict[int, float]]:
    """The validation metrics of trials, each after its own number of batches: the values by name, then by trial.

    Args:
        batches: by trial.
    """
    tail = _tail_rows(directory)  # first, as in `_read`
    parts = read_parts(directory)
    trials, at = numpy_of(parts["trial_id"]), numpy_of(parts["batches"])
    wanted = np.logical_or.reduce([(trials == trial) & (at == batch) for trial, batch in batches.items()])
    values: dict[str, dict[int, float]] = {}
    rows = [parts.slice(place, 1).to_pylist()[0] for place in np.flatnonzero(wanted)]  # `filter` imports pandas
    for row in [*rows, *tail]:
        if row["kind"] == "validation" and batches.get(row["trial_id"]) == row["batches"]:
            value = row["value"]
            values.setdefault(row["name"], {})[row["trial_id"]] = math.nan if value is None else value
    return dict(sorted(values.items()))


def read_series(directory: Path, kind: str, name: str, trials: Collection[int] | None = None) -> pd.DataFrame:
    """The rows of one metric, as from `read_metrics`; of these trials, or of all."""
    return _read(directory, system=kind == SYSTEM, trials=None if trials is None else list(trials), series=(kind, name))


def read_parts(directory: Path) -> pa.Table:
    """The rows in Parquet, in the order of writing; kinds and names are dictionary-encoded."""
    names = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema({name: names if name in NAMES else SCHEMA.field(name).type for name in SCHEMA.names})
    parts = [_read_part(path, schema) for path in _parts(directory)] or [_empty(schema)]
    return pa.concat_tables(parts) if len(parts) > 1 else parts[0]


def _read(
    directory: Path, *, system: bool, trials: list[int] | None = None, series: tuple[str, str] | None = None
) -> pd.DataFrame:
    # The tail first: rows that move to a part meanwhile are read twice rather than never.
    chosen = None if trials is None else set(trials)
    tail = _table(
        [
            row
            for row in _tail_rows(directory)
            if (chosen is None or row["trial_id"] in chosen)
            and (series is None or (row["kind"], row["name"]) == series)
        ]
    )
    wanted: list[tuple[str, str, Any]] = [] if trials is None else [("trial_id", "in", trials)]
    wanted += [] if series is None else [("kind", "==", series[0]), ("name", "==", series[1])]
    parts = []
    for path in _parts(directory):
        with _readable(path):
            content = pa.BufferReader(path.read_bytes())
            part = pq.read_table(content, columns=SCHEMA.names, filters=wanted or None, page_checksum_verification=True)
            parts.append(part.cast(SCHEMA))
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
    return [path for path in sorted(directory.glob("part-*.parquet")) if path.stem.removeprefix("part-").isdecimal()]


def _read_part(path: Path, schema: pa.Schema = SCHEMA) -> pa.Table:
    names = [name for name in NAMES if pa.types.is_dictionary(schema.field(name).type)]
    with _readable(path):
        # `read_table` takes three times as long for a small part.
        content = pa.BufferReader(path.read_bytes())
        part = pq.ParquetFile(content, read_dictionary=names, page_checksum_verification=True)
        table = part.read(columns=schema.names, use_threads=False)
        table = table if table.schema.equals(schema) else table.cast(schema)
        for name, most in (("trial_id", _MOST_TRIALS), ("batches", 2**63)):
            numbers = numpy_of(table[name])
            if not (0 <= numbers.min(initial=0) <= numbers.max(initial=0) < most):  # NaN where one is missing
                raise ValueError(f"a {name} is missing, or not from 0 to {most}")
    return table


def _readable(part: Path) -> AbstractContextManager[None]:
    remedy = "restore the file from a backup, or move it away to go on without its rows"
    return row_files.readable(part, pa.ArrowException, ValueError, KeyError, remedy=remedy)


def check(row: Any) -> str:
    """What is wrong with a row of a tail; "" if it may have been written."""
    if what := _fields_of(row):
        return what
    for name, most in (("trial_id", _MOST_TRIALS), ("batches", 2**63)):
        if not 0 <= row[name] < most:
            return f"{name} is {row[name]!r:.60}"
    for name in ("epochs", "value"):
        if name not in row:
            return f"it has no {name}"
    value, name = row["value"], row["name"] + row["kind"]
    if row_files.is_too_large(value):
        return f"value is {value!r:.60}"
    return "" if name.isascii() or row_files.is_text(name) else f"its name is {name!r:.60}"


def _tail_rows(directory: Path) -> list[dict[str, Any]]:
    return row_files.lenient(row_files.read(directory / TAIL, missing=b""), directory / TAIL, check)


def _empty(schema: pa.Schema = SCHEMA) -> pa.Table:
    """A table without rows. Arrow's own `empty_table` imports pandas, which takes half a second."""
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    for name in ("epochs", "value", "time"):  # Arrow does not accept a bool as a number
        columns[name] = [None if value is None else float(value) for value in columns[name]]
    return pa.table(columns, SCHEMA)


def numpy_of(column: pa.ChunkedArray | pa.Array) -> Any:
    """A column of numbers; null is NaN. Arrow's own methods import pandas, which takes half a second."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    present, values = array.buffers()
    kind = np.dtype(str(array.type).replace("double", "float64"))
    found = np.frombuffer(values or b"", kind, len(array), array.offset * kind.itemsize)
    if not array.null_count:
        return found
    bits = np.unpackbits(np.frombuffer(present, np.uint8), bitorder="little", count=array.offset + len(array))
    return np.where(bits[array.offset :], found, math.nan)
