"""Checksums of files while they are written. Write errors are re-raised unchanged."""

from __future__ import annotations

import hashlib
import io

from typing_extensions import Buffer

from dray.storage.disk import begin_writing
from dray.storage.manifest import Listed

PIECE_BYTES = 1 << 20  # files are written and hashed in pieces of this size, which fit the processor's cache
FLUSH_BYTES = 8 << 20  # how much of a file that is not read soon may be in the page cache


class ChecksumWriter(io.FileIO):
    """A file for `torch.save` that computes its SHA-256 while it is written.

    A write error is raised when the block ends: raised in `write`, torch would replace it with its own. torch writes a
    small tensor in seven pieces, which are collected here. Python's buffered files are no alternative: a process forked
    meanwhile (a DataLoader worker) could write its copy of the buffer too.
    """

    def __init__(self, path: str, read_soon: bool) -> None:
        super().__init__(path, "wb")
        self._read_soon = read_soon
        self._size = self._flushed = 0
        self._digest = hashlib.sha256()
        self._small = bytearray()
        self._error: OSError | None = None

    @property
    def listed(self) -> Listed:
        """The file's entry in the manifest, once it is closed."""
        return Listed(self._size, self._digest.hexdigest())

    def __exit__(self, *_: object) -> None:
        self._write_through(memoryview(self._small))
        self.close()
        if self._error is not None:
            raise self._error

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(self._small) + len(view) <= PIECE_BYTES:
            self._small += view
        else:
            small, self._small = self._small, bytearray()
            self._write_through(memoryview(small))
            self._write_through(view)
        return len(view)

    def _write_through(self, view: memoryview) -> None:
        done = 0
        while self._error is None and done < len(view):
            piece = view[done : done + PIECE_BYTES]
            try:
                written = super().write(piece)
            except OSError as error:
                self._error = error
            else:
                self._digest.update(piece[:written])
                done += written
                self._size += written
                if self._size >= self._flushed + FLUSH_BYTES and not self._read_soon:
                    begin_writing(self.fileno())
                    self._flushed = self._size
