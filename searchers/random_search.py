"""Methods that run every trial to its end: random search, a grid, and a single trial."""

from __future__ import annotations

from collections.abc import Mapping

from searchers.events import REPLACED, Action, Event, Exited, Replaced, Requested
from searchers.method import Fields, check_extension
from searchers.slots import TrialSlots


class RandomSearch:
    """Determined's `random`: `max_trials` independent trials, `max_concurrent_trials` at a time.

    Source: Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization" (JMLR 13, 2012).

    Args:
        max_trials: Number of trials, >= 1. Trials with invalid hyperparameters, and trials that run out of memory, are
            replaced and don't count.
        max_concurrent_trials: Maximum number of trials that were created and have not ended; 0 = no limit.
        max_length: Length of a trial, >= 1, at which it validates. None: trials decide when they end.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

    >>> RandomSearch(max_trials=3, max_concurrent_trials=2).start()
    [Create(trial=0), Create(trial=1)]
    """

    _budget_name, _min_budget = "max_trials", 1
    _fixed_trials: str | None = None  # the reason why an extension can't add trials
    _replaces: tuple[Replaced, ...] = REPLACED

    def __init__(self, *, max_trials: int, max_concurrent_trials: int = 16, max_length: int | None = None) -> None:
        check = Fields()
        check.integers(self._min_budget, **{self._budget_name: max_trials})
        check.integers(0, max_concurrent_trials=max_concurrent_trials)
        if max_length is not None:
            check.integers(1, max_length=max_length)
        check.raise_faults()
        self.rungs: tuple[int, ...] = () if max_length is None else (max_length,)
        self._max_concurrent = max_concurrent_trials
        self._slots = TrialSlots(max_trials=max_trials, max_concurrent=max_concurrent_trials, replaces=self._replaces)

    @property
    def max_trials(self) -> int:
        """Number of trials."""
        return self._slots.max_trials

    def limit_points(self, points: int) -> None:
        """Limit the search to this many trials, as its space has no more points."""
        self._slots.limit_points(points)

    def start(self) -> list[Action]:
        """Create as many trials as may run at a time."""
        return self._slots.fill()

    def on(self, event: Event) -> list[Action]:
        """Create a new trial when one ends."""
        if not self._slots.is_live(event.trial) or not isinstance(event, Exited):
            return []
        self._slots.end(event.trial, event.reason)
        return self._slots.fill()

    def requested(self, request: Requested) -> list[Action]:
        """Create a trial that a person requests, or stop one."""
        return [self._slots.create_requested(request)]

    def progress(self, trained: Mapping[int, float]) -> float:
        """Return the number of ended trials plus the trained shares of live ones, divided by `max_trials`.

        Determined divides by the number of trials created so far, so its progress decreases with every new trial.
        """
        return self._slots.progress((self._slots.ended + self._slots.trained(trained)) / (self.max_trials or 1))

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Add trials, or increase their length, which resumes all completed trials in the order of their numbers.

        Raises:
            MethodError: The budget does not grow, or the search can't be extended this way. It is unchanged.
        """
        check_extension(
            max_trials=(max_trials, self._fixed_trials or self.max_trials),
            max_length=(
                max_length,
                self.rungs[0] if self.rungs else "this search does not set the length of its trials",
            ),
        )
        to_resume: list[int] = []
        if max_length is not None and self.rungs != (max_length,):
            self.rungs, to_resume = (max_length,), sorted(self._slots.completed)
        trials = max_trials or self.max_trials
        self._slots.counts.extend(trials)
        self._slots.extend(max_trials=trials, max_concurrent=self._max_concurrent, to_resume=to_resume)
        return self._slots.fill()


class Single(RandomSearch):
    """Determined's `single`: random search with one trial, which is not replaced if it runs out of memory.

    Args:
        max_length: Length of the trial, >= 1. None: the trial decides when it ends.

    Raises:
        MethodError: `max_length` is invalid.

    >>> Single().start()
    [Create(trial=0)]
    """

    limit_points = None  # type: ignore[assignment]  # it has one trial
    _fixed_trials = "a single search has one trial"
    _replaces = ("invalid_hp",)

    def __init__(self, *, max_length: int | None = None) -> None:
        super().__init__(max_trials=1, max_concurrent_trials=1, max_length=max_length)


class Grid(RandomSearch):
    """Determined's `grid`: one trial for each point, which comes from the sampler (`GridSampler`).

    No trial is replaced, since its point was tried.

    Args:
        points: Number of points of the grid, >= 0. With 0 the search is done when it starts.
        max_concurrent_trials: Maximum number of trials that were created and have not ended; 0 = no limit.
        max_length: Length of a trial, >= 1, at which it validates. None: trials decide when they end.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

    >>> Grid(points=6, max_concurrent_trials=2).start()
    [Create(trial=0), Create(trial=1)]
    """

    _budget_name, _min_budget = "points", 0
    limit_points = None  # type: ignore[assignment]  # its points are those of its sampler
    _fixed_trials = "a grid has as many trials as points"
    _replaces = ()

    def __init__(self, *, points: int, max_concurrent_trials: int = 16, max_length: int | None = None) -> None:
        super().__init__(max_trials=points, max_concurrent_trials=max_concurrent_trials, max_length=max_length)
