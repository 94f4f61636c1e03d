"""Standard error that survives the closing of its terminal: the run continues, or saves, without output."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import IO, Any, cast


def stderr() -> IO[str]:
    """``sys.stderr``, which drops what is written to a terminal that was closed."""
    return cast("IO[str]", _Stderr())


class _Stderr:
    def __init__(self) -> None:
        # Not looked up for each write: while rich draws a picture, sys.stderr is its own, and names the file below.
        self._file = sys.stderr

    def write(self, text: str) -> int:
        with _closed_terminal_ignored():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _closed_terminal_ignored():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _closed_terminal_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
