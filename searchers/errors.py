"""Errors. Those a user can cause are `ValueError`s, and name every fault by its path."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

Faults = list[tuple[str, str]]  # `(path, message)` pairs, e.g. `("searcher.divisor", "must be > 1, got 1")`

SHOWN = 20  # most faults that are shown; the others are counted
_LONGEST = 1000


def shown(faults: Sequence[tuple[str, str]]) -> list[str]:
    """The first faults as lines, and the number of others. Long lines are cut in the middle.

    >>> shown([("lr", "must be > 0")] * 20_000)[-2:]
    ['lr: must be > 0', '... and 19,980 more']
    """
    lines = [f"{_cut(_printable(path), _LONGEST // 5)}: {_cut(what, _LONGEST)}" for path, what in faults[:SHOWN]]
    return lines + ([f"... and {len(faults) - SHOWN:,} more"] if len(faults) > SHOWN else [])


def _printable(path: str) -> str:
    return path if path.isprintable() else repr(path)[1:-1]


def _cut(text: str, most: int) -> str:
    # Not at the end, which says what to do.
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def did_you_mean(name: object, known: Collection[str], otherwise: str = "") -> str:
    """A hint at the known name that is nearest to a misspelt one, or ``otherwise``.

    >>> did_you_mean("max_trails", ["max_trials", "max_length"])
    '; did you mean max_trials?'
    >>> did_you_mean("a100", ["V100", "A100"])
    '; did you mean A100?'
    """
    by_lower = {each.lower(): each for each in known}  # case is no difference that counts
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else otherwise


class FieldError(ValueError):
    """Invalid fields of a configuration: `faults` has all of them."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__(faults)  # as given, so that the error survives pickling
        self.faults = list(faults)

    def __str__(self) -> str:
        return "\n".join(shown(self.faults))


class MethodError(FieldError):
    """A search method was given an invalid field (`searcher.*`)."""


class SpaceError(FieldError):
    """A hyperparameter space is invalid (`hyperparameters.*`)."""


class IllegalEvent(ValueError):
    """An impossible event, e.g. of a trial that was never created. Raised before anything changes."""


def never_created(trial: int, *, created: int) -> IllegalEvent:
    """The error about an event of a trial beyond the `created` ones."""
    return IllegalEvent(f"trial {trial} was never created; {created} were so far, numbered from 0")


class JournalError(ValueError):
    """A journal cannot be read, replayed or locked. The message names the file or line."""
