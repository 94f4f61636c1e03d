"""Printing results to standard output: tables for people, JSON for programs."""

from __future__ import annotations

import datetime
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from dray.text import finite, shown

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

WIDE = 10_000
"""The width if standard output is not a terminal: programs want each row on one line."""
LEAST = 20  # least width of a column of long text on a terminal


def as_json(value: Any) -> None:
    """Print strict JSON: numbers that are not finite become null."""
    typer.echo(json.dumps(finite(value), indent=2, allow_nan=False))


@contextmanager
def created(json_: bool) -> Iterator[Callable[[Any, str], None]]:
    """Yields what prints the answer of a command that creates something: a text, or with ``json_`` a value as one line
    of JSON. Then anything else that is printed within the block goes to standard error."""
    out = sys.stdout

    def answer(value: Any, text: str) -> None:
        line = json.dumps(finite(value), allow_nan=False) if json_ else text
        if line:
            typer.echo(line, file=out)

    with redirect_stdout(sys.stderr) if json_ else nullcontext():
        yield answer


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[str] = ()) -> None:
    """Print aligned columns; those in ``left`` are left-aligned, the others right-aligned.

    Long text belongs in the last column, which wraps on a terminal. If the others do not fit either, the widest one in
    ``left`` is cut. Rich's own table takes seconds for 10,000 rows.
    """
    cells = [list(headings), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    cuttable = [place for place, heading in enumerate(headings[:-1]) if heading in left]
    if cuttable and (over := before + min(widths[-1], LEAST) - room) > 0:
        widest = max(cuttable, key=widths.__getitem__)
        width = max(min(widths[widest], LEAST), widths[widest] - over)
        before, widths[widest] = before - widths[widest] + width, width
        for row in cells:
            row[widest] = row[widest] if len(row[widest]) <= width else f"{row[widest][: width - 1]}…"
    widths[-1] = min(max(widths[-1], 1), max(LEAST, room - before))  # 1: a column may be empty, heading included
    printed = []
    for row in cells:
        texts = [
            text.ljust(width) if heading in left else text.rjust(width)
            for heading, text, width in zip(headings, row[:-1], widths[:-1], strict=False)
        ]
        is_left = headings[-1] in left
        folded = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) if is_left else [row[-1].rjust(widths[-1])]
        first, *others = folded or [""]
        printed.append("  ".join([*texts, first]).rstrip())
        printed += [" " * before + text for text in others]
    typer.echo("\n".join(printed))


def console() -> Console:
    """Rich's console on standard output."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDE, file=sys.stdout)


def fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Print a line for each name and value, except empty values."""
    kept = [(name, shown(value)) for name, value in pairs if value not in (None, "", {}, [])]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        typer.echo(f"{name:{width}}  " + value.replace("\n", f"\n{'':{width}}  "))


def red(text: str) -> str:
    """The text, in red on a terminal."""
    return typer.style(text, fg=typer.colors.RED, bold=True) if text and sys.stdout.isatty() else text


def lines(texts: Iterable[str]) -> None:
    for text in texts:
        typer.echo(text)


def last(items: Sequence[T], tail: int | None) -> Sequence[T]:
    """The last ``tail`` items; None: all."""
    return items if tail is None else items[max(0, len(items) - tail) :]


def clock(seconds: float | None, *, exact: bool = False) -> str:
    """A point in time, in the local time zone."""
    if seconds is None or math.isnan(seconds):
        return "-"
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S" if exact else "%b %d %H:%M")
