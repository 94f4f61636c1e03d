"""The display of the digits search, captured from terminals of 80 and 200 columns, and piped to a file.

    python bench/display.py [DIRECTORY] [WIDTHS...]

Writes a text file for each moment, for a person to read: at the start, in the middle, after Ctrl-C, after `resume`, at
the end. Needs tmux.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
LINES = 24
PATIENCE_S = 600


class Terminal:
    """A terminal of tmux, with a shell in it."""

    def __init__(self, name: str, columns: int) -> None:
        self._name = name
        self._tmux("new-session", "-d", "-s", name, "-x", str(columns), "-y", str(LINES), "env PS1='$ ' sh")

    def types(self, command: str) -> None:
        """Type a line."""
        self._tmux("send-keys", "-t", self._name, "-l", command)
        self._tmux("send-keys", "-t", self._name, "Enter")

    def interrupts(self) -> None:
        """Press Ctrl-C."""
        self._tmux("send-keys", "-t", self._name, "C-c")

    def screen(self) -> str:
        """The text on the screen."""
        return self._tmux("capture-pane", "-p", "-t", self._name)

    def when(self, wanted: str) -> str:
        """Wait for this pattern, and return the text on the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(wanted, seen := self.screen()):
            if time.monotonic() > deadline:
                raise SystemExit(f"{wanted!r} did not appear on the screen:\n{seen}")
            time.sleep(0.1)
        return seen

    def close(self) -> None:
        """End the terminal, and the processes in it."""
        self._tmux("kill-session", "-t", self._name)

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


def captured(out: Path, columns: int) -> None:
    """A search on a terminal of this many columns, stopped in the middle and resumed."""
    dray = shlex.join([sys.executable, "-m", "dray.cli"])
    path = out / f"experiment-{columns}"
    terminal = Terminal(f"dray-display-{columns}", columns)

    def keep(what: str, wanted: str) -> None:
        (out / f"{columns}-{what}.txt").write_text(terminal.when(wanted))

    try:
        terminal.types(f"clear; {dray} experiment create {DIGITS / 'asha.yaml'} {DIGITS} --path {path}; echo code $?")
        keep("1-starts", "first worker group")
        keep("2-first", r"batch(es)?/s\s")
        keep("3-middle", r"[1-9]\d of 64 trials ended")
        terminal.interrupts()
        keep("4-stopped", r"code \d+")
        terminal.types(f"clear; {dray} experiment resume {path}; echo code $?")
        keep("5-resumed", r"[2-6]\d of 64 trials ended")
        keep("6-end", r"code \d+")
    finally:
        terminal.close()


def piped(out: Path) -> None:
    """The same, to a file."""
    command = [sys.executable, "-m", "dray.cli", "experiment", "create", str(DIGITS / "asha.yaml"), str(DIGITS)]
    with (out / "piped.txt").open("w") as file:
        subprocess.run([*command, "--path", str(out / "experiment-piped")], check=True, stdout=file, stderr=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("widths", nargs="*", type=int, default=[80, 200])
    options = parser.parse_args()
    out: Path = (options.directory or Path(tempfile.mkdtemp(prefix="dray-display-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for columns in options.widths:
        captured(out, columns)
    piped(out)
    print(f"captured in {out}")


if __name__ == "__main__":
    main()
