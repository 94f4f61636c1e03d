"""Errors. Those that a user can cause are `ValueError`s that list every fault with its path."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

Faults = list[tuple[str, str]]  # `(path, message)` pairs, as in `FieldError`

SHOWN = 20  # faults that a message lists; the others are counted
_MAX_CHARS = 1000


def shown(faults: Sequence[tuple[str, str]]) -> list[str]:
    """Format the first faults as lines, followed by the number of others. Long lines are cut in the middle.

    >>> shown([("lr", "must be > 0")] * 20_000)[-2:]
    ['lr: must be > 0', '... and 19,980 more']
    """
    lines = [f"{_cut(_printable(path), _MAX_CHARS // 5)}: {_cut(text, _MAX_CHARS)}" for path, text in faults[:SHOWN]]
    return lines + ([f"... and {len(faults) - SHOWN:,} more"] if len(faults) > SHOWN else [])


def _printable(path: str) -> str:
    return path if path.isprintable() else repr(path)[1:-1]


def _cut(text: str, max_chars: int) -> str:
    # The end is kept, since it says what to do.
    return text if len(text) <= max_chars else f"{text[: max_chars * 2 // 3]} ... {text[-max_chars // 3 :]}"


def did_you_mean(name: object, known: Collection[str], otherwise: str = "") -> str:
    """Return a hint at the known name that is closest to a misspelt one, or `otherwise`.

    >>> did_you_mean("max_trails", ["max_trials", "max_length"])
    '; did you mean max_trials?'
    >>> did_you_mean("a100", ["V100", "A100"])
    '; did you mean A100?'
    """
    by_lower = {each.lower(): each for each in known}  # ignore case
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else otherwise


class FieldError(ValueError):
    """Invalid fields of a configuration.

    Attributes:
        faults: All of them, as `(path, message)` pairs, e.g. `("searcher.divisor", "must be > 1, got 1")`.
    """

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__(faults)  # the argument itself, so that the error survives pickling
        self.faults = list(faults)

    def __str__(self) -> str:
        return "\n".join(shown(self.faults))


class MethodError(FieldError):
    """Invalid fields of a search method (`searcher.*`)."""


class SpaceError(FieldError):
    """An invalid hyperparameter space, or a point outside its space (`hyperparameters.*`)."""


class IllegalEvent(ValueError):
    """An impossible event, e.g. for a trial that was never created. Raised before any state changes."""


def never_created(trial: int, *, created: int) -> IllegalEvent:
    return IllegalEvent(f"trial {trial} was never created; {created} were so far, numbered from 0")


class JournalError(ValueError):
    """A journal that cannot be replayed or locked. The message names the file or line."""


class DamagedFile(ValueError):
    """A file, such as a journal, that can't be read. The message is one line, with the file and the damaged line."""
