"""Promotion in closed form (rungs 1, 4, 16, divisor 4), compared with the paper and a naive implementation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from searchers import Create, Done, Pause, PromotionASHA, Resume, Stop
from searchers.events import Action
from searchers.simulate import Curve, simulate
from searchers.testing import Extension, play
from tests.searchers.helpers import leave, ranked, report
from tests.searchers.naive_promotion import NaivePromotion


def asha(max_trials: int = 64, max_concurrent_trials: int = 1, divisor: float = 4, num_rungs: int = 3) -> PromotionASHA:
    method = PromotionASHA(
        max_trials=max_trials,
        max_length=16,
        num_rungs=num_rungs,
        divisor=divisor,
        max_concurrent_trials=max_concurrent_trials,
    )
    method.start()
    return method


def first_rung(method: PromotionASHA, values: list[float], first: int = 0) -> list[list[Action]]:
    """Let trials report these values at rung 1, one after another."""
    return [report(method, trial, 1, value) for trial, value in enumerate(values, first)]


# --------------------------------------------------------------------------------------------------------------- traces


def test_trials_pause_until_one_is_among_the_best_quarter() -> None:
    """floor(n / 4) is 0 for n < 4, so the best trial continues with the fourth value."""
    assert first_rung(asha(), [0.5, 0.3, 0.4, 0.6]) == [
        [Pause(trial=0), Create(trial=1)],
        [Pause(trial=1), Create(trial=2)],
        [Pause(trial=2), Create(trial=3)],
        [Pause(trial=3), Resume(trial=1)],
    ]


def test_a_trial_that_ran_past_its_pause_is_not_trained_twice() -> None:
    """The trial reached 4 before its pause at 1 took effect; that report counts when it is promoted."""
    method = asha()
    report(method, 0, 1, 0.2)
    assert report(method, 0, 4, 0.1) == [] == report(method, 0, 4, 0.1)
    assert ranked(method) == [[(0, 0.2)], [], []]
    for trial in (1, 2, 3):
        report(method, trial, 1, 0.5)
    assert ranked(method)[1] == [(0, 0.1)]


@pytest.mark.parametrize("seed", range(25))
def test_decides_as_the_naive_reference(seed: int) -> None:
    """Random histories with late reports, failures, invalid trials, overtaken pauses, and different ends."""
    rng = Random(seed)
    fields = {
        "max_trials": rng.choice([1, 2, 5, 12, 30]),
        "divisor": rng.choice([1.5, 2, 2.5, 3, 4]),
        "max_concurrent_trials": rng.choice([1, 2, 4, 30]),
    }
    num_rungs, length = rng.choice([1, 2, 3, 5]), rng.choice([1, 8, 30])
    method = PromotionASHA(max_length=length, num_rungs=num_rungs, **fields)
    fields["max_concurrent_trials"] = min(fields["max_concurrent_trials"], fields["max_trials"])
    naive = NaivePromotion(rungs=method.rungs, **fields)
    history = play(method, seed)
    assert naive.start() == history.first
    for event, actions in history.steps:
        assert not isinstance(event, Extension)
        assert naive.on(event) == actions, event


def test_an_event_costs_a_bounded_number_of_heap_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes logarithmic time in the number of trials."""
    operations = 0

    def count(operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal operations
            operations += 1
            return operation(*args)

        return counted

    for module in ("searchers.rung", "searchers.asha_promotion"):
        monkeypatch.setattr(f"{module}.heappush", count(heapq.heappush))
        monkeypatch.setattr(f"{module}.heappop", count(heapq.heappop))
    method = PromotionASHA(max_trials=3000, max_length=27, num_rungs=4, divisor=3, max_concurrent_trials=10)
    found = simulate(method, 10, lambda hparams: Curve(lambda step: Random(f"{hparams['trial']} {step}").random()))
    assert found.trials == 3000
    assert operations <= 6 * found.events


# -------------------------------------------------------------------------------------------------------------- the end


# ------------------------------------------------------------------------------------------------------------ extension


def finished(max_trials: int = 4) -> PromotionASHA:
    """Return a finished search with rungs 1, 4, 16, whose values are the trials' numbers."""
    method = PromotionASHA(max_trials=max_trials, max_length=16, num_rungs=3, max_concurrent_trials=1)
    simulate(method, 1, lambda hparams: Curve(lambda step: cast("int", hparams["trial"])))
    assert method.progress({}) == 1
    return method


def test_more_trials_can_promote_a_trial_stopped_at_a_closed_rung() -> None:
    """The best of four trials continued. With eight, two do: trial 1, the second best, resumes from its checkpoint."""
    method = finished(4)
    assert method.extend(max_trials=8) == [Create(trial=4)]
    assert [report(method, trial, 1, trial) for trial in (4, 5, 6)] == [
        [Pause(trial=trial), Create(trial=trial + 1)] for trial in (4, 5, 6)
    ]
    last = report(method, 7, 1, 7)
    assert last == [Resume(trial=1), Stop(trial=4), Stop(trial=5), Stop(trial=6), Stop(trial=7)]


def test_a_longer_search_resumes_the_best_completed_trial() -> None:
    method = finished(4)
    assert method.extend(max_length=64) == [Resume(trial=0)]
    assert method.rungs == (1, 4, 16, 64)
    assert report(method, 0, 64, 0.0) == []
    assert leave(method, 0) == [Done(reason="completed")]


def test_trial_running_past_the_old_top_is_paused_unless_the_best() -> None:
    method = asha(max_trials=64, max_concurrent_trials=2, divisor=2, num_rungs=1)
    assert report(method, 0, 16, 0.5) == report(method, 1, 16, 0.4) == []
    assert method.extend(max_length=32) == [Pause(trial=0), Create(trial=2)]
    assert report(method, 1, 32, 0.4) == []
