"""Samplers draw the hyperparameters of trials: the protocol, and those that need only a space.

A `Search` asks its sampler when a trial gets its workers, so that a sampler that learns knows as much as possible, and
tells it every event in the order of the journal, also when a journal is replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Protocol, cast, runtime_checkable

from searchers.errors import FieldError, SpaceError
from searchers.events import Event
from searchers.objectives import Objectives
from searchers.records import hparams_from_json, hparams_to_json
from searchers.space import PATH, Space


@runtime_checkable
class Sampler(Protocol):
    """Draws hyperparameters, by ask-and-tell. The rules:

    * `ask` depends only on the events so far, the trial's number and the sampler's seed, and changes nothing. So a
      sampler continues where it was after a replay of its journal.
    * What `ask` returns belongs to the caller, and is JSON.

    A sampler that compares trials by length may also have `extended(rungs)`, which is called when the search is
    extended, with its new `Method.rungs`; in the order of the events, also when a journal is replayed.
    """

    def ask(self, trial: int) -> dict[str, object]:
        """Hyperparameters for this trial, which is about to start for the first time."""

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Learn from this event.

        Args:
            event: Its value is normalised: smaller is better, and +inf if it was not finite. In a search with several
                metrics, it has losses: see `Reported`.
            hparams: The trial's; empty if it ended before it started.
        """


def notify_extended(sampler: Sampler, rungs: Sequence[float]) -> None:
    """Call the sampler's `extended`, if it has one."""
    extended = getattr(sampler, "extended", None)
    if extended is not None:
        extended(rungs)


def drawn(sampler: Sampler, space: Space, trial: int) -> dict[str, object]:
    """What the sampler returns for this trial, as a replay will see it."""
    asked = sampler.ask(trial)
    try:
        point = hparams_from_json(hparams_to_json(asked))
        faults = space.faults(point)
    except ValueError as error:
        faults = [(PATH, str(error))]
    if faults:
        advice = f"; {type(sampler).__name__}.ask({trial}) must return a point of the space"
        raise SpaceError([*faults[:-1], (faults[-1][0], faults[-1][1] + advice)])
    return cast("dict[str, object]", point)


class RandomSampler:
    """Independent draws from the space: trial 7's depends only on the seed and on 7."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.seed = space, seed

    def ask(self, trial: int) -> dict[str, object]:
        return self.space.sample(Random(f"{self.seed}:{trial}"))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Does nothing: draws don't depend on results."""


class GridSampler:
    """The points of `Space.grid()`, from the last to the first, as in Determined.

    >>> from searchers import parse_space
    >>> grid = GridSampler(parse_space({"x": {"type": "int", "minval": 1, "maxval": 3, "count": 3}}))
    >>> [grid.ask(trial) for trial in range(len(grid))]
    [{'x': 3}, {'x': 2}, {'x': 1}]
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._points = space.grid()

    def __len__(self) -> int:
        return len(self._points)

    def ask(self, trial: int) -> dict[str, object]:
        if trial >= len(self._points):
            given = f"the grid has only {len(self._points)} points, so there is none for trial {trial}, numbered from 0"
            raise SpaceError([(PATH, f"{given}; create as many trials as points, or use random search")])
        return copy.deepcopy(self._points[-1 - trial])

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Does nothing: draws don't depend on results."""


class FirstPoints:
    """Known good points for the first trials, another sampler for the rest.

    Args:
        space: The points' space.
        points: For trials 0, 1, ...: complete points of the space, except that constants may be left out.
        sampler: For the other trials. It learns from all trials.

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
        """Passed to the other sampler."""
        self._sampler.tell(event, hparams)

    def extended(self, rungs: Sequence[float]) -> None:
        """Passed to the other sampler."""
        notify_extended(self._sampler, rungs)


def named_sampler(
    name: str,
    space: Space,
    *,
    seed: int,
    rungs: Sequence[float],
    options: Mapping[str, object] = MappingProxyType({}),
    objectives: Objectives | None = None,
) -> Sampler:
    """The sampler of this name: "random", "multi_fidelity", or one of `OptunaSampler`'s, which has the arguments."""
    # Imports here, not above: Optuna and scipy take most of a second.
    if name not in ("random", "multi_fidelity"):
        from searchers.optuna_sampler import OptunaSampler

        return OptunaSampler(space, seed=seed, rungs=rungs, name=name, options=options, objectives=objectives)
    if options:
        raise FieldError([("searcher.sampler.options", f"{name} has no options, got {options}; remove them")])
    if name == "random":
        return RandomSampler(space, seed)
    if objectives is not None:
        given = "; ".join(map(str, objectives.metrics))
        what = f"multi_fidelity takes one objective without constraints, but searcher.metrics has: {given}"
        raise FieldError([("searcher.sampler.name", f"{what}. Use tpe, gp, nsga2 or random")])
    from searchers.multi_fidelity import MultiFidelitySampler

    return MultiFidelitySampler(space, seed=seed, rungs=rungs)
