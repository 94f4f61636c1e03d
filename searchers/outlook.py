"""What the results of a search say about its space: where good points are, and where nothing is certain.

The model is that of `like`, of one search in its own space. It predicts points after full training, in units in which 0
is the best mean of all points and 1 the median of random ones.
"""

from __future__ import annotations

import itertools
from typing import Any, TypedDict

import numpy as np

from searchers.domains import Categorical
from searchers.like import LEAST, Earlier, Model, num_results
from searchers.rung_process import Array, Indices
from searchers.space import Space
from searchers.unit_cube import UnitCube, value_at

_NUM_POINTS = 5  # of each kind
_NUM_RANDOM, _NUM_NEAR, _NEAR = 1024, 512, 0.07
_NUM_PARTS = 5  # of a number's range
_APART = 0.15  # least distance of two points that are shown, as a root mean square over columns


class Prediction(TypedDict):
    hparams: dict[str, Any]
    expected: float
    deviation: float  # standard deviation


class Part(TypedDict, total=False):
    """A part of a number's range, or a category, and the mean prediction of points in it."""

    low: float
    high: float
    value: Any
    expected: float


class Outlook(TypedDict):
    results: int  # the number of results that the model knows; with few there is no model, and the others are empty
    best: list[Prediction]
    uncertain: list[Prediction]  # those that may be better than all others, the least certain first
    hparams: dict[str, list[Part]]


def outlook(space: Space, search: Earlier) -> Outlook:
    """Predict points of a space from what a search of it found; only ranges if the space's constraint allows no point
    that is drawn."""
    count, cube = num_results(search), UnitCube(space)
    if count < LEAST or not cube.width:
        return {"results": count, "best": [], "uncertain": [], "hparams": {}}
    model, rng = Model(cube, search), np.random.default_rng(0)
    at_random = cube.random(rng, _NUM_RANDOM)
    near = cube.near(rng, np.resize(model.best, (_NUM_NEAR, cube.width)), _NEAR)
    points = [point for point in map(cube.point, np.vstack([at_random, near])) if space.allows(point)]
    parts = _parts(cube, at_random, model.predictions(at_random, at_random)[0])
    if not points:
        return {"results": count, "best": [], "uncertain": [], "hparams": parts}
    rows = np.reshape([cube.row(point) for point in points], (len(points), cube.width))
    means, deviations = model.predictions(rows, at_random)
    # Without the uncertainty that all points share, which is that of the last rung's level.
    deviations = np.sqrt(deviations**2 - deviations.min() ** 2)

    def shown(order: Indices) -> list[Prediction]:
        chosen: list[int] = []
        for each in order.tolist():
            if len(chosen) < _NUM_POINTS and all(_distance(rows[each], rows[other]) > _APART for other in chosen):
                chosen.append(each)
        return [
            {"hparams": points[each], "expected": float(means[each]), "deviation": float(deviations[each])}
            for each in chosen
        ]

    may_be_best = np.flatnonzero(means - 2 * deviations < 0)
    return {
        "results": count,
        "best": shown(np.argsort(means, kind="stable")),
        "uncertain": shown(may_be_best[np.argsort(-deviations[may_be_best], kind="stable")]),
        "hparams": parts,
    }


def _distance(one: Array, other: Array) -> float:
    return float(np.sqrt(np.mean((one - other) ** 2)))


def _parts(cube: UnitCube, rows: Array, means: Array) -> dict[str, list[Part]]:
    """Return the mean prediction in each part of each hyperparameter's range, where a point has it."""
    found: dict[str, list[Part]] = {}
    for name, axis in cube.by_name.items():
        places = rows[:, axis.columns]
        if isinstance(axis.domain, Categorical):
            parts: list[tuple[Part, Array]] = [
                ({"value": value}, places[:, number] == 1) for number, value in enumerate(axis.domain.vals)
            ]
        else:
            parts = [
                (
                    {"low": value_at(axis.domain, low), "high": value_at(axis.domain, high)},
                    (low <= places[:, 0]) & (places[:, 0] < high),
                )
                for low, high in itertools.pairwise(np.linspace(0, 1, _NUM_PARTS + 1).tolist())
            ]
        present = np.ones(len(rows)) if axis.parent is None else rows[:, axis.parent]
        inside = [(part, means[is_in & (present == 1)]) for part, is_in in parts]
        found[name] = [{**part, "expected": float(some.mean())} for part, some in inside if len(some)]
    return found
