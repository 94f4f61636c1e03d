"""Pieces of the report's HTML: tables, controls, and the format of values."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dray.text import finite


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, raw: bool = False) -> str:
    """A table that scrolls if it is too wide; with `raw`, cells are HTML."""
    cells = [[cell if raw else escape(str(cell)) for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    headings = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    return f'<div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def controls(names: str, figure: Mapping[str, Any], metrics: Sequence[str] = ()) -> str:
    """Controls above plots: the choice of the metric, if there are several, and of its scale."""
    choices = [("metric", metrics)] if len(metrics) > 1 else []
    labels = ""
    for what, options in [*choices, ("scale", sorted(figure["scales"], key=lambda each: each != figure["scale"]))]:
        items = "".join(f"<option>{escape(option)}</option>" for option in options)
        labels += f'<label>{what} <select data-{what}="{names}">{items}</select></label>'
    return f'<p class="controls">{labels}</p>'


def clock(seconds: float) -> str:
    """A Unix time as date and time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def script(value: Any) -> str:
    """JSON for a `<script>`: NaN and infinities become null, and no text in it ends the script."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
