"""Standard error that may be a terminal which is closed meanwhile: what runs continues, or saves, without it."""

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
    def write(self, text: str) -> int:
        with _closed_terminal_ignored():
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with _closed_terminal_ignored():
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextlib.contextmanager
def _closed_terminal_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
