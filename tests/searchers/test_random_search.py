"""Random search, grids, and single trials, in closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest

from searchers import (
    ASHA,
    AdaptiveASHA,
    Create,
    Done,
    Grid,
    MethodError,
    RandomSearch,
    Reported,
    Resume,
    Single,
    Started,
)
from searchers.events import REPLACED, Reason
from searchers.method import Method
from searchers.slots import MAX_CONCURRENT
from tests.searchers.helpers import leave, state


def test_each_end_is_followed_by_a_new_trial() -> None:
    method = RandomSearch(max_trials=4, max_concurrent_trials=2)
    assert method.start() == [Create(trial=0), Create(trial=1)]
    assert method.on(Started(trial=0)) == []
    assert leave(method, 1) == [Create(trial=2)]
    assert leave(method, 0, "errored") == [Create(trial=3)]
    assert leave(method, 2) == []
    assert leave(method, 3, "canceled") == [Done(reason="completed")]


def test_no_report_stops_a_trial() -> None:
    method = RandomSearch(max_trials=4)
    method.start()
    assert [method.on(Reported(trial=0, step=step, value=math.inf)) for step in range(100)] == [[]] * 100


def test_zero_concurrent_trials_means_no_limit() -> None:
    assert len(RandomSearch(max_trials=1000, max_concurrent_trials=0).start()) == 1000


def test_no_search_creates_more_trials_ahead_than_any_cluster_could_run() -> None:
    for most in (0, 50_000, 10**8):
        methods: list[Method] = [
            RandomSearch(max_trials=10**8, max_concurrent_trials=most),
            Grid(points=10**6, max_concurrent_trials=most),
            ASHA(max_trials=10**8, max_length=4**9, num_rungs=9, max_concurrent_trials=most),
            AdaptiveASHA(max_trials=10**8, max_length=4**9, max_concurrent_trials=most),
        ]
        assert [len(method.start()) <= MAX_CONCURRENT for method in methods] == [True] * 4, most


@pytest.mark.parametrize("reason", REPLACED)
def test_invalid_trials_and_those_that_do_not_fit_are_replaced_and_do_not_count(reason: Reason) -> None:
    method = RandomSearch(max_trials=2, max_concurrent_trials=1)
    method.start()
    assert leave(method, 0, reason) == [Create(trial=1)]
    assert leave(method, 1) == [Create(trial=2)]
    assert leave(method, 2, reason) == [Create(trial=3)]
    assert leave(method, 3) == [Done(reason="completed")]


def test_max_length_is_the_only_rung() -> None:
    assert RandomSearch(max_trials=1).rungs == Single().rungs == ()
    assert RandomSearch(max_trials=1, max_length=9).rungs == Single(max_length=9).rungs == (9,)


def test_progress_is_the_mean_over_max_trials() -> None:
    method = RandomSearch(max_trials=4, max_concurrent_trials=2)
    method.start()
    assert method.progress({}) == 0
    assert method.progress({0: 0.5}) == 0.5 / 4
    leave(method, 0, "errored")
    assert method.progress({0: 0.5, 1: 0.25}) == 1.25 / 4, "an end counts in full, and a new trial for nothing"
    assert method.progress({1: math.nan}) == 1.25 / 4, "nor does it when a trial begins again"
    assert method.progress({1: math.inf, 2: -1}) == 2 / 4


def test_more_trials_are_created_before_and_after_done() -> None:
    method = RandomSearch(max_trials=2, max_concurrent_trials=2)
    method.start()
    assert method.extend(max_trials=3) == [], "no place is free"
    assert leave(method, 0) == [Create(trial=2)]
    assert leave(method, 1) == []
    assert leave(method, 2) == [Done(reason="completed")]
    assert method.extend(max_trials=4) == [Create(trial=3)]
    assert leave(method, 3) == [Done(reason="completed")]


def test_a_longer_search_resumes_completed_trials_before_creating_new_ones() -> None:
    method = RandomSearch(max_trials=4, max_concurrent_trials=1, max_length=8)
    method.start()
    reasons: list[Reason] = ["completed", "errored", "completed", "stopped"]
    for trial, reason in enumerate(reasons):
        leave(method, trial, reason)
    assert method.extend(max_length=12, max_trials=5) == [Resume(trial=0)]
    assert method.rungs == (12,)
    assert method.extend(max_length=16) == [], "trial 2 waits still, and is resumed once"
    assert leave(method, 0) == [Resume(trial=2)]
    assert leave(method, 2) == [Create(trial=4)]
    assert leave(method, 4) == [Done(reason="completed")]


@pytest.mark.parametrize(("most", "other"), [REPLACED, REPLACED[::-1]])
def test_after_too_many_replaced_trials_the_live_ones_finish_and_an_extension_allows_more(
    most: Reason, other: Reason
) -> None:
    method = RandomSearch(max_trials=2, max_concurrent_trials=2)
    method.start()
    for trial in range(1, 17):
        assert leave(method, trial, most if trial % 3 else other) == [Create(trial=trial + 1)]
    assert leave(method, 17, most) == [], "nothing is created any more; trial 0 goes on"
    assert leave(method, 0) == [Done(reason=most)]  # type: ignore[arg-type]
    assert method.extend(max_trials=10) != [], "40 replacements for 10 trials"


ASHA_3 = ASHA(max_trials=64, max_length=16, num_rungs=3)


@pytest.mark.parametrize(
    ("method", "wanted", "message"),
    [
        (Single(), {"max_trials": 2}, "searcher.max_trials: a single search has one trial, got 2"),
        (Single(), {}, "searcher: this search can't be extended"),
        (ASHA_3, {"max_length": 15}, "searcher.max_length: must be an integer >= 16, got 15"),
        (ASHA_3, {"max_trials": 128.0}, "searcher.max_trials: must be an integer >= 64, got 128.0"),
        (ASHA_3, {"max_trials": 64}, "searcher: an extension needs max_trials > 64 or max_length > 16"),
        (RandomSearch(max_trials=4), {"max_trials": 3}, "searcher.max_trials: must be an integer >= 4, got 3"),
        (
            RandomSearch(max_trials=4),
            {"max_length": 8},
            "searcher.max_length: this search does not set the length of its trials, got 8",
        ),
        (
            RandomSearch(max_trials=4, max_length=8),
            {"max_length": 8},
            "searcher: an extension needs max_trials > 4 or max_length > 8",
        ),
    ],
)
def test_an_impossible_extension_is_refused(method: Any, wanted: dict[str, int], message: str) -> None:
    before = state(method)
    with pytest.raises(MethodError) as caught:
        method.extend(**wanted)
    assert str(caught.value) == message
    assert state(method) == before


# ----------------------------------------------------------------------------------------------------------------- grid


def test_an_empty_grid_is_done_at_once() -> None:
    method = Grid(points=0)
    assert method.progress({}) < 1
    assert method.start() == [Done(reason="completed")]
    assert method.progress({}) == 1


def test_an_invalid_point_is_not_replaced() -> None:
    method = Grid(points=2, max_concurrent_trials=1)
    method.start()
    assert leave(method, 0, "invalid_hp") == [Create(trial=1)]
    assert method.progress({}) == 1 / 2, "the point counts as tried"
    assert leave(method, 1) == [Done(reason="completed")]


def test_a_grid_can_get_longer_but_not_larger() -> None:
    method = Grid(points=2, max_length=4)
    method.start()
    for trial in (0, 1):
        leave(method, trial)
    before = state(method)
    with pytest.raises(MethodError, match=r"searcher\.max_trials: a grid has as many trials as points, got 3"):
        method.extend(max_trials=3)
    assert state(method) == before
    assert method.extend(max_length=8) == [Resume(trial=0), Resume(trial=1)]
    assert method.rungs == (8,)
