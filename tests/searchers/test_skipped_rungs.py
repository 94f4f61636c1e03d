"""Rungs with a low correlation are detected, and let more trials continue; the others stay strict."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from random import Random
from statistics import fmean
from typing import cast

import pytest

from searchers import ASHA, AdaptiveASHA, PromotionASHA
from searchers.rung import Rung
from searchers.rung_correlation import RungCorrelation, less_strict, rank_correlation
from searchers.simulate import Curve, simulate


def chosen_pairs(rho: float, *, trials: int, divisor: int, seed: int) -> tuple[list[float], list[tuple[float, float]]]:
    """Return values at a rung, and value pairs at both rungs for the best 1/divisor, normal with this correlation."""
    rng = Random(seed)
    values = [rng.gauss(0, 1) for _ in range(trials)]
    best = sorted(values)[: trials // divisor]
    return values, [(value, rho * value + math.sqrt(1 - rho**2) * rng.gauss(0, 1)) for value in best]


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9])
def test_the_correlation_is_that_of_all_trials_though_only_the_best_went_on(rho: float) -> None:
    drawn = [chosen_pairs(rho, trials=800, divisor=4, seed=seed) for seed in range(12)]
    assert fmean(rank_correlation(values, pairs) for values, pairs in drawn) == pytest.approx(rho, abs=0.1)
    among_the_best = fmean(rank_correlation([value for value, _ in pairs], pairs) for _, pairs in drawn)
    assert rho == 0.0 or among_the_best < rho - 0.1


def test_ranks_count_not_values() -> None:
    pairs = [(float(x), float(x % 7)) for x in range(40)]
    bent = [(math.exp(x / 10), math.inf if y == 6 else y**3) for x, y in pairs]
    values = [value for value, _ in pairs]
    assert rank_correlation(values, pairs) == pytest.approx(rank_correlation([x for x, _ in bent], bent))


def estimated(rho: float, *, trials: int) -> RungCorrelation:
    """Estimate from the best quarter of trials, whose values at both rungs are normal with this correlation."""
    correlation, rng = RungCorrelation(), Random(3)
    rung = Rung(length=1, divisor=4)
    for trial in range(trials):
        value = rng.gauss(0, 1)
        if rung.rank(trial, value):
            later = rho * value + math.sqrt(1 - rho**2) * rng.gauss(0, 1)
            if correlation.add(value, later, cast("Mapping[int, float]", rung.values).values()):
                rung.divisor = less_strict(4, correlation.estimate)
    return correlation


@pytest.mark.parametrize(("rho", "trials", "divisor"), [(0.0, 1000, 1), (0.9, 300, 4)])
def test_a_rung_is_as_strict_as_it_ranks(rho: float, trials: int, divisor: float) -> None:
    assert less_strict(4, estimated(rho, trials=trials).estimate) == divisor


def test_one_report_at_both_rungs_says_nothing() -> None:
    correlation = RungCorrelation()
    assert not any(correlation.add(value, value, [value]) for value in range(50))
    assert correlation.compared == 0


def test_the_number_of_pairs_at_a_rung_is_bounded() -> None:
    correlation = RungCorrelation()
    for trial in range(5000):
        correlation.add(trial * 0.618 % 1, trial * 0.3 % 1, range(1000))
    assert correlation.compared > 4900
    assert len(pickle.dumps(correlation)) < 20_000


def useless_first_rung(seed: int) -> Callable[..., Curve]:
    """At step 1 the loss is noise; from then on it is a constant of the trial."""

    def trial(hparams: object) -> Curve:
        number = hparams["trial"]  # type: ignore[index]
        first, later = Random(f"{seed}:{number}").random(), Random(f"{number}").random()
        return Curve(lambda step: first if step < 2 else later)

    return trial


@pytest.mark.parametrize("kind", [ASHA, PromotionASHA])
def test_a_search_skips_the_rung_and_stays_strict_at_the_next(kind: type[ASHA] | type[PromotionASHA]) -> None:
    found = kind(max_trials=400, max_length=64, num_rungs=4, max_concurrent_trials=8, skip_uninformative_rungs=True)
    exact = kind(max_trials=400, max_length=64, num_rungs=4, max_concurrent_trials=8)
    for method in (found, exact):
        simulate(method, 8, useless_first_rung(seed=5))
    assert len(found.ranked[1]) > 280
    assert 90 <= len(exact.ranked[1]) <= 150
    assert len(found.ranked[2]) < 0.4 * len(found.ranked[1])


def test_brackets_of_adaptive_asha_skip_too() -> None:
    def trained(skip: bool) -> float:
        method = AdaptiveASHA(
            max_trials=300, max_length=81, divisor=3, max_concurrent_trials=8, skip_uninformative_rungs=skip
        )
        return simulate(method, 8, useless_first_rung(seed=5)).trained

    assert trained(True) > 1.1 * trained(False)
