"""Adaptive ASHA with two brackets: joint numbering, creations, decisions and the end."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from searchers import ASHA, AdaptiveASHA, Create, Done, MethodError, Pause, PromotionASHA, Resume, Stop
from searchers.adaptive_asha import bracket_trials, bracket_weights
from searchers.events import Requested, Source
from searchers.method import MAX_TRIALS
from tests.searchers.helpers import leave, report


def two_brackets(max_trials: int = 12) -> AdaptiveASHA:
    """Rungs are 4, 16 and 16; the weights 4/2 and 1 give two thirds and one third of the trials."""
    return AdaptiveASHA(max_trials=max_trials, max_length=16, bracket_rungs=[2, 1], max_concurrent_trials=4)


def test_brackets_have_their_own_rungs_and_trials() -> None:
    method = two_brackets()
    assert [(type(b), b.rungs, b.max_trials) for b in method.brackets] == [(ASHA, (4, 16), 8), (ASHA, (16,), 4)]
    assert (method.rungs, method.max_trials) == ((4, 16), 12)


def test_the_first_bracket_creates_its_trials_first() -> None:
    method = two_brackets()
    assert method.start() == [Create(trial=trial) for trial in range(4)]
    assert report(method, 2, 4, 0.9) == report(method, 3, 4, 0.8) == [], "of the second bracket: no rung at 4"
    assert report(method, 0, 4, 0.3) == [], "the first at its rung"
    assert report(method, 1, 4, 0.4) == [Stop(trial=1), Create(trial=4)]


def test_results_are_not_shared_between_brackets() -> None:
    method = AdaptiveASHA(max_trials=8, max_length=16, bracket_rungs=[2, 2], max_concurrent_trials=4)
    method.start()
    assert report(method, 0, 4, 0.1) == []
    assert report(method, 2, 4, 0.9) == [], "worse than 0.1, but the first of its own bracket"
    assert report(method, 1, 4, 0.5) == [Stop(trial=1), Create(trial=4)]


def test_a_requested_trial_is_ranked_in_its_sources_bracket() -> None:
    method = two_brackets()
    method.start()
    for source in (Source(trial=2, step=1), Source(trial=0, step=1), None):
        method.requested(Requested(source=source))
    assert [method.bracket_of(trial) for trial in (4, 5, 6)] == [1, 0, 0], "without a source: the first"


def test_trials_keep_their_numbers_when_brackets_alternate() -> None:
    method = two_brackets()
    method.start()
    assert leave(method, 3) == [Create(trial=4)], "of the second bracket"
    assert leave(method, 0) == [Create(trial=5)], "of the first one"
    assert report(method, 5, 4, 0.5) == []
    assert report(method, 4, 4, 0.9) == []
    assert report(method, 1, 4, 0.9) == [Stop(trial=1), Create(trial=6)]


def test_done_when_every_bracket_is_done() -> None:
    method = two_brackets(max_trials=3)
    assert [b.max_trials for b in method.brackets] == [2, 1]
    method.start()
    assert leave(method, 0) == leave(method, 1) == []
    assert method.progress({}) < 1
    assert leave(method, 2) == [Done(reason="completed")]
    assert method.progress({}) == 1


def test_promotion_uses_the_trial_numbers_of_the_search() -> None:
    method = AdaptiveASHA(
        max_trials=8, max_length=16, bracket_rungs=[2, 1], max_concurrent_trials=2, variant="promotion", divisor=2
    )
    assert [type(b) for b in method.brackets] == [PromotionASHA, PromotionASHA]
    assert method.start() == [Create(trial=0), Create(trial=1)]
    assert leave(method, 1) == [Create(trial=2)], "of the second bracket"
    assert report(method, 0, 8, 0.3) == [Pause(trial=0), Create(trial=3)]
    assert report(method, 3, 8, 0.4) == [Pause(trial=3), Resume(trial=0)]


# ------------------------------------------------------------------------------------------ differences from Determined


def test_brackets_are_sorted_by_rungs() -> None:
    method = AdaptiveASHA(max_trials=50, max_length=256, bracket_rungs=[1, 3, 2], max_concurrent_trials=4)
    assert [len(bracket.rungs) for bracket in method.brackets] == [3, 2, 1]
    assert [bracket.max_trials for bracket in method.brackets] == [32, 12, 6], "16/3 : 4/2 : 1"
    assert [len(bracket.start()) for bracket in method.brackets] == [2, 1, 1], "and the fourth place"


@given(
    st.integers(1, 200), st.lists(st.integers(1, 8), min_size=1, max_size=8), st.sampled_from([1.1, 1.5, 2, 3, 4, 10])
)
def test_brackets_have_exactly_max_trials_together(max_trials: int, rungs: list[int], divisor: float) -> None:
    trials = bracket_trials(max_trials, bracket_weights(rungs, divisor=divisor))
    assert sum(trials) == max_trials
    assert min(trials) >= min(1, max_trials // len(rungs)), "one each, as far as they go"


# ------------------------------------------------------------------------------------------------------------ extension


def test_more_trials_are_shared_by_the_same_weights() -> None:
    method = two_brackets(max_trials=3)
    method.start()
    for trial in range(3):
        leave(method, trial)
    actions = method.extend(max_trials=9)
    assert [bracket.max_trials for bracket in method.brackets] == [2 + 4, 1 + 2]
    assert actions == [Create(trial=trial) for trial in (3, 4, 5, 6)]
    assert method.progress({}) < 1


def test_a_longer_search_is_longer_in_every_bracket() -> None:
    method = two_brackets(max_trials=3)
    method.start()
    for trial in range(3):
        report(method, trial, 16, trial)
        leave(method, trial, "stopped" if trial == 1 else "completed")
    # In bracket 0 trial 0 reached the top (1 was stopped at 4), in bracket 1 trial 2 did.
    assert method.extend(max_length=64) == [Resume(trial=0), Resume(trial=2)]
    assert [bracket.rungs for bracket in method.brackets] == [(4, 16, 64), (16, 64)]
    assert leave(method, 0) == []
    assert leave(method, 2) == [Done(reason="completed")]


def test_invalid_trials_are_counted_over_all_brackets_and_an_extension_allows_more() -> None:
    method = two_brackets(max_trials=3)
    method.start()
    for trial in range(17):
        assert leave(method, trial, "invalid_hp") == ([Create(trial=trial + 3)] if trial < 16 else [])
        assert leave(method, trial, "invalid_hp") == [], "a repeated exit is counted once"
    assert leave(method, 17) == []
    assert leave(method, 18) == [Done(reason="invalid_hp")]
    assert method.extend(max_trials=9) != [], "4 replacements for each of 9 trials: 19 are left"
    assert method.progress({}) < 1


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("field", "wrong", "says"),
    [
        *(("bracket_rungs", wrong, "must be a list of integers >= 1, got") for wrong in (3, "32", None, {2: 1})),
        *((field, wrong, "must be one of") for field in ("mode", "variant") for wrong in (["standard"], None, 1, "")),
    ],
)
def test_fields_of_another_type_are_refused(field: str, wrong: Any, says: str) -> None:
    with pytest.raises(MethodError, match=rf"searcher\.{field}: {says}"):
        AdaptiveASHA(max_trials=9, max_length=9, **{field: wrong})


@pytest.mark.parametrize("variant", ["stopping", "promotion"])
def test_without_an_end_the_brackets_take_turns_from_the_first_trial(variant: Literal["stopping", "promotion"]) -> None:
    method = AdaptiveASHA(max_trials=MAX_TRIALS, max_length=64, max_concurrent_trials=7, variant=variant)
    assert len(method.start()) == 7
    assert [method.bracket_of(trial) for trial in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert method.rungs == (1, 4, 16, 64)


def test_without_an_end_a_space_without_valid_points_is_given_up() -> None:
    method = AdaptiveASHA(max_trials=MAX_TRIALS, max_length=64, max_concurrent_trials=4)
    method.start()
    for trial in range(1000):
        if (actions := leave(method, trial, "invalid_hp")) and isinstance(actions[-1], Done):
            break
    assert actions == [Done(reason="invalid_hp")]
