"""The files of a checkpoint as they are written: hashed, and each error told as it is."""

from __future__ import annotations

import hashlib
import io

from typing_extensions import Buffer

from dray.storage.disk import begin_writing

PIECE_BYTES = 1 << 20
"""Files are written and hashed in pieces of this size, which fit the processor's cache."""
PASSED_ON_BYTES = 8 << 20
"""How much of a file that is not read soon may be in the page cache before it is flushed to the disk."""


class ChecksumWriter(io.FileIO):
    """A file for `torch.save` that is hashed while it is written, and raises the error that a write failed with.

    torch would hide that error behind one of its own. So writes seem to succeed until the file is closed. torch writes
    a small tensor in seven pieces, which are collected here. Python's buffered files are not used for this: a process
    forked meanwhile (a DataLoader's worker) could write its copy of the buffer too.
    """

    def __init__(self, path: str, read_soon: bool) -> None:
        super().__init__(path, "wb")
        self._read_soon = read_soon
        self._left = 0
        self.digest = hashlib.sha256()
        self._small = bytearray()
        self._error: OSError | None = None

    def __exit__(self, *_: object) -> None:
        self._pass_on(memoryview(self._small))
        self.close()
        if self._error is not None:
            raise self._error

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(self._small) + len(view) <= PIECE_BYTES:
            self._small += view
        else:
            small, self._small = self._small, bytearray()
            self._pass_on(memoryview(small))
            self._pass_on(view)
        return len(view)

    def _pass_on(self, view: memoryview) -> None:
        done = 0
        while self._error is None and done < len(view):
            piece = view[done : done + PIECE_BYTES]
            try:
                written = super().write(piece)
            except OSError as error:
                self._error = error
            else:
                self.digest.update(piece[:written])
                done += written
                self._left += written
                if self._left >= PASSED_ON_BYTES and not self._read_soon:
                    begin_writing(self.fileno())
                    self._left = 0
