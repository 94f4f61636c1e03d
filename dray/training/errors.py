"""Exceptions that end training."""

from __future__ import annotations


class InvalidHP(Exception):
    """Raise this for hyperparameters that make no sense: the trial ends, and the search tries others.

    Raise it in the trial's constructor, methods or callbacks. Unsaved training is saved first.

    Args:
        msg: the reason, for the log.
    """

    def __init__(self, msg: str = "these hyperparameters are invalid") -> None:
        if not isinstance(msg, str):
            raise TypeError(f"InvalidHP takes a message (str), got {msg!r} of type {type(msg).__name__}")
        super().__init__(msg)
        self.msg = msg


class ShouldExit(Exception):
    """Raise this in any function that the trainer calls, to end training now. Unsaved training is saved first.

    Args:
        skip_exit_checkpoint: end without saving.
    """

    def __init__(self, skip_exit_checkpoint: bool = False) -> None:
        super().__init__(skip_exit_checkpoint)
        self.skip_exit_checkpoint = skip_exit_checkpoint


class TrialEnded(ShouldExit):
    """Ends a program that kept reporting after the search stopped it."""

    def __init__(self, why: str) -> None:
        super().__init__(skip_exit_checkpoint=True)
        self.args = (why,)


class DataExhausted(RuntimeError):
    """The training data ended before `max_length` was reached. The training so far is saved."""


class SearcherMetricError(ValueError):
    """Validations lack the metric that the search compares, so no trial of the experiment can succeed."""


class PeerFailed(RuntimeError):
    """Another rank failed in a step that all ranks depend on; the cause is in that rank's log."""
