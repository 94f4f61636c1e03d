"""Record a real `dray demo` in a terminal, as the animated picture docs/demo.svg of README.md and the first page:
``make recording``. It needs pyte, a terminal emulator."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

ROWS, COLUMNS = 26, 96
#: Between two frames: shorter ones are skipped, and what takes longer, such as the start of Ray, is shortened to this.
LEAST_S, MOST_S = 0.25, 1.0
END_S = 5.0
#: Pixels.
WIDTH, HEIGHT, BASE, MARGIN = 8.4, 18, 13, 12
COLORS = {
    "default": "#d4d7dd", "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d4d7dd",
}  # fmt: skip
STYLE = "text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}"
PICTURE = Path(__file__).parent / "demo.svg"


def record(command: list[str], environment: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal: what it prints, with the time."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execvpe(command[0], command, environment)
    text = codecs.getincrementaldecoder("utf-8")()
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        yield time.monotonic(), text.decode(data)
    assert os.waitpid(process, 0)[1] == 0, f"{command} has failed"


def frames(printed: Iterator[tuple[float, str]], prompt: str) -> Iterator[tuple[float, list[str]]]:
    """The lines of the terminal, and how long they are shown."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    stream.feed(f"$ {prompt}\r\n")
    shown, since = [line(screen, row) for row in range(ROWS)], None
    for now, text in printed:
        stream.feed(text)
        lines = [line(screen, row) for row in range(ROWS)]
        since = since or now
        if lines != shown and now - since >= LEAST_S:
            yield min(now - since, MOST_S), shown
            shown, since = lines, now
    yield END_S, [line(screen, row) for row in range(ROWS)]


def line(screen: pyte.Screen, row: int) -> str:
    """A line of the terminal as SVG."""
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    parts, column = [], 0
    for (color, is_bold), group in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in group)
        if text.strip():
            fill = COLORS.get(color, f"#{color}" if len(color) == 6 else COLORS["default"])
            bold = ' font-weight="bold"' if is_bold else ""
            length = len(text.rstrip())
            # The width is given, as fonts differ.
            parts.append(
                f'<text x="{column * WIDTH:.1f}" fill="{fill}"{bold} textLength="{length * WIDTH:.1f}">'
                f"{escape(text.rstrip())}</text>"
            )
        column += len(text)
    return "".join(parts)


def svg(shown: list[tuple[float, list[str]]]) -> str:
    """The frames below one another, in a window that moves from one to the next."""
    ids: dict[str, int] = {}
    groups, steps, at, total = [], [], 0.0, sum(seconds for seconds, _ in shown)
    for number, (seconds, lines) in enumerate(shown):
        used = [(row, ids.setdefault(each, len(ids))) for row, each in enumerate(lines) if each]
        uses = "".join(f'<use href="#l{each}" y="{row * HEIGHT + BASE}"/>' for row, each in used)
        groups.append(f'<g transform="translate(0 {number * ROWS * HEIGHT})">{uses}</g>')
        steps.append(f"{100 * at / total:.2f}%{{transform:translateY({-number * ROWS * HEIGHT}px)}}")
        at += seconds
    last = f"translateY({-(len(shown) - 1) * ROWS * HEIGHT}px)"
    style = (
        f"{STYLE}@keyframes play{{{''.join(steps)}100%{{transform:{last}}}}}"
        f"#film{{animation:play {total:.1f}s step-end infinite}}"
        f"@media(prefers-reduced-motion:reduce){{#film{{animation:none;transform:{last}}}}}"
    )
    width, height = COLUMNS * WIDTH + 2 * MARGIN, ROWS * HEIGHT + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">',
            f"<title>dray demo in a terminal</title><style>{style}</style>",
            "<defs>",
            *(f'<g id="l{number}">{each}</g>' for each, number in ids.items()),
            "</defs>",
            f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1e2127"/>',
            f'<svg x="{MARGIN}" y="{MARGIN}" width="{COLUMNS * WIDTH:.0f}" height="{ROWS * HEIGHT}"><g id="film">',
            *groups,
            "</g></svg></svg>\n",
        ]
    )


def main() -> None:
    """Write the picture."""
    command = [str(Path(sys.executable).parent / "dray"), "demo"]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOME": home, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment.pop("DRAY_HOME", None)
        # As it is for people who have installed dray.
        code, installed = f"{Path(__file__).parents[1]}/examples/digits", "~/.venv/lib/dray/demo"
        printed = (
            (at, text.replace(code, installed).replace(home, "~")) for at, text in record(command, environment)
        )
        PICTURE.write_text(svg(list(frames(printed, "dray demo"))))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
