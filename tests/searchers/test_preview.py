"""Previews, which assume values in random order, compared with searches that run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import cast

import pytest

from searchers import ASHA, AdaptiveASHA, Method, PromotionASHA, RandomSearch, preview
from searchers.auto import Auto
from searchers.events import Action, Event, Reported
from searchers.method import MAX_TRIALS
from searchers.previews import Rates, expected
from searchers.simulate import Curve, Simulation, simulate


def trained(method: Method, worse: int) -> tuple[int, float]:
    """Return the trials and total length of a search with one worker, where trial n's value is n, or -n."""
    found = simulate(method, 1, lambda hparams: Curve(lambda step: worse * cast("int", hparams["trial"])))
    return found.trials, found.trained


@pytest.mark.parametrize("worse", [1, -1])
@pytest.mark.parametrize(("trials", "length", "rungs", "divisor"), [(64, 16, 3, 4), (27, 9, 3, 3)])
def test_promotion_trains_as_previewed(trials: int, length: int, rungs: int, divisor: float, worse: int) -> None:
    """Exact for powers of the divisor with the best trials first; a lower bound in any order."""
    method = PromotionASHA(
        max_trials=trials, max_length=length, num_rungs=rungs, divisor=divisor, max_concurrent_trials=1
    )
    expected = preview(method)
    created, total = trained(method, worse)
    assert created == expected.trials == trials
    assert total == expected.total if worse == 1 else total >= (expected.total or 0)


def test_stopping_trains_as_previewed_when_the_best_trials_come_first() -> None:
    """Only a trial that is among the best while they are few continues, which is the minimum."""
    method = ASHA(max_trials=64, max_length=16, num_rungs=3, max_concurrent_trials=1)
    expected = preview(method)
    created, total = trained(method, 1)
    assert created == expected.trials
    # Only trial 0 continues: 63 trials have length 1, and one has 16. The preview has 48, 12 and 4.
    assert total == 63 + 16 <= (expected.total or 0) == 48 + 48 + 64


def test_expected_matches_other_simulated_searches() -> None:
    def make() -> ASHA:
        return ASHA(max_trials=32, max_length=16, num_rungs=3)

    def total(seed: int) -> float:
        ranks = Random(seed).sample(range(32), 32)
        return simulate(make(), 4, lambda hparams: Curve(lambda _: ranks[cast("int", hparams["trial"])])).trained

    found = expected(make)
    assert found.likely is not None
    assert found.total is not None
    totals = [total(seed) for seed in range(15)]
    assert fmean(totals) == pytest.approx(found.total, rel=0.15)
    assert sum(found.likely[0] <= each <= found.likely[1] for each in totals) > 10


class Network:
    """A trial of another process than those of the preview. Wide networks and careful ones learn slowly and end better,
    so learning curves cross; wide ones also take longer. Validations have noise."""

    def __init__(self, seed: int, trial: int) -> None:
        self._rng = Random(f"{seed}:{trial}")
        self.width, careful = self._rng.random(), self._rng.random()
        self._asymptote = 0.2 + 0.5 * self._rng.random() - 0.1 * self.width - 0.2 * careful
        self._slow = 2 * math.exp(0.5 * self.width + 1.5 * careful)

    def loss(self, epochs: float) -> float:
        learned = self._asymptote + (2.3 - self._asymptote) / (1 + epochs / self._slow)
        return learned + 0.05 * self._rng.gauss(0, 1)


SEARCHES: dict[str, Callable[[], Method]] = {
    "random": lambda: RandomSearch(max_trials=32, max_length=16),
    "stopping": lambda: ASHA(max_trials=32, max_length=16, num_rungs=3),
    "promotion": lambda: PromotionASHA(max_trials=32, max_length=16, num_rungs=3),
    "adaptive": lambda: AdaptiveASHA(max_trials=32, max_length=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEARCHES)
def test_ranges_hold_85_of_100_other_searches(kind: str) -> None:
    """Epochs take from 7 s to 17 s, and 12 s in the mean, which is all that the preview is given."""
    make, workers = SEARCHES[kind], 6
    seen = expected(make, workers=workers, rates=Rates(mean=12))

    def run(seed: int) -> Simulation:
        def trial(hparams: Mapping[str, object]) -> Curve:
            network = Network(seed, cast("int", hparams["trial"]))
            return Curve(network.loss, cost=7 + 10 * network.width)

        return simulate(make(), workers, trial)

    found = [run(seed) for seed in range(1000, 1100)]
    for ends, values in (
        (seen.likely, [each.trained for each in found]),
        (seen.wall_s, [each.time for each in found]),
        (seen.busy_s, [each.busy for each in found]),
    ):
        if ends is not None:
            *_, low, high = ends
            assert sum(low <= value <= high for value in values) >= 85
            assert high < 5 * low


@pytest.mark.usefixtures("few_simulations")
def test_a_sampler_that_learns_makes_a_search_longer() -> None:
    """Later trials are better than earlier ones, so that more of them continue."""

    def total(learns: bool) -> float:
        return expected(lambda: ASHA(max_trials=16, max_length=16, num_rungs=3), learns=learns, workers=4).total or 0

    assert total(learns=True) > 1.1 * total(learns=False)


USED = [
    *(770, 952, 1622, 1316, 740, 1728, 1918, 1084, 902, 928),  # curves
    *(1056, 1366, 954, 966, 754, 1800, 1408, 876, 894, 970),  # that cross
    *(910, 1782, 1100, 3246, 836, 1634, 2316, 1726, 668, 1904),  # with noise
    *(990, 1086, 866, 1118, 910, 1064, 1466, 1112, 970, 1266),  # recorded
    *(1418, 1336, 744, 1078, 1010, 1980, 1762, 1824, 1294, 854),  # recorded and kept
]
"""What 50 searches with `auto` trained, 200 trials of at most 27 epochs on 4 slots, on the problems of
bench/preview.py. They train with real samplers, which takes minutes."""
REACHED = (200, 93.4, 49.8, 32.2)
"""The mean number of their trials at each rung."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("few_simulations")
def test_auto_trains_as_long_as_previewed() -> None:
    """Trials do not become better without end, so that a long search trains no more per trial than a short one."""
    seen = expected(lambda: Auto(max_trials=200, max_length=27), learns=True, workers=4)
    assert seen.total == pytest.approx(fmean(USED), rel=0.2)
    low, high = seen.likely or (0, 0)
    assert fmean(low <= used <= high for used in USED) >= 0.85
    assert high < 7 * low
    said = [rung.trials for rung in seen.brackets[0].rungs]
    for (rung, following), (reached, then) in zip(pairwise(said), pairwise(REACHED), strict=True):
        assert following / rung == pytest.approx(then / reached, abs=0.1)


@pytest.mark.usefixtures("few_simulations")
def test_measured_rates_are_uncertain_when_there_are_few() -> None:
    def ratio(measured: int, spread: float) -> float:
        rates = Rates(mean=12, spread=spread, measured=measured)
        _, low, high = expected(lambda: RandomSearch(max_trials=8, max_length=1), rates=rates).busy_s or (0, 1, 1)
        return high / low

    assert ratio(2, 0.1) > 1.2 * ratio(20, 0.1) > 1.2 * ratio(2000, 0.1)
    assert ratio(20, 0.5) > 1.5 * ratio(20, 0.1)


def test_start_times_count_for_each_trial_and_group() -> None:
    """By hand: three workers train 9 trials of 5 s in three rounds; each trial starts in 2 s, and each group in 7 s."""
    equal = Rates(mean=1, measured=10**6, start=2, boot=7)
    found = expected(lambda: RandomSearch(max_trials=9, max_length=5), workers=3, rates=equal)
    assert found.wall_s == pytest.approx([7 + 3 * (2 + 5)] * 3, rel=0.02)
    assert found.busy_s == pytest.approx([3 * 7 + 9 * (2 + 5)] * 3, rel=0.02)


def test_a_search_that_is_cut_has_as_many_trials_as_fit() -> None:
    """By hand: in 60 s, each of three workers trains eight trials of 7 s, and a ninth one is cut."""
    equal = Rates(mean=1, measured=10**8, start=2)
    found = expected(lambda: RandomSearch(max_trials=MAX_TRIALS, max_length=5), workers=3, rates=equal, max_wall_s=60)
    assert found.trials == 24
    assert found.wall_s == (60, 60, 60)
    assert found.cut == 1


@pytest.mark.usefixtures("few_simulations")
def test_a_budget_that_is_spent_before_the_workers_are_up_has_no_trials() -> None:
    slow = Rates(mean=1, boot=100)
    for limit in ({"max_wall_s": 60}, {"max_busy_s": 120}):
        found = expected(SEARCHES["stopping"], workers=3, rates=slow, **limit)
        assert (found.trials, found.cut) == (0, 1)


@pytest.mark.long
@pytest.mark.slow
def test_the_range_of_trials_within_a_budget_holds_85_of_100_other_searches() -> None:
    def make() -> Method:
        return ASHA(max_trials=MAX_TRIALS, max_length=16, num_rungs=3)

    def trials(seed: int) -> int:
        reported = set[int]()

        def trial(hparams: Mapping[str, object]) -> Curve:
            network = Network(seed, cast("int", hparams["trial"]))
            return Curve(network.loss, cost=7 + 10 * network.width)

        def watch(_: float, event: Event, actions: list[Action]) -> None:
            if isinstance(event, Reported):
                reported.add(event.trial)

        simulate(make(), 6, trial, until=240, watch=watch)
        return len(reported)

    seen = expected(make, workers=6, rates=Rates(mean=12), max_wall_s=240)
    assert seen.likely_trials is not None
    low, high = seen.likely_trials
    assert sum(low <= trials(seed) <= high for seed in range(1000, 1100)) >= 85
    assert high < 3 * low


def test_a_certain_total_has_no_range() -> None:
    found = expected(lambda: RandomSearch(max_trials=9, max_length=5))
    assert (found, found.likely) == (preview(RandomSearch(max_trials=9, max_length=5)), None)


def test_preview_refuses_objects_that_are_not_methods() -> None:
    class Mine:
        pass

    with pytest.raises(TypeError, match=r"needs a searchers\.Method, got .* of type Mine"):
        preview(Mine())  # type: ignore[arg-type]
