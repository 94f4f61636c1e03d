"""One trial as the page shows it: its row in the table and its curve, kept up with its events and metrics."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dray.records.hparams import flatten
from searchers.records import number_to_json
from searchers.views import TrialView

MAX_POINTS = 200
"""Most points of a curve."""


@dataclass(slots=True)
class Trial:
    """What is known of a trial.

    Attributes:
        view: what the search knows of it.
        hparams: by dotted name, as drawn; {} before it started.
        started, ended: Unix time in s; None: not yet.
        restarts: how often it was restarted.
        batches: trained, as its last metrics say.
        at, epochs, values, times: its validations with the searcher's metric, by batches.
        best, best_value: the place in these of the earliest best finite value, and the value; None: there is none.
        nan: by kind and name of a loss that is NaN or infinite, since which batches.
    """

    view: TrialView
    sign: int
    hparams: dict[str, Any] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    batches: int = 0
    at: list[int] = field(default_factory=list)
    epochs: list[float | None] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float | None] = field(default_factory=list)
    best: int | None = None
    best_value: float | None = None
    nan: dict[tuple[str, str], int] = field(default_factory=dict)
    _row: bytes | None = None
    _curve: bytes | None = None
    _text: str | None = None

    def see(self, view: TrialView) -> None:
        """Something has happened to it."""
        if view.hparams is not self.view.hparams:
            self.hparams = flatten(view.hparams or {})
        self.view = view
        self.changed()

    def validated(self, batches: int, epochs: float | None, value: float | None, time: float | None) -> None:
        """A validation; one at the same batches as an earlier one replaces it."""
        number = math.nan if value is None else value
        place = bisect_left(self.at, batches)
        if place < len(self.at) and self.at[place] == batches:
            self.epochs[place], self.values[place], self.times[place] = epochs, number, time
            self.best = None
        else:
            self.at.insert(place, batches)
            self.epochs.insert(place, epochs)
            self.values.insert(place, number)
            self.times.insert(place, time)
        if place == len(self.at) - 1 and self.best is not None:
            if math.isfinite(number) and self.sign * number < self.sign * self.values[self.best]:
                self.best = place
        else:
            finite = [i for i, each in enumerate(self.values) if math.isfinite(each)]
            self.best = min(finite, key=lambda i: self.sign * self.values[i], default=None)
        self.best_value = None if self.best is None else self.values[self.best]
        self._curve = None
        self.changed()

    def loss(self, series: tuple[str, str], batches: int, value: float | None) -> None:
        """A loss, which may be NaN."""
        if value is None or not math.isfinite(value):
            self.nan.setdefault(series, batches)
        elif batches >= self.nan.get(series, batches + 1):
            del self.nan[series]

    def changed(self) -> None:
        """Forget what was derived of it."""
        self._row = self._text = None

    def fields(self) -> dict[str, Any]:
        """Its row in the table, as JSON: times in s, numbers that are not finite as text."""
        return {
            "trial": self.view.id,
            "state": self.view.state,
            "batches": self.batches,
            "metric": number_to_json(self.values[-1]) if self.values else None,
            "best_metric": self.best_value,
            "best_batches": None if self.best is None else self.at[self.best],
            "nan_since": min(self.nan.values(), default=None),
            "restarts": self.restarts,
            "started": self.started,
            "ended": self.ended,
            "hparams": plain(self.hparams),
        }

    def row(self) -> bytes:
        """`fields`, encoded."""
        if self._row is None:
            self._row = json.dumps(self.fields(), allow_nan=False, separators=(",", ":")).encode()
        return self._row

    def curve(self, along: str) -> bytes:
        """Its curve, encoded: ``x`` in batches or epochs, ``y`` the searcher's metric, null where it is not finite."""
        if self._curve is None:
            chosen = thinned(len(self.at))
            xs: Sequence[Any] = self.epochs if along == "epochs" else self.at
            curve = {
                "trial": self.view.id,
                "x": [xs[i] for i in chosen],
                "y": [self.values[i] if math.isfinite(self.values[i]) else None for i in chosen],
                "of": len(self.at),
            }
            self._curve = json.dumps(curve, allow_nan=False, separators=(",", ":")).encode()
        return self._curve

    def redraw(self) -> None:
        """Forget its curve: it is drawn along something else."""
        self._curve = None

    def text(self) -> str:
        """What a search looks through, in lower case."""
        if self._text is None:
            drawn = " ".join(f"{name}={shown(value)}" for name, value in self.hparams.items())
            self._text = f"{self.view.id} {self.view.state} {drawn}".lower()
        return self._text


def thinned(points: int, most: int = MAX_POINTS) -> list[int]:
    """The places of the points of a curve that are drawn: all, or so many evenly, with the first and the last."""
    return list(range(points)) if points <= most else np.linspace(0, points - 1, most).astype(int).tolist()


def plain(value: Any) -> Any:
    """A value as strict JSON: numbers that are not finite become "nan", "inf" and "-inf"."""
    match value:
        case float():
            return number_to_json(value)
        case Mapping():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def shown(value: Any) -> str:
    """As the page shows it."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
