"""ASHA's decisions in closed form (rungs 1, 4, 16, divisor 4), and the differences from Determined's."""

from __future__ import annotations

import math

import pytest

from searchers import ASHA, Create, Done, MethodError, Resume, Stop
from searchers.events import REPLACED, Reason
from tests.searchers.helpers import leave, ranked, report


def asha(max_trials: int = 64, max_concurrent_trials: int = 4) -> ASHA:
    method = ASHA(
        max_trials=max_trials, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=max_concurrent_trials
    )
    method.start()
    return method


# --------------------------------------------------------------------------------------------------------------- traces


def test_first_rung_in_closed_form() -> None:
    """For n = 1..8 at rung 1, the best one continues while n < 8, the best two at n = 8."""
    method = asha(max_concurrent_trials=8)
    answers = [report(method, t, 1, v) for t, v in enumerate([0.5, 0.6, 0.4, 0.45, 0.41, 0.3, 0.39, 0.35])]
    assert answers == [
        [],
        [Stop(trial=1), Create(trial=8)],
        [],
        [Stop(trial=3), Create(trial=9)],
        [Stop(trial=4), Create(trial=10)],
        [],
        [Stop(trial=6), Create(trial=11)],
        [],  # 0.35 is second of eight
    ]


def test_a_trial_that_passes_all_rungs_ends_by_itself() -> None:
    method = asha(max_trials=1)
    assert [report(method, 0, step, 0.5) for step in (1, 2, 3, 4, 8, 16)] == [[]] * 6
    assert ranked(method) == [[(0, 0.5)]] * 3
    assert leave(method, 0) == [Done(reason="completed")]


def test_report_below_a_rung_is_not_ranked() -> None:
    method = asha()
    assert report(method, 0, 0.5, 0.1) == []
    assert ranked(method) == [[], [], []]
    report(method, 0, 1, 0.5)
    report(method, 0, 3.9, 0.1)
    assert ranked(method) == [[(0, 0.5)], [], []]


def test_a_report_that_passes_several_rungs_is_ranked_only_at_the_highest() -> None:
    method = asha()
    report(method, 0, 1, 0.5)
    assert report(method, 1, 5, 0.7) == [], "worse than trial 0, which has trained for 1; the first that has for 4"
    assert ranked(method) == [[(0, 0.5)], [(1, 0.7)], []]
    assert report(method, 2, 16, 0.1) == []
    assert report(method, 3, 1, 0.6) == [Stop(trial=3), Create(trial=4)]
    assert ranked(method) == [[(0, 0.5), (3, 0.6)], [(1, 0.7)], [(2, 0.1)]]
    assert report(method, 1, 16, 0.6) == report(method, 0, 5, 0.5) == []
    assert ranked(method) == [[(0, 0.5), (3, 0.6)], [(0, 0.5), (1, 0.7)], [(1, 0.6), (2, 0.1)]]


def test_equal_rungs_are_reached_by_one_report() -> None:
    method = ASHA(max_trials=4, max_length=8, num_rungs=5, divisor=4, max_concurrent_trials=4)
    method.start()
    assert method.rungs == (1, 1, 1, 2, 8)
    assert report(method, 0, 1, 0.5) == report(method, 1, 3, 0.6) == []
    assert ranked(method) == [[(0, 0.5)]] * 3 + [[(1, 0.6)], []]


def test_a_trial_that_fails_after_it_has_passed_a_rung_is_ranked_last_at_its_next_one() -> None:
    method = asha()
    report(method, 0, 4, 0.1)
    leave(method, 0, "errored")
    assert ranked(method) == [[], [(0, 0.1)], [(0, math.inf)]]


def test_a_search_in_which_nothing_is_ranked_at_the_first_rung_progresses() -> None:
    method = asha()
    for trial in range(4):
        report(method, trial, 4, 0.1)
    assert method.progress({}) == pytest.approx(4 / 1.2 / 64)


def test_each_stop_is_followed_by_a_new_trial_until_max_trials() -> None:
    method = asha(max_trials=5, max_concurrent_trials=3)
    report(method, 0, 1, 0.1)
    assert report(method, 1, 1, 0.2) == [Stop(trial=1), Create(trial=3)]
    assert report(method, 2, 1, 0.3) == [Stop(trial=2), Create(trial=4)]
    assert report(method, 3, 1, 0.4) == [Stop(trial=3)]
    assert leave(method, 1, "stopped") == leave(method, 2, "stopped") == leave(method, 3, "stopped") == []
    assert leave(method, 0) == []
    assert leave(method, 4) == [Done(reason="completed")]


@pytest.mark.parametrize("reason", ["errored", "diverged"])
def test_failed_or_diverged_trial_is_ranked_last_at_its_next_rung(reason: Reason) -> None:
    method = asha()
    report(method, 0, 1, 0.1)
    assert leave(method, 0, reason) == [Create(trial=4)]
    assert leave(method, 1, reason) == [Create(trial=5)]
    assert ranked(method) == [[(0, 0.1), (1, math.inf)], [(0, math.inf)], []]


def test_trial_that_fails_after_its_stop_is_not_ranked_again() -> None:
    method = asha()
    report(method, 0, 1, 0.1)
    report(method, 1, 1, 0.2)
    before = ranked(method)
    assert leave(method, 1, "errored") == []
    assert ranked(method) == before


@pytest.mark.parametrize("reason", REPLACED)
def test_invalid_trial_or_one_that_does_not_fit_is_removed_from_its_rungs_and_replaced(reason: Reason) -> None:
    method = asha(max_trials=4)
    report(method, 0, 4, 0.1)
    assert leave(method, 0, reason) == [Create(trial=4)]
    assert ranked(method) == [[], [], []]
    assert report(method, 1, 1, 0.9) == [], "the first in the rung again"


def test_trial_that_is_invalid_after_its_stop_is_replaced_once() -> None:
    method = asha(max_trials=5)
    report(method, 0, 1, 0.1)
    assert report(method, 1, 1, 0.2) == [Stop(trial=1), Create(trial=4)]
    assert leave(method, 1, "invalid_hp") == [], "all four places are taken"
    assert leave(method, 2) == [Create(trial=5)], "the sixth, for one of the first five was invalid"
    assert leave(method, 3) == []


# ------------------------------------------------------------------------------------------ differences from Determined


def test_trial_that_ends_by_itself_is_followed_by_a_new_one() -> None:
    method = asha(max_trials=6, max_concurrent_trials=2)
    assert leave(method, 0) == [Create(trial=2)], "before any rung"
    report(method, 1, 1, 0.5)
    assert leave(method, 1) == [Create(trial=3)], "between rungs"
    assert [leave(method, trial) for trial in (2, 3, 4)] == [[Create(trial=4)], [Create(trial=5)], []]
    assert leave(method, 5) == [Done(reason="completed")], "all six have been"


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("divisor", [1, 0, -4, 0.5, math.nan, math.inf, "4", None, True])
def test_divisor_must_be_a_number_above_1(divisor: object) -> None:
    with pytest.raises(MethodError, match=r"searcher\.divisor: must be > 1, got"):
        ASHA(max_trials=1, max_length=1, num_rungs=1, divisor=divisor)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- progress, extension


def test_rungs_can_be_skipped_only_where_one_metric_ranks() -> None:
    with pytest.raises(MethodError, match=r"skip_uninformative_rungs: compares trials by one metric"):
        ASHA(max_trials=4, max_length=4, num_rungs=2, skip_uninformative_rungs=True, pareto=True)


def test_progress_is_the_share_of_trials_past_the_first_rung() -> None:
    method = asha(max_trials=10)
    assert method.progress({}) == 0
    report(method, 0, 1, 0.5)
    assert method.progress({}) == pytest.approx(1 / 12)
    report(method, 1, 1, 0.6)
    assert method.progress({0: 1.0, 1: 0.5}) == pytest.approx(2 / 12)
    assert leave(method, 2, "errored") != []
    assert method.progress({}) == pytest.approx(3 / 12), "it counts as the worst"
    assert leave(method, 3, "completed") != []
    assert method.progress({}) == pytest.approx(4 / 12), "it comes to no rung any more"


def test_progress_at_the_end_is_the_share_of_trials_that_have_ended() -> None:
    method = asha(max_trials=4)
    for trial in range(4):
        report(method, trial, 1, 0.5)
    assert method.progress({}) == pytest.approx(1 / 1.2)
    for trial in range(3):
        leave(method, trial)
    assert method.progress({}) == pytest.approx(1 / 1.2), "more than 3 / 4"
    leave(method, 3)
    assert method.progress({}) == 1


def done(values: list[float]) -> ASHA:
    """Finish a search whose trials report these values at each rung; trials that are not stopped complete."""
    method = asha(max_trials=len(values), max_concurrent_trials=len(values))
    for trial, value in enumerate(values):
        stopped = any(report(method, trial, step, value) for step in (1, 4, 16))
        leave(method, trial, "stopped" if stopped else "completed")
    assert method.progress({}) == 1
    return method


def test_more_trials_are_created_after_done() -> None:
    method = done([0.4, 0.5])
    assert method.extend(max_trials=4) == [Create(trial=2), Create(trial=3)]
    assert report(method, 2, 1, 0.5) == [Stop(trial=2)], "ranked with those that were before"
    assert leave(method, 2, "stopped") == []
    assert leave(method, 3) == [Done(reason="completed")]


def test_more_trials_of_a_running_search_wait_for_a_slot() -> None:
    method = asha(max_trials=2, max_concurrent_trials=8)
    assert method.extend(max_trials=3) == [Create(trial=2)], "there were as many places as trials, and are 3 now"
    method = asha(max_trials=8, max_concurrent_trials=2)
    assert method.extend(max_trials=9) == []
    assert [leave(method, trial) for trial in range(9)] == [[Create(trial=n)] for n in range(2, 9)] + [[]] + [
        [Done(reason="completed")]
    ]


def test_a_longer_search_resumes_the_best_quarter_at_the_top_rung() -> None:
    method = done([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])  # each is better than those before, so all reach the top
    assert method.extend(max_length=64) == [Resume(trial=7), Resume(trial=6)]
    assert method.rungs == (1, 4, 16, 64)
    assert report(method, 7, 64, 0.1) == report(method, 6, 64, 0.2) == []
    assert ranked(method)[3] == [(6, 0.2), (7, 0.1)]
    assert leave(method, 7) == []
    assert leave(method, 6) == [Done(reason="completed")]


def test_after_a_longer_search_the_old_top_still_ranks() -> None:
    method = asha(max_trials=64)
    report(method, 0, 16, 0.5)
    assert method.extend(max_length=64) == [], "trial 0, the best of one, runs on"
    assert report(method, 1, 1, 0.6) == []
    assert report(method, 1, 16, 0.6) == [Stop(trial=1), Create(trial=4)]
    assert report(method, 2, 16, 0.4) == []
    assert ranked(method) == [[(1, 0.6)], [], [(0, 0.5), (1, 0.6), (2, 0.4)], []]


def test_trial_running_past_the_old_top_is_stopped_unless_among_the_best() -> None:
    method = ASHA(max_trials=64, max_length=16, num_rungs=1, max_concurrent_trials=3)
    method.start()
    for trial, value in enumerate([0.5, 0.3, 0.4]):
        assert report(method, trial, 16, value) == []
    assert method.extend(max_length=64) == [Stop(trial=0), Stop(trial=2), Create(trial=3), Create(trial=4)]


def test_no_stopped_or_failed_trial_is_revived() -> None:
    method = asha(max_trials=3, max_concurrent_trials=3)
    report(method, 0, 16, 0.1)
    leave(method, 0, "errored")
    report(method, 1, 1, 0.9)
    leave(method, 1, "stopped")
    report(method, 2, 16, math.inf)
    leave(method, 2, "stopped")
    assert method.extend(max_length=64) == [Done(reason="completed")], "Done comes anew: nobody can go on"


def test_a_second_extension_resumes_trials_completed_in_the_first() -> None:
    method = done([0.5])
    assert method.extend(max_length=64) == [Resume(trial=0)]
    report(method, 0, 64, 0.4)
    leave(method, 0)
    assert method.extend(max_length=256) == [Resume(trial=0)]
    assert method.rungs == (1, 4, 16, 64, 256)
