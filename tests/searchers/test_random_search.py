"""Random search and its special case of one trial, in closed form."""

from __future__ import annotations

import math

import pytest

from searchers import Create, Done, Exited, MethodError, RandomSearch, Reported, Single, Started


def test_each_end_makes_room_for_the_next() -> None:
    method = RandomSearch(max_trials=4, max_concurrent_trials=2)
    assert method.start() == [Create(trial=0), Create(trial=1)]
    assert method.on(Started(trial=0)) == []
    assert method.on(Exited(trial=1, reason="completed")) == [Create(trial=2)]
    assert method.on(Exited(trial=0, reason="errored")) == [Create(trial=3)]
    assert method.on(Exited(trial=2, reason="completed")) == []
    assert method.on(Exited(trial=3, reason="canceled")) == [Done(reason="completed")]


def test_no_report_stops_a_trial() -> None:
    method = RandomSearch(max_trials=4)
    method.start()
    assert [method.on(Reported(trial=0, step=step, value=math.inf)) for step in range(100)] == [[]] * 100


def test_zero_concurrent_trials_means_no_limit() -> None:
    assert len(RandomSearch(max_trials=1000, max_concurrent_trials=0).start()) == 1000


def test_invalid_trials_are_replaced_and_do_not_count() -> None:
    method = RandomSearch(max_trials=2, max_concurrent_trials=1, max_invalid=3)
    method.start()
    assert method.on(Exited(trial=0, reason="invalid_hp")) == [Create(trial=1)]
    assert method.on(Exited(trial=1, reason="completed")) == [Create(trial=2)]
    assert method.on(Exited(trial=2, reason="invalid_hp")) == [Create(trial=3)]
    assert method.on(Exited(trial=3, reason="completed")) == [Done(reason="completed")]


def test_one_invalid_trial_too_many_ends_the_search_after_the_live_ones() -> None:
    method = RandomSearch(max_trials=9, max_concurrent_trials=2, max_invalid=1)
    method.start()
    assert method.on(Exited(trial=0, reason="invalid_hp")) == [Create(trial=2)]
    assert method.on(Exited(trial=2, reason="invalid_hp")) == [], "nothing is created any more; trial 1 goes on"
    assert method.on(Exited(trial=1, reason="completed")) == [Done(reason="invalid_hp")]


def test_max_length_is_the_only_rung() -> None:
    assert RandomSearch(max_trials=1).rungs == Single().rungs == ()
    assert RandomSearch(max_trials=1, max_length=9).rungs == Single(max_length=9).rungs == (9,)


def test_single_is_one_trial() -> None:
    method = Single()
    assert method.start() == [Create(trial=0)]
    assert method.on(Exited(trial=0, reason="errored")) == [Done(reason="errored")]


def test_single_that_is_always_invalid_ends() -> None:
    method = Single(max_invalid=2)
    method.start()
    answers = [method.on(Exited(trial=trial, reason="invalid_hp")) for trial in range(3)]
    assert answers == [[Create(trial=1)], [Create(trial=2)], [Done(reason="invalid_hp")]]


def test_invalid_fields_are_named() -> None:
    with pytest.raises(MethodError) as caught:
        RandomSearch(max_trials=0, max_concurrent_trials=-1, max_length=0, max_invalid=-1)
    assert [path for path, _ in caught.value.faults] == [
        "searcher.max_trials",
        "searcher.max_concurrent_trials",
        "searcher.max_length",
        "searcher.max_invalid",
    ]


def test_states_of_single_and_random_are_not_interchangeable() -> None:
    with pytest.raises(ValueError, match="'single', this is 'random'"):
        RandomSearch(max_trials=1).load(Single().dump())
