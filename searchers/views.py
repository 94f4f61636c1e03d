"""What a search knows of each trial, and how events and actions change it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from searchers.domains import Const, Nested
from searchers.events import Event, Exited, Pause, Reported, Resume, Started, Stop, assert_never
from searchers.objectives import Losses, Objectives, is_better
from searchers.space import Space

State = Literal["PENDING", "RUNNING", "PAUSED", "PRUNED", "COMPLETED", "ERRORED", "INVALID_HP", "CANCELED"]

END_STATES: dict[str, State] = {
    "completed": "COMPLETED",
    "stopped": "PRUNED",
    "diverged": "PRUNED",
    "errored": "ERRORED",
    "invalid_hp": "INVALID_HP",
    "canceled": "CANCELED",
}
"""The state of a trial that has ended for this reason."""
NEVER_BEST: tuple[State, ...] = ("ERRORED", "INVALID_HP")  # states of trials that are never a search's best


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """What the search knows of a trial. Its values are as measured.

    It is PENDING until it gets its workers, for the first time or after a `Resume`; PAUSED by the method; PRUNED,
    COMPLETED, ... when it has ended. If the search is extended, a completed trial may be resumed. With several metrics,
    the report with the least violation, and among equals with the best first objective, stands for the trial: `losses`
    are its, and `best` is its first objective, if it keeps the constraints.

    >>> TrialView(id=0).after(Exited(trial=0, reason="diverged")).state
    'PRUNED'
    """

    id: int
    state: State = "PENDING"
    hparams: Mapping[str, object] | None = None  # as drawn when it first started
    best: float | None = None  # finite
    best_step: float | None = None
    losses: Losses | None = None
    last: float | None = None  # may be NaN
    last_step: float | None = None  # the greatest reported
    stop_requested: bool = False  # and not resumed since; it may not have stopped yet

    @property
    def ended(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "PAUSED")

    def after(
        self,
        event: Event,
        *,
        hparams: Mapping[str, object] | None = None,
        smaller_is_better: bool = True,
        objectives: Objectives | None = None,
    ) -> TrialView:
        """The trial after this event."""
        match event:
            case Started():
                # A paused trial can start if its restart crossed the pause; to the method it stays paused.
                state: State = "PAUSED" if self.state == "PAUSED" else "RUNNING"
                return replace(self, state=state, hparams=hparams if self.hparams is None else self.hparams)
            case Reported(step=step, value=value):
                found: dict[str, Any] = {"last": value, "last_step": max(step, self.last_step or step)}
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
        """The trial after this decision of the method."""
        match action:
            case Stop():
                return replace(self, stop_requested=True)
            case Pause():
                return replace(self, state="PAUSED")
            case Resume():
                return replace(self, state="PENDING", stop_requested=False)
            case _:
                assert_never(action)


class TrainedShares(Mapping[int, float]):
    """How much of its length each trial has trained, from 0 to 1; computed when it is asked for.

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
    """Hyperparameters, read-only, in half the memory of a dict: equal names are stored once for all trials.

    `Points` makes them. Nested hyperparameters are plain dicts.
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
    """The same as a new dict; of a `Point` five times as fast as by `dict`."""
    return dict(zip(hparams._places, hparams._values, strict=True)) if isinstance(hparams, Point) else dict(hparams)


class Points:
    """Makes the points of one search, which share their names, their strings, and what is constant in the space.

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
        """A point with these hyperparameters, which the caller no longer changes."""
        names = tuple(hparams)
        places = self._places.get(names)
        if places is None:
            places = self._places[names] = {name: place for place, name in enumerate(names)}
        return Point(places, tuple(self._shared(name, value) for name, value in hparams.items()))

    def _shared(self, name: str, value: object) -> object:
        if type(value) is str:
            return sys.intern(value)
        # By its text: True is no 1.
        return self._constants.setdefault((name, repr(value)), value) if name in self._constant else value


def _is_constant(domain: object) -> bool:
    return isinstance(domain, Const) or (
        isinstance(domain, Nested) and all(_is_constant(inner) for _, inner in domain.domains)
    )
