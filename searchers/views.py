"""A search's views of its trials, and their changes by events and actions."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from searchers.domains import Const, Nested
from searchers.events import Event, Exited, Losses, Pause, Reported, Resume, Started, Stop, assert_never
from searchers.objectives import Objectives, is_better
from searchers.space import Space

State = Literal[
    "PENDING", "RUNNING", "PAUSED", "PRUNED", "COMPLETED", "ERRORED", "INVALID_HP", "OUT_OF_MEMORY", "CANCELED"
]
"""The state of a trial; docs/cli.md explains each."""

END_STATES: dict[str, State] = {
    "completed": "COMPLETED",
    "stopped": "PRUNED",
    "diverged": "PRUNED",
    "errored": "ERRORED",
    "invalid_hp": "INVALID_HP",
    "out_of_memory": "OUT_OF_MEMORY",
    "canceled": "CANCELED",
}
"""The state of an ended trial, by reason."""
FAILED_STATES: tuple[State, ...] = ("ERRORED", "OUT_OF_MEMORY")
NEVER_BEST: tuple[State, ...] = (*FAILED_STATES, "INVALID_HP")  # states of trials that are never a search's best


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A search's view of a trial, with values as measured.

    A trial is PENDING until it gets workers, for the first time or after a `Resume`; PAUSED by the method; PRUNED,
    COMPLETED, ... when it has ended. If the search is extended, a completed trial may be resumed. With several metrics,
    a trial is represented by its report with the smallest violation and, among equals, the best first objective.

    >>> TrialView(id=0).after(Exited(trial=0, reason="diverged")).state
    'PRUNED'
    """

    id: int
    state: State = "PENDING"
    hparams: Mapping[str, object] | None = None  # None before the trial first started
    best: float | None = None  # best finite value; with several metrics, the representative report's if feasible
    best_step: float | None = None
    losses: Losses | None = None  # those of the representative report
    last: float | None = None  # may be NaN
    begin: float = 0.0  # step of the checkpoint of another trial that it begins from
    last_step: float | None = None  # the largest reported step; before the first report that of the source, if any
    last_batches: int | None = None  # batches trained at the latest report, if the driver says so
    stop_requested: bool = False  # the trial may still be running; reset by a `Resume`

    @property
    def ended(self) -> bool:
        """Whether the trial has ended."""
        return self.state not in ("PENDING", "RUNNING", "PAUSED")

    def after(
        self,
        event: Event,
        *,
        hparams: Mapping[str, object] | None = None,
        smaller_is_better: bool = True,
        objectives: Objectives | None = None,
    ) -> TrialView:
        """Return the view after this event (with values as measured); `hparams` are those of the first `Started`."""
        match event:
            case Started():
                # A paused trial can start if its restart coincided with the pause; for the method it remains paused.
                state: State = "PAUSED" if self.state == "PAUSED" else "RUNNING"
                return replace(self, state=state, hparams=hparams if self.hparams is None else self.hparams)
            case Reported(step=step, value=value):
                last_step = max(step, self.last_step or step)
                found: dict[str, Any] = {"last": value, "last_step": last_step, "last_batches": event.batches}
                if objectives is not None:
                    losses = objectives.normalised(event.metrics) if event.metrics else None
                    if losses is not None and (self.losses is None or is_better(losses, self.losses)):
                        best = (None, None) if losses.violation else (value, step)
                        found |= {"losses": losses, "best": best[0], "best_step": best[1]}
                elif (
                    value is not None
                    and math.isfinite(value)
                    and (self.best is None or (value < self.best if smaller_is_better else value > self.best))
                ):
                    found |= {"best": value, "best_step": step}
                return replace(self, **found)
            case Exited(reason=reason):
                return replace(self, state=END_STATES[reason])
            case _:
                assert_never(event)

    def under(self, action: Stop | Pause | Resume) -> TrialView:
        """Return the view after this action of the method."""
        match action:
            case Stop():
                return replace(self, stop_requested=True)
            case Pause():
                return replace(self, state="PAUSED")
            case Resume():
                return replace(self, state="PENDING", stop_requested=False)
            case _:
                assert_never(action)


def num_reached(rungs: Sequence[float], step: float, *, is_complete: bool) -> int:
    """The number of rungs that a trial has reached at this step, in the searcher's unit. One that has completed was
    trained as far as it can be, also if it ended itself before the last rung."""
    return bisect_right(rungs, math.inf if is_complete else step)


class TrainedShares(Mapping[int, float]):
    """The share of `length` that each trial has trained, from 0 to 1, computed on access; 0 for an unknown length of 0.

    >>> TrainedShares({7: TrialView(id=7, last_step=2)}, 8)[7]
    0.25
    """

    def __init__(self, views: Mapping[int, TrialView], length: float) -> None:
        self._views, self._length = views, length

    def __getitem__(self, trial: int) -> float:
        return min((self._views[trial].last_step or 0) / self._length, 1.0) if self._length else 0.0

    def __iter__(self) -> Iterator[int]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Point(Mapping[str, object]):
    """Read-only hyperparameters in half the memory of a dict, since `Points` stores equal names once for all trials.

    Nested hyperparameters are plain dicts.
    """

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int], values: tuple[object, ...]) -> None:
        self._places, self._values = places, values

    def __getitem__(self, name: str) -> object:
        return self._values[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return repr(as_dict(self))


def as_dict(hparams: Mapping[str, object]) -> dict[str, object]:
    """Copy the hyperparameters to a dict; for a `Point` this is five times as fast as `dict`."""
    return dict(zip(hparams._places, hparams._values, strict=True)) if isinstance(hparams, Point) else dict(hparams)


class Points:
    """Factory of the points of one search, which share their names, strings and constants.

    >>> from searchers import parse_space
    >>> points = Points(parse_space({"lr": {"type": "double", "minval": 0, "maxval": 1}, "sizes": [8, 4]}))
    >>> one, other = points({"lr": 0.25, "sizes": [8, 4]}), points({"lr": 0.5, "sizes": [8, 4]})
    >>> one, one["sizes"] is other["sizes"]
    ({'lr': 0.25, 'sizes': [8, 4]}, True)
    """

    def __init__(self, space: Space) -> None:
        self._constant = {name for name, domain in space.root.domains if _is_constant(domain)}
        self._constants: dict[tuple[str, str], object] = {}
        self._places: dict[tuple[str, ...], dict[str, int]] = {}

    def __call__(self, hparams: Mapping[str, object]) -> Point:
        """Create a point. The caller must not change `hparams` afterwards."""
        names = tuple(hparams)
        places = self._places.get(names)
        if places is None:
            places = self._places[names] = {name: place for place, name in enumerate(names)}
        return Point(places, tuple(self._shared(name, value) for name, value in hparams.items()))

    def _shared(self, name: str, value: object) -> object:
        if type(value) is str:
            return sys.intern(value)
        # The key is the repr, since True == 1.
        return self._constants.setdefault((name, repr(value)), value) if name in self._constant else value


def _is_constant(domain: object) -> bool:
    return isinstance(domain, Const) or (
        isinstance(domain, Nested) and all(_is_constant(inner) for _, inner in domain.domains)
    )
