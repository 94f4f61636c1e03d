"""Make the pictures of README.md and the first page from a real `dray demo`, with ``make pictures``: docs/demo.svg, a
recording of the terminal (with pyte, a terminal emulator), and docs/page.png, the page of its experiment (in Chromium).
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import pyte

ROWS, COLUMNS = 26, 96
#: How long the run is shown, and its end; and how long each frame at least.
RUN_S, END_S, FRAME_S = 15.0, 5.0, 0.15
#: Longer waits, such as for the start of Ray, are shortened to this before the run is made to fit.
MOST_S = 2.0
#: Pixels.
WIDTH, HEIGHT, BASE, MARGIN = 8.4, 18, 13, 12
COLORS = {
    "default": "#d4d7dd", "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d4d7dd",
}  # fmt: skip
STYLE = "text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}"
DEMO, PAGE = (Path(__file__).parent / name for name in ("demo.svg", "page.png"))


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


def frames(printed: list[tuple[float, str]], prompt: str) -> Iterator[tuple[float, list[str]]]:
    """The lines of the terminal, and how long they are shown."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    stream.feed(f"$ {prompt}\r\n")
    waits = [min(now - before, MOST_S) for (before, _), (now, _) in pairwise(printed)]
    speed = max(1.0, sum(waits) / RUN_S)
    shown, seconds = lines_of(screen), 0.0
    for (_, text), wait in zip(printed, [*waits, 0.0], strict=True):
        stream.feed(text)
        if lines_of(screen) != shown and seconds >= FRAME_S:
            yield seconds, shown
            shown, seconds = lines_of(screen), 0.0
        seconds += wait / speed
    yield END_S, lines_of(screen)


def lines_of(screen: pyte.Screen) -> list[str]:
    """The lines of the terminal as SVG."""
    return [line(screen, row) for row in range(ROWS)]


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


def photograph(command: list[str], view: str, environment: dict[str, str]) -> bytes:
    """A view of the page that this command serves, as PNG."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,860"):
        options.add_argument(argument)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
            driver.get(f"{url}&to={view}")
            time.sleep(5)  # until all is drawn
            picture = driver.get_screenshot_as_png()
            driver.quit()
        finally:
            server.terminate()
    return picture


def main() -> None:
    """Write the pictures."""
    dray = str(Path(sys.executable).parent / "dray")
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOME": home, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment.pop("DRAY_HOME", None)
        # As it is for people who have installed dray.
        code, installed = f"{Path(__file__).parents[1]}/examples/digits", "~/.venv/lib/dray/demo"
        printed = [
            (at, text.replace(code, installed).replace(home, "~")) for at, text in record([dray, "demo"], environment)
        ]
        DEMO.write_text(svg(list(frames(printed, "dray demo"))))
        [path] = Path(home).glob("dray_results/digits-asha-*")
        PAGE.write_bytes(photograph([dray, "ui"], f"/e/{path.name}/curves", environment))
    print(f"wrote {DEMO} and {PAGE}")


if __name__ == "__main__":
    main()
