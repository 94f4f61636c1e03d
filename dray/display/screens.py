"""Screens for a run's status: below the lines of a terminal, which may be closed meanwhile, or in a notebook's cell."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from collections.abc import Iterator
from typing import IO, Any, TypeAlias, cast

from rich.console import Console, RenderableType
from rich.live import Live

from dray.hosts.bottom_line import NotebookLine

NOTEBOOK = 100, 30
"""Size of the picture in a notebook, in columns and lines."""


class TerminalScreen:
    """Draws the picture below all printed lines, and removes it at the end."""

    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        # The driver's own loop draws it, without a thread.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return self._console.size

    def draw(self, picture: RenderableType) -> None:
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        self._live.stop()


class NotebookScreen(NotebookLine):
    """Draws the picture as one output of the notebook's cell, replacing the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.__enter__()

    def size(self) -> tuple[int, int]:
        return NOTEBOOK

    def close(self) -> None:
        """No-op: the last picture stays in the notebook."""

    def as_html(self, picture: RenderableType) -> str:
        console = Console(file=io.StringIO(), record=True, width=NOTEBOOK[0], force_jupyter=False)
        console.print(picture)
        code = '<pre style="line-height:normal;font-family:Menlo,Consolas,monospace">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=code)


Screen: TypeAlias = TerminalScreen | NotebookScreen
"""Shows a picture, and replaces it with the next one."""


def screen_of(console: Console) -> Screen | None:
    """A new screen; None if the console can't replace what it shows."""
    if console.is_terminal:
        return TerminalScreen(console)
    return NotebookScreen() if console.is_jupyter else None


def stderr() -> IO[str]:
    """``sys.stderr``, but output to a closed terminal is dropped, so that the run continues."""
    return cast("IO[str]", _Stderr())


class _Stderr:
    def __init__(self) -> None:
        # Looked up once: while rich draws a picture, sys.stderr is rich's own wrapper of this file.
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
