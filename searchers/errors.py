"""Errors. Those of users are `ValueError`s, and name every fault by its path."""

from __future__ import annotations

from collections.abc import Sequence


class FieldError(ValueError):
    """Invalid fields of a configuration, all of them.

    Attributes:
        faults: `(path, message)` pairs, e.g. `("searcher.divisor", "must be > 1, got 1")`.
    """

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__(faults)  # the arguments themselves, so that the error survives pickling
        self.faults = list(faults)

    def __str__(self) -> str:
        return "\n".join(f"{path}: {message}" for path, message in self.faults)


class MethodError(FieldError):
    """A search method was given an invalid field (`searcher.*`)."""


class SpaceError(FieldError):
    """A hyperparameter space is invalid (`hyperparameters.*`)."""


class IllegalEvent(ValueError):
    """An event that can't have happened, e.g. of a trial never created. Raised before anything changes."""


class JournalError(ValueError):
    """A journal cannot be read, replayed or locked. The message names the file or line."""
