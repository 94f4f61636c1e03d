"""A terminal that is closed while a picture is drawn on it."""

from __future__ import annotations

import contextlib
import os
import pty
import sys

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dray.display.display import stderr


def test_run_continues_when_its_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w", buffering=1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with Live(console=Console(file=stderr()), auto_refresh=False, transient=True) as live:
        live.update(Text("3 of 8 trials ended"), refresh=True)
        os.close(ours)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(theirs, b"nobody reads this")
        live.update(Text("4 of 8 trials ended"), refresh=True)
        print("a line above the picture", file=sys.stderr)
        live.console.print("another one")
    with contextlib.suppress(OSError):  # it still holds what it could not write
        stream.close()
