"""Fronts, crowding distances and the order of trials, compared with their definitions."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from searchers import Losses
from searchers.pareto import ParetoOrder, crowding_distances, dominates, pareto_order
from searchers.rung import Rung


def slow_fronts(points: dict[int, tuple[float, ...]]) -> list[set[int]]:
    """Compute fronts by definition: repeatedly remove the points that no remaining point dominates."""
    left, fronts = dict(points), []
    while left:
        front = {t for t, p in left.items() if not any(dominates(q, p) for q in left.values())}
        fronts.append(front)
        left = {trial: point for trial, point in left.items() if trial not in front}
    return fronts


def slow_order(losses: dict[int, Losses | None]) -> list[int]:
    """Return the documented order, computed by sorting."""
    kept = {trial: its.values for trial, its in losses.items() if its is not None and its.violation == 0}
    order: list[int] = []
    for front in slow_fronts(kept):
        members = sorted(front)
        distances = dict(zip(members, crowding_distances([kept[trial] for trial in members]), strict=True))
        order += sorted(members, key=lambda trial: (-distances[trial], trial))
    rest = [trial for trial in losses if trial not in kept]
    return order + sorted(rest, key=lambda t: (math.inf if losses[t] is None else losses[t].violation, t))  # type: ignore[union-attr]


def random_losses(rng: Random, objectives: int) -> Losses | None:
    odd = rng.random()
    if odd < 0.05:
        return None
    values = tuple(round(rng.random(), rng.choice((1, 3))) for _ in range(objectives))  # many are equal
    return Losses(values, (round(rng.random(), 1),) if odd < 0.25 else (-0.5,))


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_order_is_the_documented_one_after_additions_and_removals(objectives: int, seed: int) -> None:
    rng = Random(f"{objectives}:{seed}")
    order, there = ParetoOrder(), dict[int, Losses | None]()
    for trial in rng.sample(range(60), 60):
        there[trial] = random_losses(rng, objectives)
        order.add(trial, math.inf if there[trial] is None else there[trial])  # type: ignore[arg-type]
        if rng.random() < 0.1:
            gone = rng.choice(sorted(there))
            del there[gone]
            order.remove(gone)
        if rng.random() < 0.3 or len(there) == 60:
            wanted = slow_order(there)
            assert list(order) == wanted
            assert not wanted or order.last() == wanted[-1]
            for count in (0, 1, len(there) // 3, len(there)):
                assert {trial for trial in there if order.is_among(trial, count)} == set(wanted[:count])


def test_fronts_of_a_grid_are_its_diagonals() -> None:
    side = 5
    order = pareto_order({x * side + y: Losses((x, y)) for x, y in itertools.product(range(side), repeat=2)})
    # (x, y) is dominated by chains of x + y points.
    assert all(order.front_of(x * side + y) == x + y + 1 for x, y in itertools.product(range(side), repeat=2))
    assert order.front == [0]


def test_front_of_points_on_a_line_are_all_of_them() -> None:
    order = pareto_order({trial: Losses((trial, 10 - trial)) for trial in range(11)})
    assert sorted(order.front) == list(range(11))
    assert set(order.front[:2]) == {0, 10}, "the ends come first"


def test_crowding_distance_does_not_depend_on_units() -> None:
    points = [(0.0, 9.0), (1.0, 4.0), (3.0, 1.0), (9.0, 0.0)]
    scaled = [(1e6 * x - 5, 1e-6 * y) for x, y in points]
    assert crowding_distances(scaled) == pytest.approx(crowding_distances(points))


def test_equal_trials_are_ordered_by_number() -> None:
    assert list(pareto_order({trial: Losses((1.0, 2.0)) for trial in (3, 1, 2)})) == [1, 2, 3]


def test_violation_comes_before_everything_else() -> None:
    losses = {
        0: Losses((0.0, 0.0), (0.5,)),
        1: Losses((9.0, 9.0), (0.0,)),
        2: Losses((5.0, 5.0), (0.25,)),
        3: None,
        4: Losses((8.0, 8.0), (-1.0,)),
    }
    order = pareto_order(losses)
    assert list(order) == [4, 1, 2, 0, 3]
    assert order.front == [4]
    assert [order.front_of(trial) for trial in range(5)] == [None, 2, None, None, 1]


def test_no_front_without_a_trial_that_keeps_the_limits() -> None:
    assert pareto_order({0: Losses((1.0,), (0.5,))}).front == []


@pytest.mark.parametrize("divisor", [2, 3, 1.5])
def test_rung_continues_the_best_by_the_order_at_that_moment(divisor: float) -> None:
    rng, there = Random(5), dict[int, Losses | None]()
    rung = Rung(length=1, divisor=divisor, order=ParetoOrder())
    for trial in range(50):
        there[trial] = random_losses(rng, 2)
        count = max(int(len(there) / divisor + 1e-9), 1)
        best = slow_order(there)[:count]
        assert rung.rank(trial, math.inf if there[trial] is None else there[trial]) == (trial in best)  # type: ignore[arg-type]
        assert rung.best() == [each for each in best if there[each] is not None]


def test_rung_without_a_trial_among_the_best() -> None:
    rung = Rung(length=1, divisor=3, min_best=0, order=ParetoOrder())
    assert [rung.rank(trial, Losses((trial, trial))) for trial in range(3)] == [False, False, False]
    assert rung.best() == [0]
    rung.withdraw(0)
    assert rung.best() == []
    assert dict(rung.values) == {1: Losses((1, 1)), 2: Losses((2, 2))}
    rung.min_best = 1
    assert rung.best() == [1]
