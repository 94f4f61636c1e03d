"""Answers of tools: JSON of a bounded size, without control characters, that says what it leaves out."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_BYTES = 8000
_NOTE_BYTES = 400  # room for the note about rows that are left out
_LIMITS = ((1000, 50), (300, 30), (100, 20), (30, 10), (10, 3), (3, 1))
"""Longest texts in characters and most items of a list, tried in turn until an answer fits."""
# CSI and OSC sequences and two-character escapes: colours, cursor movements, links, titles.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])|\x9b[0-?]*[ -/]*[@-~]")
_INVISIBLE = ("Cc", "Cf", "Co", "Cs", "Cn")


def plain_text(text: str) -> str:
    r"""A text without terminal escapes, control characters and invisible characters; of a line that was rewritten by
    carriage returns, as progress bars do, the last state.

    >>> plain_text("\x1b[31mred\x1b[0m\x00 1%\r 2%\r"), plain_text("a\n\tb\u202ec")
    (' 2%', 'a\n\tbc')
    """
    lines = _ESCAPE.sub("", text).replace("\r\n", "\n").rstrip("\r").split("\n")
    text = "\n".join(line.rpartition("\r")[2] for line in lines)
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE)


def figure(value: Any) -> Any:
    """A value with the numbers in it at six digits."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case Mapping():
            return {name: figure(each) for name, each in value.items()}
        case list():
            return [figure(each) for each in value]
    return value


def answer(
    fields: Mapping[str, Any],
    name: str = "",
    rows: Sequence[Any] = (),
    *,
    last: bool = False,
    more: str = "",
    most_bytes: int = MOST_BYTES,
    shown: Callable[[Any], Any] = lambda row: row,
) -> str:
    """JSON of at most `most_bytes`: all `fields`, and under `name` as many of the `rows` as fit.

    If some do not fit, ``left_out`` says how many, and how to get them. Texts and lists that are too long are cut, and
    say so where they end.

    Args:
        last: keep the last rows instead of the first.
        more: how to get the other rows.
        shown: makes a row as it is shown; only called for rows that are, and for one that no longer fits.
    """
    head = _fitting(_clean(fields), most_bytes // 2 if rows else most_bytes)
    if not name:
        return _json(head)
    room = most_bytes - len(_json(head).encode()) - _NOTE_BYTES
    kept: list[Any] = []
    for row in reversed(rows) if last else rows:
        fitted = _fitting(_clean(shown(row)), most_bytes // 4)
        room -= len(_json(fitted).encode()) + 1
        if room < 0:
            break
        kept.append(fitted)
    note = {"left_out": f"{len(rows) - len(kept)} of {len(rows)} {name}; {more}"} if len(kept) < len(rows) else {}
    return _json({**head, name: kept[::-1] if last else kept, **note})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _clean(value: Any) -> Any:
    match value:
        case str():
            return plain_text(value)
        case Mapping():
            return {plain_text(str(name)): _clean(item) for name, item in value.items()}
        case list() | tuple():
            return [_clean(item) for item in value]
    return value


def _fitting(value: Any, most_bytes: int) -> Any:
    """A clean value whose JSON has at most this many bytes, with long texts and lists cut as far as needed."""
    for texts, items in ((1 << 30, 1 << 30), *_LIMITS):
        cut = _cut(value, texts, items)
        if len(_json(cut).encode()) <= most_bytes:
            return cut
    return "too large to be shown"


def _cut(value: Any, texts: int, items: int) -> Any:
    match value:
        case str() if len(value) > texts:
            return f"{value[:texts]}… and {len(value) - texts} more characters"
        case Mapping():
            kept = {_cut(name, texts, items): _cut(item, texts, items) for name, item in [*value.items()][:items]}
            return {**kept, "…": f"and {len(value) - items} more"} if len(value) > items else kept
        case list():
            more = [f"… and {len(value) - items} more"] if len(value) > items else []
            return [_cut(item, texts, items) for item in value[:items]] + more
    return value
