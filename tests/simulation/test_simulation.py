"""The shells that ship keep their invariants under all faults. `python -m tests.simulation SEED` replays a seed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.simulation.mistakes import MISTAKES
from tests.simulation.seeds import Kind, Seed, outcome_of


def failures(seeds: Iterable[int], kind: Kind = "whole", options: str = "") -> list[str]:
    """Return the failures with these seeds. `options`: see `tests.simulation.schedule.drawn`."""
    chosen = frozenset(options.split())
    found = ((number, outcome_of(Seed(number=number, kind=kind, options=chosen)).why) for number in seeds)
    flags = "".join(f" --{option}" for option in sorted(chosen))
    return [f"python -m tests.simulation {number} --kind {kind}{flags}: {why}" for number, why in found if why]


def test_a_schedule_is_the_same_each_time() -> None:
    for kind in ("alone", "commit", "whole"):
        seed = Seed(number=3, kind=kind, options=frozenset({"requests"}))
        assert outcome_of(seed).digest == outcome_of(seed).digest


def test_decisions_survive_schedules_of_faults() -> None:
    assert not failures(range(50), "alone")
    assert not failures(range(25), "alone", "requests alerts")


def test_commits_survive_schedules_of_faults() -> None:
    assert not failures(range(15), "commit")


def test_experiments_survive_schedules_of_faults() -> None:
    assert not failures(range(4))


def test_experiments_survive_requests_budgets_and_alerts() -> None:
    assert not failures(range(2), options="requests budgets alerts")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "requests alerts", "repeats requests"])
def test_decisions_survive_many_schedules_of_faults(options: str) -> None:
    assert not failures(range(50, 120), "alone", options)


@pytest.mark.slow
def test_commits_survive_many_schedules_of_faults() -> None:
    assert not failures(range(15, 65), "commit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["", "requests", "budgets", "alerts", "repeats", "once", "token", "programs requests", "requests budgets alerts"],
)
def test_experiments_survive_many_schedules_of_faults(options: str) -> None:
    assert not failures(range(2, 5), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["pbt", "auto"])
def test_other_searches_survive_schedules_of_faults(options: str) -> None:
    assert not failures(range(2), options=options)


LONG = (
    "a burst that is not settled",
    "a call that comes before the decider is lost",
    "a drained trial lost",
    "a drained trial lost that has saved",
    "a failure whose logs are never read",
    "a group's death that nobody hears of",
    "a lost wakeup: a trial that is queued",
    "a lost wakeup: the parameters of a lease",
    "a used group for a trial that needs a new one",
    "groups that are not ended",
)
"""Mistakes whose schedules take 4 to 46 s: many end only after all their steps."""


def test_mistakes_fit_the_code() -> None:
    for mistake in MISTAKES.values():
        with mistake.present():
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
        for name, mistake in MISTAKES.items()
        if mistake.seed is not None
    ],
)
def test_a_mistake_in_the_code_is_found(name: str) -> None:
    assert MISTAKES[name].find()
