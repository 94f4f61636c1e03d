"""A line that stays below all other output, at the bottom of a terminal or a notebook cell.

rich's `Live` won't do: it takes a millisecond to draw, wraps the program's own output, and sends standard output to
standard error even if only one of them is a terminal.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, TextIO, cast

_ERASE = "\r\x1b[2K"


class TerminalLine:
    """The last line of the terminal that standard error goes to. A context manager.

    Within the block, the program's output appears above the line. The line is not drawn while the program is in the
    middle of a line itself, such as its own progress bar, or in a debugger, whose prompt does not pass through here.
    """

    every_s = 0.0

    def __init__(self) -> None:
        self._terminal = sys.stderr
        self._lock = threading.RLock()  # a signal handler may print
        self._pid = os.getpid()
        self._text = ""
        self._midline = False
        self._open = False
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> TerminalLine:
        above: dict[Any, TextIO] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                above[stream] = cast(TextIO, _StreamAboveLine(stream, self))
                setattr(sys, name, above[stream])
                self._restore.callback(_put_back, name, above[stream], stream)
        for handler in _stream_handlers():
            if handler.stream in above:
                self._restore.callback(handler.setStream, handler.stream)
                handler.setStream(above[handler.stream])
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._write(_ERASE if not self._midline else "")
            self._open = False
        self._restore.close()

    def width(self) -> int:
        try:
            columns = os.get_terminal_size(self._terminal.fileno()).columns
        except OSError:
            columns = 0
        return (columns or 80) - 1

    def draw(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._open and not self._midline and not _is_debugging():
                self._write(f"{_ERASE}{text}")

    def above(self, stream: TextIO, text: str) -> int:
        if not self._open:
            return stream.write(text)
        if os.getpid() != self._pid:  # in a forked worker of a DataLoader: the line and its lock are the parent's
            self._write(_ERASE)
            return stream.write(text)
        with self._lock:
            if not self._midline:
                self._write(_ERASE)
            written = stream.write(text)
            stream.flush()
            if text:
                self._midline = not text.endswith("\n")
            if not self._midline and not _is_debugging():
                self._write(self._text)
        return written

    def _write(self, text: str) -> None:
        # Bypass the stream's buffer: a process forked meanwhile would inherit its lock.
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(self._terminal.fileno(), text.encode(self._terminal.encoding or "utf-8", "replace"))


class _StreamAboveLine:
    """Stands in for `sys.stdout` or `sys.stderr`, and writes above the line."""

    def __init__(self, stream: TextIO, line: TerminalLine) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.above(self._stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class NotebookLine:
    """An output of a notebook cell that each drawing replaces. A context manager like `TerminalLine`."""

    every_s = 1.0

    def __init__(self) -> None:
        self._ipython = importlib.import_module("IPython.display")  # every notebook has it

    def __enter__(self) -> NotebookLine:
        self._handle = self._ipython.display(self._ipython.HTML(self.as_html("")), display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.draw("")

    def width(self) -> int:
        return 110

    def draw(self, picture: Any) -> None:
        self._handle.update(self._ipython.HTML(self.as_html(picture)))

    def as_html(self, picture: Any) -> str:
        return f"<pre>{html.escape(picture)}</pre>" if picture else ""


def bottom_line() -> TerminalLine | NotebookLine | None:
    """The line of this terminal or notebook; None if standard error is a file or a pipe."""
    if _in_notebook():
        return NotebookLine()
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalLine()
    return None


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]


def _is_debugging() -> bool:
    """Whether a debugger (pdb, or another one built on `bdb`) waits for commands in any thread."""
    bdb = sys.modules.get("bdb")
    if bdb is None:
        return False
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_name == "interaction" and isinstance(frame.f_locals.get("self"), bdb.Bdb):
                return True
            frame = frame.f_back
    return False


def _put_back(name: str, ours: TextIO, before: TextIO) -> None:
    if getattr(sys, name) is ours:  # otherwise the program has replaced it
        setattr(sys, name, before)
