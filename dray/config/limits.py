"""How large a config may be, so that a broken or hostile one ends in one error, not in all of the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dray.errors import Fault

MAX_DEPTH = 100
"""Mappings and lists inside each other."""
MAX_VALUES = 100_000
"""Values in all, each counted wherever an anchor repeats it."""
MAX_BYTES = 2**24
"""Of a config file."""
MAX_TEXT = 100_000
"""Characters of one value; Linux takes a few more in an environment variable."""
MAX_NUMBER = 2**64
"""No integer is as large: neither are those of NumPy, Parquet and a seed."""

TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"
TOO_MANY = f"has more than {MAX_VALUES:,} values, counting each where an anchor repeats it"


_Place = tuple["_Place | None", object]


def beyond_limits(source: Mapping[Any, Any]) -> Iterator[Fault]:
    """What in a config is too large or too deep, or can't be written to a file; a size is the last that is found.

    >>> [str(fault) for fault in beyond_limits({"data": {"n": [10**30]}})]
    ['data.n[0]: must be an integer of at most 64 bits, got one of 100 bits']
    """
    left = MAX_VALUES
    todo: list[tuple[object, _Place | None, int]] = [(source, None, 0)]
    while todo:
        value, place, depth = todo.pop()
        inside = len(value) if isinstance(value, Mapping | list | tuple) else 0
        left -= 1 + inside
        if left < 0 or (inside and depth > MAX_DEPTH):
            yield Fault(_path(place, of_section=True), TOO_MANY if left < 0 else TOO_DEEP)
            return
        if isinstance(value, Mapping):
            todo += ((item, (place, name), depth + 1) for name, item in value.items())
            todo += ((name, (place, name), MAX_DEPTH) for name in value)
        elif isinstance(value, list | tuple):
            todo += ((item, (place, [number]), depth + 1) for number, item in enumerate(value))
        elif isinstance(value, str) and (why := _no_text(value)):
            yield Fault(_path(place), f"must be text, {why}")
        elif isinstance(value, int) and not -MAX_NUMBER < value < MAX_NUMBER:
            yield Fault(_path(place), f"must be an integer of at most 64 bits, got one of {value.bit_length()} bits")


def _path(place: _Place | None, *, of_section: bool = False) -> str:
    names: list[str] = []
    while place is not None:
        place, name = place
        match name:
            case [number]:
                names.append(f"[{number}]")
            case str():
                names.append(f".{name}")
            case _:
                names.append(f".({type(name).__name__})")
    path = "".join(names[-1:] if of_section else reversed(names)).removeprefix(".")
    return path or "config"


def _no_text(value: str) -> str | None:
    """Why this can't be a path, a variable or a line of a file."""
    if len(value) > MAX_TEXT:
        return f"of at most {MAX_TEXT:,} characters, got {len(value):,}"
    if "\0" in value:
        return f"without the character NUL, got {value!r:.60}"
    try:
        value.encode()
    except UnicodeEncodeError:  # YAML's "\\ud83d" is half of a surrogate pair
        return f"got {value!r:.60}, which has half of a character"
    return None
