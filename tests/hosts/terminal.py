"""A terminal in the test's own process, and what a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

PATIENCE_S = 60.0


class Terminal:
    """Reads all that is written to `stream`, as it comes."""

    def __init__(self, columns: int = 100) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
        self.stream: TextIO = os.fdopen(theirs, "w", buffering=1)
        self.written = ""
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        data = b""
        while True:
            try:
                data += os.read(self._ours, 4096)
            except OSError:  # the other end is closed
                return
            with self._more:
                self.written = data.decode(errors="ignore")
                self._more.notify_all()

    def wait_for(self, pattern: str) -> None:
        """Wait until this has been written."""
        with self._more:
            found = self._more.wait_for(lambda: re.search(pattern, self.written), PATIENCE_S)
        assert found, f"{pattern!r} was never written, but:\n{self.written}"

    def screen(self) -> list[str]:
        """The lines as they look in the end, once everything has been read."""
        self.stream.close()
        self._thread.join(PATIENCE_S)
        lines = [""]
        for piece in re.findall(r"\r|\n|\x1b\[2K|[^\r\n\x1b]+", self.written):
            if piece == "\n":
                lines.append("")
            elif piece == "\x1b[2K":
                lines[-1] = ""
            elif piece != "\r":
                lines[-1] += piece
        return lines


@contextmanager
def terminal(columns: int = 100) -> Iterator[Terminal]:
    """A terminal that standard output and standard error are in the block.

    Not a fixture: pytest sets both again before each test.
    """
    made = Terminal(columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", made.stream)
        patch.setattr(sys, "stderr", made.stream)
        yield made
    made.stream.close()
