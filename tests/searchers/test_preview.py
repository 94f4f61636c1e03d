"""Previews, which assume values in random order, compared with searches that run."""

from __future__ import annotations

from random import Random
from statistics import fmean
from typing import cast

import pytest

from searchers import ASHA, Method, PromotionASHA, RandomSearch, preview
from searchers.previews import expected
from searchers.simulate import Curve, simulate


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


def test_a_certain_total_has_no_range() -> None:
    found = expected(lambda: RandomSearch(max_trials=9, max_length=5))
    assert (found, found.likely) == (preview(RandomSearch(max_trials=9, max_length=5)), None)


def test_preview_refuses_objects_that_are_not_methods() -> None:
    class Mine:
        pass

    with pytest.raises(TypeError, match=r"needs a searchers\.Method, got .* of type Mine"):
        preview(Mine())  # type: ignore[arg-type]
