"""Exceptions that end training."""

from __future__ import annotations


class InvalidHP(Exception):
    """Raise it for hyperparameters that make no sense: the trial ends, and the search tries others.

    It may be raised in the trial's constructor, methods and callbacks. Unsaved training is saved first.

    Args:
        msg: the reason, for the log.
    """

    def __init__(self, msg: str = "these hyperparameters are invalid") -> None:
        if not isinstance(msg, str):
            raise TypeError(f"InvalidHP takes a message (str), got {msg!r} of type {type(msg).__name__}")
        super().__init__(msg)
        self.msg = msg


class ShouldExit(Exception):
    """Raise it to leave training now, in any function that the trainer calls. Unsaved training is saved first.

    Args:
        skip_exit_checkpoint: do not save.
    """

    def __init__(self, skip_exit_checkpoint: bool = False) -> None:
        super().__init__(skip_exit_checkpoint)
        self.skip_exit_checkpoint = skip_exit_checkpoint


class TrialEnded(ShouldExit):
    """The program kept reporting after the search stopped it; this ends it."""

    def __init__(self, why: str) -> None:
        super().__init__(skip_exit_checkpoint=True)
        self.args = (why,)


class DataExhausted(RuntimeError):
    """The training data ended before `max_length` was reached. What was trained is saved."""


class SearcherMetricError(ValueError):
    """Validation does not return the metric that the search compares: no trial of the experiment can succeed."""


class PeerFailed(RuntimeError):
    """Another rank failed in a step that all ranks depend on; the cause is in that rank's log."""
