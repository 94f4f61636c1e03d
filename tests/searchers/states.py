"""The whole state of a method or search as text, so that two states can be compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set


def state(subject: object) -> str:
    """What `copy` and `pickle` would take, with sets and mappings sorted. Equal events must give equal text."""
    match subject:
        case None | bool() | int() | float() | str():
            return repr(subject)
        case type():
            return subject.__name__
        case list() | tuple() | deque():
            return f"[{', '.join(map(state, subject))}]"
        case Set():
            return f"{{{', '.join(sorted(map(state, subject)))}}}"
        case Mapping():
            return f"{{{', '.join(sorted(f'{state(key)}: {state(value)}' for key, value in subject.items()))}}}"
    found = subject.__reduce_ex__(2)
    assert isinstance(found, tuple)
    return f"{type(subject).__name__}{state(found[1:])}"
