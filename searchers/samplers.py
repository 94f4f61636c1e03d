"""Where a trial's hyperparameters come from: the protocol of a sampler, and those that need nothing but a space.

A `Search` asks its sampler only when a trial gets its workers, so that one that learns knows as much as possible, and
tells it every event in the order of the journal, also when a journal is replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol, runtime_checkable

from searchers.errors import SpaceError
from searchers.events import Event
from searchers.space import Space


@runtime_checkable
class Sampler(Protocol):
    """Where hyperparameters come from. The rules:

    * `ask` changes nothing: it is a function of what was told, the trial's number and the sampler's seed. So a sampler
      that is told a journal goes on like the one that wrote it.
    * What `ask` returns belongs to the caller, and is JSON.

    A sampler that goes by lengths may also have `extended(rungs)`: the search was extended, and these are its
    `Method.rungs` now. It is told in the order of the events, also when a journal is replayed.
    """

    def ask(self, trial: int) -> dict[str, object]:
        """Hyperparameters for this trial, which is about to start for the first time."""

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """The search took this event.

        Args:
            event: Normalised: smaller is better, and what was not finite is +inf.
            hparams: The trial's; empty if it ended before it started.
        """


def tell_extended(sampler: Sampler, rungs: Sequence[float]) -> None:
    """Tell a sampler that goes by lengths that the search was extended to these rungs."""
    extended = getattr(sampler, "extended", None)
    if extended is not None:
        extended(rungs)


class RandomSampler:
    """Independent draws from the space: trial 7's depends on the seed and on 7, on nothing else.

    Args:
        space: To draw from.
        seed: Any integer.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.seed = space, seed

    def ask(self, trial: int) -> dict[str, object]:
        """The trial's draw.

        Raises:
            SpaceError: The space's constraint cannot be met.
        """
        return self.space.sample(Random(f"{self.seed}:{trial}"))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Nothing is learned."""


class GridSampler:
    """The points of `Space.grid()`, from the END of the list, as Determined hands them out.

    Args:
        space: Its numbers need a `count` or a `step`.

    Raises:
        SpaceError: The space has no finite grid, or one of more than a million points.

    >>> from searchers import parse_space
    >>> grid = GridSampler(parse_space({"x": {"type": "int", "minval": 1, "maxval": 3, "count": 3}}))
    >>> [grid.ask(trial) for trial in range(len(grid))]
    [{'x': 3}, {'x': 2}, {'x': 1}]
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._points = space.grid()

    def __len__(self) -> int:
        """Number of points."""
        return len(self._points)

    def ask(self, trial: int) -> dict[str, object]:
        """The trial's point.

        Raises:
            SpaceError: There are fewer points than that.
        """
        if trial >= len(self._points):
            given = f"the grid has only {len(self._points)} points, so there is none for trial {trial}, numbered from 0"
            raise SpaceError([(self.space.path, f"{given}; create as many trials as points, or use random search")])
        return copy.deepcopy(self._points[-1 - trial])

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Nothing is learned."""


class FirstPoints:
    """Known good points for the first trials, another sampler for the rest.

    Args:
        space: The points' space.
        points: For trials 0, 1, ...: whole points of the space, but constants may be left out.
        sampler: For the other trials. It is told the events of all.

    Raises:
        SpaceError: A point is not of the space; all faults are named, e.g. `searcher.points[2].lr`.

    >>> from searchers import parse_space
    >>> space = parse_space({"x": {"type": "double", "minval": 0, "maxval": 1}, "batch": 64})
    >>> FirstPoints(space, [{"x": 0.25}], RandomSampler(space, seed=7)).ask(0)
    {'batch': 64, 'x': 0.25}
    """

    def __init__(self, space: Space, points: Sequence[Mapping[str, object]], sampler: Sampler) -> None:
        self.space = space
        self._sampler = sampler
        self._points: list[dict[str, object]] = []
        faults: list[tuple[str, str]] = []
        for i, point in enumerate(points):
            try:
                self._points.append(self.space.check(point, path=f"searcher.points[{i}]"))
            except SpaceError as error:
                faults += error.faults
        if faults:
            raise SpaceError(faults)

    def ask(self, trial: int) -> dict[str, object]:
        """The trial's point, or the other sampler's."""
        return copy.deepcopy(self._points[trial]) if trial < len(self._points) else self._sampler.ask(trial)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Passed on."""
        self._sampler.tell(event, hparams)

    def extended(self, rungs: Sequence[float]) -> None:
        """Passed on."""
        tell_extended(self._sampler, rungs)
