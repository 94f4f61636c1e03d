"""How large a config may be, so that a broken or hostile one is a short error instead of running out of memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from searchers.errors import FieldError

MAX_DEPTH = 100
"""Mappings and lists inside each other."""
MAX_VALUES = 100_000
"""Values in all, each counted wherever an anchor repeats it."""
MAX_BYTES = 2**24
"""Of a config file."""
MAX_TEXT = 100_000
"""Characters of one value; Linux takes a few more in an environment variable."""
MAX_NUMBER = 2**64
"""Integers must be smaller in magnitude: NumPy, Parquet and seeds take no larger ones."""

TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"
TOO_MANY = f"has more than {MAX_VALUES:,} values, counting each where an anchor repeats it"


def check_limits(source: Mapping[Any, Any]) -> None:
    """Check that a config is neither too large nor too deep, and that it can be written to a file.

    Raises:
        FieldError: Each value that can't, and the section at which the whole becomes too large or too deep.

    >>> check_limits({"data": {"n": [10**30]}})
    Traceback (most recent call last):
    searchers.errors.FieldError: data.n[0]: must be an integer of at most 64 bits, got one of 100 bits
    """
    faults: list[tuple[str, str]] = []
    count = itertools.count()

    def visit(value: object, *path: str) -> None:
        if next(count) > MAX_VALUES:
            raise FieldError([*faults, (path[0], TOO_MANY)])
        if len(path) > MAX_DEPTH:
            raise FieldError([*faults, (path[0], TOO_DEEP)])
        if what := _fault(value):
            faults.append((".".join(path).replace(".[", "["), what))
        if isinstance(value, Mapping):
            for name, item in value.items():
                part = name if isinstance(name, str) else f"({type(name).__name__})"
                visit(name, *path, part)
                visit(item, *path, part)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                visit(item, *path, f"[{number}]")

    visit(source)
    if faults:
        raise FieldError(faults)


def _fault(value: object) -> str:
    """Why a file can't have this value; "" if it can."""
    if isinstance(value, int) and not -MAX_NUMBER < value < MAX_NUMBER:
        return f"must be an integer of at most 64 bits, got one of {value.bit_length()} bits"
    if not isinstance(value, str):
        return ""
    if len(value) > MAX_TEXT:
        return f"must be text of at most {MAX_TEXT:,} characters, got {len(value):,}"
    if "\0" in value:
        return f"must be text without the character NUL, got {value!r:.60}"
    try:
        value.encode()
    except UnicodeEncodeError:  # YAML's "\\ud83d" is half of a surrogate pair
        return f"must be text, got {value!r:.60}, which is not valid Unicode"
    return ""
