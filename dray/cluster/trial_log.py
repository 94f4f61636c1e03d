"""What a trial prints and logs, in a file of its own: also what its subprocesses and its libraries print."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_SHOWN_LINES = 20
_SHOWN_BYTES = 20_000


class TrialLog:
    """The file that ``printed_to`` writes.

    Attributes:
        path, descriptor: of the file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self._began = os.fstat(descriptor).st_size

    def end(self) -> str:
        """The last lines of what was printed since the beginning of the block, for an error."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        size = os.fstat(self.descriptor).st_size
        with self.path.open("rb") as file:
            file.seek(max(self._began, size - _SHOWN_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    | {line}" for line in lines[-_SHOWN_LINES:]) or "    | (nothing)"


@contextlib.contextmanager
def printed_to(path: Path) -> Iterator[TrialLog]:
    """Append to ``path`` whatever this process and its children print in the block. Lines are written at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = _lines(1), _lines(2)
        try:
            yield TrialLog(path, descriptor)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError):  # closed by the trial
                    stream.flush()
    finally:
        sys.stdout, sys.stderr = before
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for number in (*saved, descriptor):
            os.close(number)


def _lines(descriptor: int) -> IO[str]:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def log_as_python_starts() -> None:
    """No handlers, so that a program's own ``logging.basicConfig()`` has its effect."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)


def log_as_the_command_line(log_format: str) -> None:
    """What ``dray experiment create --local`` shows of a trial: all from INFO on."""
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    root.handlers[0].setFormatter(logging.Formatter(log_format))
    root.setLevel(logging.INFO)
