"""Grid search: one trial for each point of a grid, run to its end."""

from __future__ import annotations

from searchers.random_search import RandomSearch


class Grid(RandomSearch):
    """Determined's `grid`. The sampler (`GridSampler`) gives each trial its point.

    A trial whose hyperparameters are invalid is not replaced: its point was tried.

    Args:
        points: Points of the grid, i.e. trials. 0: the search is done when it starts.
        max_concurrent_trials: Most trials at a time that were created and have not ended; 0 = no limit.
        max_length: Length of a trial, >= 1, if the search sets it; trials then validate there.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> Grid(points=6, max_concurrent_trials=2).start()
    [Create(trial=0), Create(trial=1)]
    """

    _budget, _least = "points", 0
    _fixed_trials = "a grid has as many trials as points"
    _replaces_invalid = False

    def __init__(self, *, points: int, max_concurrent_trials: int = 16, max_length: int | None = None) -> None:
        super().__init__(max_trials=points, max_concurrent_trials=max_concurrent_trials, max_length=max_length)
