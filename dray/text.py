"""Words and numbers in messages and JSON."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""Determined's format of log lines, for ``logging.basicConfig(format=dray.LOG_FORMAT)``."""

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


def one_line(text: object) -> str:
    r"""A text, or an error's message, on one line.

    >>> one_line(ValueError("must be positive,\n    got 0"))
    'must be positive, got 0'
    """
    return " ".join(str(text).split())


def printable(text: str) -> str:
    r"""A text of others, such as code, for a terminal: characters that would move the cursor, change colors or the
    order of letters are escaped. Lines stay.

    >>> print(printable("+x = 1  # \x1b[8m\r-\u202e\n-é"))
    +x = 1  # \x1b[8m\r-\u202e
    -é
    """
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def cut(text: str, most: int) -> str:
    """A text, or the beginning and the end of one with more letters.

    >>> cut("abcdefghij", 4)
    'ab ... 6 letters are left out ... ij'
    """
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} ... {left_out:,} letters are left out ... {text[len(text) - most // 2 :]}"


def file_name(name: str) -> str:
    """An experiment's name as part of its directory's name: it needs no quoting in a shell, and is never hidden.

    >>> file_name("lr<0.1 & deep"), file_name("--help"), file_name("<b>")
    ('lr-0.1---deep', 'help', 'b-')
    """
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip("-.") or "experiment"


def counted(number: float, noun: str, form: str = "") -> str:
    """A number and its noun, in the plural unless the number is 1.

    >>> counted(1, "trial"), counted(1200, "batch", ",")
    ('1 trial', '1,200 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("tch") else "s"
    return f"{number:{form}} {noun}{ending}"


def some(items: Sequence[object], most: int) -> str:
    """The first items, and the number of further ones.

    >>> some(["lr", "hidden", "layers"], 2)
    'lr, hidden and 1 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def duration(seconds: float) -> str:
    """Hours, minutes and whole seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_of(text: object) -> float:
    """The seconds of a duration such as 2h, 90m, 45s or 1h30m; a ValueError if it is none.

    >>> seconds_of("1h30m"), seconds_of("0.5d")
    (5400.0, 43200.0)
    """
    found = re.fullmatch("".join(rf"(?:([0-9]*\.?[0-9]+){unit})?" for unit in "dhms"), str(text))
    numbers = ("",) if found is None else found.groups("0")
    seconds = sum(float(number or 0) * s for number, s in zip(numbers, (86_400, 3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise ValueError(f"must be a duration such as 2h, 90m, 45s or 1h30m, got {text!r:.60}")
    return seconds


def rough_time(seconds: float) -> str:
    """A rough time: 40 s, 12 min, 3 h 20 min, 2 days 4 h."""
    if seconds < 60:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60 // 10 * 10} min"
    return f"{minutes // 1440} days {minutes % 1440 // 60} h"


def rough(value: float) -> str:
    """A number with three digits: 0.123, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int) -> str:
    """A number of bytes: 512 B, 1.5 KiB, 96.0 MiB."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def shown(value: object) -> str:
    """A value for people: floats with five digits, "-" for None and NaN.

    >>> shown(0.1234567), shown(None), shown({"lr": 0.1, "name": "sgd"})
    ('0.12346', '-', 'lr=0.1 name=sgd')
    """
    if value is None or value != value:
        return "-"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={shown(item)}" for name, item in value.items())
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def fields_of(value: Any) -> dict[str, Any]:
    """The JSON of a dataclass: its fields, and the properties that it names in ``ALSO``.

    The commands, the API and its description (docs/openapi.py) have it from here.
    """
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _names(kind)}


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return (*(each.name for each in dataclasses.fields(kind)), *getattr(kind, "ALSO", ()))


def finite(value: Any) -> Any:
    """A value as strict JSON: numbers that are not finite become null."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(name): finite(item) for name, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
    if dataclasses.is_dataclass(value):
        return finite(fields_of(value))
    # numpy's scalars, without importing numpy
    return finite(value.item()) if hasattr(value, "item") else str(value)


def is_encodable(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. Names of files with invalid bytes contain surrogates, and can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
