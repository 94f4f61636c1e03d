"""Points as rows of numbers: encoding, decoding, draws and neighbours."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from searchers import parse_space
from searchers.unit_cube import UnitCube

SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0},
        "width": {"type": "int", "minval": 8, "maxval": 64, "step": 8},
        "depth": {"type": "int", "minval": 1, "maxval": 100, "log": True},
        "dropout": {"type": "double", "minval": 0.0, "maxval": 0.5, "step": 0.1},
        "act": {"type": "categorical", "vals": ["relu", None, [1, 2]]},
        "batch": 64,
        "optimizer": {
            "type": "categorical",
            "vals": [
                {"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}},
                {"name": "adam", "variant": {"type": "categorical", "vals": ["w", "amsgrad"]}},
            ],
        },
    }
)
CUBE = UnitCube(SPACE)


def test_a_row_has_a_column_for_each_number_and_each_category() -> None:
    point = SPACE.sample(Random(0)) | {
        "lr": 1e-2,
        "width": 8,
        "act": None,
        "dropout": 0.5,
        "optimizer": {"name": "sgd", "momentum": 0.9},
    }
    # act, depth, dropout, lr, optimizer, momentum, variant, width: sorted; a category's own follow it
    row = CUBE.row(point)
    assert row[:3].tolist() == [0, 1, 0]
    assert row[4:].round(6).tolist() == [round(11 / 12, 6), 0.5, 1, 0, 1, 0.5, 0.5, 0.0625]
    assert CUBE.axes.tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 5, 6, 6, 7]
    assert CUBE.numbers(point).nonzero()[0].tolist() == [3, 4, 5, 8, 11]


def test_a_row_gives_its_point_back() -> None:
    for seed in range(200):
        point = SPACE.sample(Random(seed))
        again = CUBE.point(CUBE.row(point))
        assert SPACE.faults(again) == []
        for one, other in ((point, again), (point["optimizer"], again["optimizer"])):
            assert isinstance(one, dict)
            assert isinstance(other, dict)
            numbers = {name for name, value in one.items() if isinstance(value, float)}
            assert {n: other[n] for n in numbers} == pytest.approx({n: one[n] for n in numbers})
            if one is point:
                numbers |= {"optimizer"}
            assert {n: other[n] for n in other.keys() - numbers} == {n: one[n] for n in one.keys() - numbers}


def test_random_rows_are_uniform_points_of_the_space() -> None:
    rows = CUBE.random(np.random.default_rng(0), 1000)
    assert rows.min() >= 0
    assert rows.max() <= 1
    points = [CUBE.point(row) for row in rows]
    assert all(SPACE.faults(point) == [] for point in points)
    shares = {width: sum(point["width"] == width for point in points) / 1000 for width in range(8, 65, 8)}
    assert all(abs(share - 1 / 8) < 0.04 for share in shares.values()), shares
    assert all((CUBE.row(point)[6:11] == row[6:11]).sum() >= 4 for point, row in zip(points, rows, strict=True))


def test_near_rows_are_near_and_in_the_space() -> None:
    rng = np.random.default_rng(0)
    rows = CUBE.random(rng, 500)
    near = CUBE.near(rng, rows, 0.02)
    assert near.min() >= 0
    assert near.max() <= 1
    assert all(SPACE.faults(CUBE.point(row)) == [] for row in near)
    moved = np.abs(near - rows)[:, [3, 4, 5, 11]]  # the unconditional numbers
    assert moved.max() < 0.1
    assert 0.4 < (moved > 0).mean() < 0.6
    assert 0 < (near[:, 6] != rows[:, 6]).mean() < 0.03, "half of the 2 % that are drawn anew are another optimizer"


def test_a_conditional_hyperparameter_that_comes_to_exist_is_drawn_from_its_whole_range() -> None:
    rng = np.random.default_rng(0)
    adam = CUBE.row(SPACE.sample(Random(0)) | {"optimizer": {"name": "adam", "variant": "w"}})
    near = CUBE.near(rng, np.repeat(adam[None], 4000, axis=0), 0.5)
    momenta = near[near[:, 6] == 1, 8]
    assert len(momenta) > 500
    assert np.allclose(np.quantile(momenta, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.06)
