"""Incremental readers of an experiment's journal and metrics: after the first call, they read only new records.

The writer of metrics moves rows from its tail to Parquet every few seconds and begins a new tail. The old tail stays
for a while under another name, and its readers have it open, so they can read its end first.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dray.records.metrics import PACKED, TAIL, read_parts
from searchers.journal import Journal


class GrowingJournal:
    """The records of a journal, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # offset of the first unread byte

    def new_records(self) -> tuple[list[dict[str, Any]], bool]:
        """The records since the last call, and whether the file was read anew because it has become shorter."""
        try:
            with self._path.open("rb") as file:
                is_another = file.seek(0, os.SEEK_END) < self._end
                self._end = 0 if is_another else self._end
                file.seek(self._end)
                data = file.read()
        except FileNotFoundError:
            return [], False
        data = data[: data.rfind(b"\n") + 1]
        records = Journal.parse(data, where=str(self._path))
        if len(records) < data.count(b"\n"):  # a line reached the disk only in part: resuming removes it
            data = b"".join(data.splitlines(keepends=True)[: len(records)])
        self._end += len(data)
        return records, is_another


class GrowingMetrics:
    """The rows of a directory of `dray.records.metrics.MetricsLog`, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._partial = b""
        self._began = False

    def new_rows(self) -> tuple[pa.Table | None, list[dict[str, Any]]]:
        """The rows since the last call, in the order of writing; rows may repeat.

        Returns:
            The rows of the parts if everything was read anew, else None; and the rows of the tail. Rows from the parts
            replace all rows returned before.
        """
        if not self._began:
            return self._from_the_start()
        rows = self._read()
        try:
            now = os.stat(self._directory / TAIL).st_ino
        except FileNotFoundError:  # between two tails
            return None, rows
        if self._file is not None and os.fstat(self._file.fileno()).st_ino == now:
            return None, rows
        rows += self._read()  # rows written to the old tail since the read above
        if self._file is None or not self._is_packed(self._file):  # more than the last tail may have been packed
            return self._from_the_start()
        self._open()
        return None, rows + self._read()

    def close(self) -> None:
        """Close the open file. The next call reads everything anew."""
        if self._file is not None:
            self._file.close()
        self._file, self._partial, self._began = None, b"", False

    def _from_the_start(self) -> tuple[pa.Table, list[dict[str, Any]]]:
        # The tail first: rows that move to a part meanwhile are read twice rather than never.
        self.close()
        self._open()
        tail, parts = self._read(), read_parts(self._directory)
        self._began = True
        return parts, tail

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        try:
            self._file = (self._directory / TAIL).open("rb")
        except FileNotFoundError:
            self._file = None
        self._partial = b""

    def _read(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:  # torn by a power failure
                continue
        return rows

    def _is_packed(self, file: IO[bytes]) -> bool:
        """Whether this is the tail before the current one."""
        try:
            return os.stat(self._directory / PACKED).st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False


def numpy_of(column: pa.ChunkedArray | pa.Array) -> Any:
    """A column of numbers; null is NaN. Arrow's own methods import pandas, which takes half a second."""
    import numpy as np

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    present, values = array.buffers()
    kind = np.dtype(str(array.type).replace("double", "float64"))
    found = np.frombuffer(values or b"", kind, len(array), array.offset * kind.itemsize)
    if not array.null_count:
        return found
    bits = np.unpackbits(np.frombuffer(present, np.uint8), bitorder="little", count=array.offset + len(array))
    return np.where(bits[array.offset :], found, math.nan)
