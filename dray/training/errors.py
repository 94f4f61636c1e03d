"""What a trial's code may raise to end its training on purpose."""

from __future__ import annotations


class InvalidHP(Exception):
    """These hyperparameters make no sense: end the trial, and let the search try others.

    May be raised in the trial's constructor, in its methods and in its callbacks. What was trained is saved first.

    Args:
        msg: why, for the log.
    """

    def __init__(self, msg: str = "these hyperparameters are invalid") -> None:
        if not isinstance(msg, str):
            raise TypeError(f"InvalidHP takes a message (str), got {msg!r} of type {type(msg).__name__}")
        super().__init__(msg)
        self.msg = msg


class ShouldExit(Exception):
    """Leave training now, from inside any function that it calls. What is not saved is saved first.

    Args:
        skip_exit_checkpoint: do not save.
    """

    def __init__(self, skip_exit_checkpoint: bool = False) -> None:
        super().__init__(skip_exit_checkpoint)
        self.skip_exit_checkpoint = skip_exit_checkpoint


class TrialEnded(ShouldExit):
    """The program goes on reporting after it was told to end: it is ended here, as the search has decided.

    Args:
        why: for the log.
    """

    def __init__(self, why: str) -> None:
        super().__init__(skip_exit_checkpoint=True)
        self.why = why
        self.args = (why,)

    def __str__(self) -> str:
        return self.why


class DataExhausted(RuntimeError):
    """The training data ended before the planned length did. What was trained is saved."""


class SearcherMetricError(ValueError):
    """Validation does not give the metric that the search compares: no trial of the experiment can do better."""


class PeerFailed(RuntimeError):
    """Another rank failed in a step that all ranks depend on; its own error is in its own log."""
