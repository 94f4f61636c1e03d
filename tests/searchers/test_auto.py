"""The recommended method: the rungs that it chooses, and reports that cross several of them."""

from __future__ import annotations

from typing import cast

import pytest

from searchers import Auto, Create, MethodError, Pause, Resume
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.search import Record
from searchers.simulate import Curve, simulate
from searchers.testing import Extension, play, repeat
from tests.searchers.helpers import LINE, new_search, ranked, report


def auto(max_trials: int = 64, max_concurrent_trials: int = 1, max_length: int = 9) -> Auto:
    return Auto(max_trials=max_trials, max_length=max_length, max_concurrent_trials=max_concurrent_trials)


@pytest.mark.parametrize(("length", "rungs"), [(1, (1,)), (2, (2,)), (8, (2, 8)), (100, (1, 3, 11, 33, 100))])
def test_rungs_are_at_least_a_unit_long(length: int, rungs: tuple[int, ...]) -> None:
    assert auto(max_length=length).rungs == rungs


@pytest.mark.parametrize("length", [None, "27", 0])
def test_a_length_that_is_no_number_has_its_path(length: object) -> None:
    with pytest.raises(MethodError, match=r"searcher\.max_length: must be an integer >= 1, got"):
        auto(max_length=cast(int, length))


def test_a_report_that_crosses_several_rungs_is_ranked_at_the_last_of_them() -> None:
    """Trials report at 9 and 27 only, so one in three continues from there."""
    method = auto(max_length=27)
    method.start()
    for trial in range(2):
        assert report(method, trial, 9, 1 - trial) == [Pause(trial=trial), Create(trial=trial + 1)]
    assert report(method, 2, 9, 2) == [Pause(trial=2), Resume(trial=1)]
    assert ranked(method) == [[], [], [(0, 1), (1, 0), (2, 2)], []]
    assert method.progress({}) == pytest.approx(3 / 1.2 / 64)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_random_histories_with_the_model_continue_as_they_would_have(seed: int) -> None:
    """With failures, late reports, requests and extensions, cut in the middle."""

    def sampler() -> MultiFidelitySampler:
        return MultiFidelitySampler(LINE, seed=seed, rungs=auto().rungs)

    log: list[Record] = []
    extensions = [Extension(max_trials=40), Extension(max_length=27)]
    play(new_search(auto(24, 4), log=log, sampler=sampler()), seed, extensions=extensions, requests=6)
    cut, rest = len(log) // 2, list[Record]()
    again = new_search(auto(24, 4), log=rest, sampler=sampler()).replay(log[:cut])
    for record in log[cut:]:
        repeat(again, record)
    assert rest == log[cut:]


def test_many_slots_and_late_trials_end() -> None:
    search = new_search(auto(300, 100))
    found = simulate(
        search, 100, lambda hparams: Curve(lambda step: cast(float, hparams["x"]) / step), jitter=1.0, seed=3
    )
    assert (found.done, found.trials) == ("completed", 300)
    assert search.method.progress({}) == 1
