"""The incremental reader of an experiment's metrics: after the first call, it reads only new rows.

The writer of metrics moves rows from its tail to Parquet every few seconds and begins a new tail. The old tail stays
for a while under another name, and its readers have it open, so they can read its end first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dray.records.metrics import PACKED, TAIL, check, read_parts
from searchers import rows


class GrowingMetrics:
    """The rows of a directory of `dray.records.metrics.MetricsLog`, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._partial = b""
        self._lines = 0  # that were read
        self._began = False

    def new_rows(self) -> tuple[pa.Table | None, list[dict[str, Any]]]:
        """The rows since the last call, in the order of writing; rows may repeat.

        Returns:
            The rows of the parts if everything was read anew, else None; and the rows of the tail. Rows from the parts
            replace all rows returned before.
        """
        if not self._began:
            return self._from_the_start()
        new = self._read()
        try:
            now = os.stat(self._directory / TAIL).st_ino
        except FileNotFoundError:  # between two tails
            return None, new
        if self._file is not None and os.fstat(self._file.fileno()).st_ino == now:
            return None, new
        new += self._read()  # rows written to the old tail since the read above
        if self._file is None or not self._is_packed(self._file):  # more than the last tail may have been packed
            return self._from_the_start()
        self._open()
        return None, new + self._read()

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
            with rows.readable(self._directory / TAIL):
                self._file = open(self._directory / TAIL, "rb", opener=rows.regular)  # noqa: SIM115
        except FileNotFoundError:
            self._file = None
        self._partial, self._lines = b"", 0

    def _read(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        data = self._partial + self._file.read()
        whole, self._partial = data[: (end := data.rfind(b"\n") + 1)], data[end:]
        found = rows.lenient(whole, self._directory / TAIL, check, first=self._lines + 1)
        self._lines += whole.count(b"\n")
        return found

    def _is_packed(self, file: IO[bytes]) -> bool:
        """Whether this is the tail before the current one."""
        try:
            return os.stat(self._directory / PACKED).st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False
