"""Samplers of hyperparameters: the protocol, and the samplers that need only a space.

A `Search` asks its sampler when a trial gets its workers, so that the sampler can learn from as many results as
possible. It tells the sampler every event in the order of the journal, also during a replay.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Protocol, TypeAlias, cast, runtime_checkable

from searchers.errors import SpaceError
from searchers.events import Event, Source
from searchers.records import hparams_from_json, hparams_to_json
from searchers.space import MAX_GRID, PATH, Space

Prior: TypeAlias = Mapping[str, Mapping[str, object]]
"""Beliefs by the dotted names of hyperparameters, such as `{"lr": {"around": 1e-3, "within": 3}}`."""


@runtime_checkable
class Sampler(Protocol):
    """Draws hyperparameters, by ask-and-tell. A sampler must follow these rules:

    * `ask` depends only on the events so far, the trial's number and the sampler's seed, and changes no state. A
      replayed journal therefore restores the sampler.
    * The result of `ask` belongs to the caller, and consists of JSON values.

    A sampler that compares trials by length may also have a method `extended(rungs)`, which is called with the new
    `Method.rungs` when the search is extended; a replay calls it at the same place among the events. A sampler for
    population-based training also has `explore(trial, hparams)`, with the rules of `ask`: it returns hyperparameters
    for a trial that begins from a checkpoint of a trial with `hparams`. Its method `forked(trial, source)`, if it has
    one, is called when such a trial is created, with a `Source`; a replay calls it at the same place among the events.
    """

    def ask(self, trial: int) -> dict[str, object]:
        """Return hyperparameters for this trial, which is about to start for the first time.

        Raises:
            SpaceError: There is no point, e.g. because none satisfies the space's constraint.
        """

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Learn from this event.

        Args:
            event: A report's value is normalised: smaller is better, and +inf if it was not finite. In a search with
                several metrics the report has losses: see `Reported`.
            hparams: The trial's hyperparameters; empty if it ended before it started.
        """


def notify_extended(sampler: Sampler, rungs: Sequence[float]) -> None:
    """Call the sampler's `extended`, if it has one."""
    extended = getattr(sampler, "extended", None)
    if extended is not None:
        extended(rungs)


def notify_forked(sampler: Sampler, trial: int, source: Source) -> None:
    """Call the sampler's `forked`, if it has one."""
    forked = getattr(sampler, "forked", None)
    if forked is not None:
        forked(trial, source)


def explore(sampler: Sampler, trial: int, hparams: dict[str, object]) -> dict[str, object]:
    """Let the sampler derive the hyperparameters of a trial from those of its source, if it has a method `explore`."""
    explore = getattr(sampler, "explore", None)
    return hparams if explore is None else cast("dict[str, object]", explore(trial, hparams))


def draw(sampler: Sampler, space: Space, trial: int) -> dict[str, object]:
    """Draw the trial's hyperparameters, as a replay will see them. Raises `SpaceError` if they are not in the space."""
    try:
        point = hparams_from_json(hparams_to_json(sampler.ask(trial)))
        faults = space.faults(point)
    except ValueError as error:
        faults = [(PATH, str(error))]
    if faults:
        advice = f"; {type(sampler).__name__}.ask({trial}) must return a point of the space"
        raise SpaceError([*faults[:-1], (faults[-1][0], faults[-1][1] + advice)])
    return cast("dict[str, object]", point)


class RandomSampler:
    """Independent draws from the space: the draw for trial 7 depends only on the seed and on 7."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.seed = space, seed

    def ask(self, trial: int) -> dict[str, object]:
        """Draw a point that depends only on the seed and the trial."""
        return self.space.sample(Random(f"{self.seed}:{trial}"))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """No-op: draws don't depend on results."""


class GridSampler:
    """The points of `Space.grid()`, from the last to the first, as in Determined.

    Raises:
        SpaceError: A number has neither a `count` nor a `step`, or the grid has more than `most` points.

    >>> from searchers import parse_space
    >>> grid = GridSampler(parse_space({"x": {"type": "int", "minval": 1, "maxval": 3, "count": 3}}))
    >>> [grid.ask(trial) for trial in range(len(grid))]
    [{'x': 3}, {'x': 2}, {'x': 1}]
    """

    def __init__(self, space: Space, most: int = MAX_GRID) -> None:
        self.space = space
        self._points = space.grid(most)

    def __len__(self) -> int:
        return self._points.size

    def ask(self, trial: int) -> dict[str, object]:
        """Return the trial's point of the grid.

        Raises:
            SpaceError: The grid has no point for this trial.
        """
        if trial >= len(self):
            missing = f"the grid has only {len(self)} points, and none for trial {trial}, counted from 0"
            raise SpaceError([(PATH, f"{missing}; create as many trials as points, or use random search")])
        return cast("dict[str, object]", copy.deepcopy(self._points.nth(len(self) - 1 - trial)))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """No-op: draws don't depend on results."""


class FirstPoints:
    """Known good points for the first trials, and another sampler for the rest.

    Args:
        space: The space of the points.
        points: The points for trials 0, 1, ..., complete except that constants may be omitted.
        sampler: The sampler for all other trials. It learns from all trials.

    Raises:
        SpaceError: A point is not in the space; every fault is listed, e.g. `searcher.points[2].lr`.

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
        """Return a given point, or when none is left, the other sampler's."""
        return copy.deepcopy(self._points[trial]) if trial < len(self._points) else self._sampler.ask(trial)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Pass the event on to the other sampler."""
        self._sampler.tell(event, hparams)

    def extended(self, rungs: Sequence[float]) -> None:
        """Pass the rungs of an extended search on to the other sampler."""
        notify_extended(self._sampler, rungs)

    def forked(self, trial: int, source: Source) -> None:
        """Pass the source of a forked trial on to the other sampler."""
        notify_forked(self._sampler, trial, source)

    def explore(self, trial: int, hparams: dict[str, object]) -> dict[str, object]:
        """Let the other sampler derive hyperparameters from those of a source."""
        return explore(self._sampler, trial, hparams)


STARTUP: Mapping[str, int] = MappingProxyType({"multi_fidelity": 12, "tpe": 10})
"""Results before the first proposal of the samplers that learn, by default; until then, they draw at random."""
