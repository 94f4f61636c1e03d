"""Simulated experiments keep their invariants under all faults. `python -m tests.simulation SEED` replays a seed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.schedule import drawn
from tests.simulation.simulation import failure_of

FOUND = (22_640, 30_000, 30_272, 31_818, 58_795, 1_011_504, 2_014_389)
"""Seeds that have failed."""
FOUND_WITH_PBT = (23, 30, 195, 245, 281, 355, 963, 5013)


def failures(seeds: Iterable[int], *, faults: bool = True, **kinds: bool) -> list[str]:
    """Return the failures with these seeds. `kinds`: see `drawn`."""
    found = ((seed, failure_of(drawn(seed, faults=faults, **kinds))) for seed in seeds)
    options = "".join(f" --{kind}" for kind in kinds)
    return [f"python -m tests.simulation {seed}{options}: {why}" for seed, why in found if why]


def test_searches_end_as_they_should_if_nothing_goes_wrong() -> None:
    assert not failures(range(15), faults=False)


def test_searches_survive_schedules_of_faults() -> None:
    assert not failures(range(40))


def test_searches_carry_out_two_hundred_requests_in_schedules_of_faults() -> None:
    assert not failures(range(30), requests=True)


def test_populations_survive_schedules_of_faults_and_requests() -> None:
    assert not failures(FOUND_WITH_PBT, pbt=True)
    assert not failures(range(5), pbt=True, requests=True)


def test_searches_by_auto_survive_schedules_of_faults_and_requests() -> None:
    assert not failures(range(6), auto=True, requests=True)


def test_searches_keep_their_budgets_in_schedules_of_faults() -> None:
    assert not failures(range(30), requests=True, budgets=True)


def test_searches_train_their_best_trials_again_in_schedules_of_faults() -> None:
    assert not failures(range(8), repeats=True)
    assert not failures(range(8), repeats=True, requests=True, budgets=True)


def test_experiments_of_a_token_share_its_slots_in_schedules_of_faults() -> None:
    assert not failures(range(20), token=True)


def test_each_alert_is_raised_once_and_sent_whatever_dies_in_schedules_of_faults() -> None:
    assert not failures(range(40), alerts=True)
    assert not failures(range(40), alerts=True, requests=True, budgets=True)


def test_code_that_works_once_in_a_process_fails_no_trial_in_schedules_of_faults() -> None:
    assert not failures(range(12), faults=False, once=True)
    assert not failures(range(30), once=True)


def test_faults_that_were_found_stay_mended() -> None:
    assert not failures(FOUND)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 290, 125))
def test_searches_survive_hundreds_of_schedules_of_faults(first: int) -> None:
    assert not failures(range(first, first + 125))


@pytest.mark.slow
def test_searches_carry_out_hundreds_of_requests_in_schedules_of_faults() -> None:
    assert not failures(range(40, 140), requests=True)


@pytest.mark.slow
def test_populations_survive_many_schedules_of_faults_and_requests() -> None:
    assert not failures(range(20), pbt=True)
    assert not failures(range(40, 60), pbt=True, requests=True)


@pytest.mark.slow
def test_searches_by_auto_survive_many_schedules_of_faults_and_requests() -> None:
    assert not failures(range(6, 18), auto=True)
    assert not failures(range(31, 43), auto=True, requests=True)


@pytest.mark.slow
def test_searches_keep_their_budgets_in_many_schedules_of_faults() -> None:
    assert not failures(range(40, 90), requests=True, budgets=True)


@pytest.mark.slow
def test_searches_train_their_best_trials_again_in_many_schedules_of_faults() -> None:
    assert not failures(range(8, 18), repeats=True, requests=True, budgets=True)
    assert not failures(range(28, 38), repeats=True, requests=True, auto=True)


@pytest.mark.slow
def test_experiments_of_a_token_share_its_slots_in_many_schedules_of_faults() -> None:
    assert not failures(range(20, 60), token=True)


@pytest.mark.slow
def test_each_alert_is_raised_once_and_sent_in_many_schedules_of_faults() -> None:
    assert not failures(range(40, 90), alerts=True)
    assert not failures(range(140, 190), alerts=True, requests=True, budgets=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_that_is_put_back_is_found(name: str) -> None:
    assert not failure_of(BUGS[name].schedule(BUGS[name].seed))
    assert BUGS[name].find()
