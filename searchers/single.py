"""One trial, run to its end."""

from __future__ import annotations

from searchers.random_search import RandomSearch


class Single(RandomSearch):
    """Determined's `single`: random search with one trial.

    Args:
        max_length: Length of the trial, >= 1, if the search sets it.
        max_invalid: How often the trial is replaced if its hyperparameters are invalid, >= 0. 16 by default.

    Raises:
        MethodError: A field is invalid.

    >>> Single().start()
    [Create(trial=0)]
    """

    _fixed_trials = "a single search has one trial"

    def __init__(self, *, max_length: int | None = None, max_invalid: int | None = None) -> None:
        super().__init__(max_trials=1, max_concurrent_trials=1, max_length=max_length, max_invalid=max_invalid)
