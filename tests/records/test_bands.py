"""Bands of learning curves, by closed form."""

from __future__ import annotations

import math

import pytest

from dray.serve.curves import LEAST, Band, band_of


def lines(slopes: list[float], xs: list[float]) -> list[tuple[list[float], list[float]]]:
    return [(xs, [slope * x for x in xs]) for slope in slopes]


def band(*given: object, **options: int) -> Band:
    found = band_of(*given, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_quartiles_of_lines_are_lines() -> None:
    found = band(lines([0, 1, 2, 3, 4], [1.0, 2.0, 5.0]))
    assert found.x == [1, 2, 5]
    assert (found.low, found.middle, found.high) == ([1, 2, 5], [2, 4, 10], [3, 6, 15])
    assert (found.trials, found.of, found.exact, found.not_finite) == ([5, 5, 5], 5, True, 0)


def test_curves_are_interpolated_between_their_points() -> None:
    curves = [*lines([1, 1, 1], [0.0, 10.0]), *lines([1, 1], [0.0, 4.0, 10.0])]
    found = band(curves)
    assert found.x == [0, 4, 10]
    assert found.low == found.middle == found.high == [0, 4, 10]
    assert found.trials == [5, 5, 5]


def test_many_places_are_thinned_evenly_and_lines_stay_lines() -> None:
    xs = [i**2 / 100 for i in range(1001)]
    found = band(lines([1, 2, 3, 4, 5], xs), points=11)
    assert not found.exact
    assert found.x == pytest.approx([1000.0 * i for i in range(11)])
    assert found.middle == pytest.approx([3 * x for x in found.x])


def test_a_band_ends_where_fewer_than_half_go_on() -> None:
    curves = [*lines([1] * 5, [1.0, 2.0]), *lines([1] * 5, [1.0, 2.0, 3.0]), *lines([1] * 2, [1.0, 2.0, 3.0, 4.0])]
    found = band(curves)
    assert (found.x, found.trials, found.of) == ([1, 2, 3], [12, 12, 7], 12)


def test_too_few_trials_have_no_band() -> None:
    assert band_of(lines([1] * (LEAST - 1), [1.0, 2.0])) is None
    assert band_of(lines([1] * LEAST, [1.0, 2.0])) is not None
    assert band_of([([float(i)], [0.0]) for i in range(2 * LEAST)]) is None, "never enough at one place"
    assert band_of([]) is None


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    diverged = [([1.0, 2.0, 3.0], [1.0, math.nan, math.inf]), ([1.0, None, 3.0], [1.0, 7.0, 3.0]), ([1.0], [math.nan])]
    found = band([*lines([1] * 4, [1.0, 2.0, 3.0]), *diverged])
    assert (found.x, found.trials) == ([1, 2, 3], [6, 5, 5])
    assert (found.middle, found.of, found.not_finite) == ([1, 2, 3], 6, 2)
