"""The multi-fidelity sampler: its proposals, its data, and equal proposals after a replay."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from random import Random

import pytest

from searchers import Exited, RandomSampler, Reported, Started, parse_space
from searchers.multi_fidelity import MultiFidelitySampler

LINE = parse_space({"x": {"type": "double", "minval": 0, "maxval": 1}})
RUNGS = (1, 4, 16)


def tell(
    sampler: MultiFidelitySampler, trial: int, x: float, *reports: tuple[float, float], reason: str | None = None
) -> None:
    sampler.tell(Started(trial=trial), {"x": x})
    for step, value in reports:
        sampler.tell(Reported(trial=trial, step=step, value=value), {"x": x})
    if reason is not None:
        sampler.tell(Exited(trial=trial, reason=reason), {"x": x})  # type: ignore[arg-type]


def knowing(curve: Callable[[float, int], float], *, reach: Callable[[int], int], trials: int) -> MultiFidelitySampler:
    """Create a sampler after random trials, each of which reached the first `reach(trial)` rungs."""
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(trials):
        x = Random(trial).random()
        reports = [(step, curve(x, step)) for step in RUNGS[: reach(trial)]]
        tell(sampler, trial, x, *reports, reason="stopped" if len(reports) < 3 else "completed")
    return sampler


def proposed(sampler: MultiFidelitySampler, first: int = 101) -> list[float]:
    """Return the hyperparameters of the next four trials that are not random."""
    return [float(sampler.ask(first + more)["x"]) for more in (0, 2, 6, 8)]  # type: ignore[arg-type]


def test_first_draws_then_every_second_then_every_fifth_are_those_of_random_search() -> None:
    sampler, random = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS), RandomSampler(LINE, seed=7)
    assert [sampler.ask(trial) for trial in range(12)] == [random.ask(trial) for trial in range(12)]
    sampler = knowing(lambda x, step: x, reach=lambda trial: 1, trials=20)
    assert [trial for trial in range(20, 32) if sampler.ask(trial) == random.ask(trial)] == [20, 22, 24, 26, 28, 30]
    sampler = knowing(lambda x, step: x, reach=lambda trial: 1, trials=41)
    assert [trial for trial in range(41, 52) if sampler.ask(trial) == random.ask(trial)] == [45, 50]


def test_results_of_the_first_rung_are_enough() -> None:
    sampler = knowing(lambda x, step: (x - 0.3) ** 2, reach=lambda trial: 1, trials=20)
    assert all(abs(x - 0.3) < 0.1 for x in proposed(sampler))


def test_where_the_first_rung_misleads_the_end_is_believed() -> None:
    """At step 1 the optimum is at .9, at the end at .2, as with learning rates; 12 of 40 trials reached the end."""
    sampler = knowing(
        lambda x, step: (x - (0.9 if step == 1 else 0.2)) ** 2,
        reach=lambda trial: 3 if trial % 10 < 3 else 1,
        trials=40,
    )
    assert all(abs(x - 0.2) < 0.15 for x in proposed(sampler))


def test_the_choice_is_the_trial_with_the_largest_expected_improvement_for_its_length() -> None:
    """The loss is the distance from x = 0.3, and improves with training. Trials 100, 101 and 102 are paused."""
    sampler = knowing(lambda x, step: abs(x - 0.3) + 1 / step, reach=lambda trial: 1 + 2 * (trial % 2), trials=16)
    assert sampler.choose(103, []) is None
    tell(sampler, 100, 0.9, (1, 1.6))
    tell(sampler, 101, 0.3, (1, 1.0))
    tell(sampler, 102, 0.3, (1, 1.0), (4, 0.25))
    assert sampler.choose(103, [100, 101]) == 101
    assert sampler.choose(103, [100, 101, 102]) == 102  # as good as 101, with less left to train
    assert sampler.choose(103, [100]) is None  # a new trial is expected to end better
    assert MultiFidelitySampler(LINE, seed=7, rungs=RUNGS).choose(1, [0]) is None  # nothing is known yet


def test_without_rungs_the_last_value_of_a_completed_trial_counts() -> None:
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=())
    for trial in range(20):
        x = Random(trial).random()
        tell(sampler, trial, x, (5, 1 - x), (10, (x - 0.3) ** 2), reason="completed")
    assert all(abs(x - 0.3) < 0.1 for x in proposed(sampler))


@pytest.mark.parametrize("reason", ["errored", "diverged", "invalid_hp"])
def test_where_trials_fail_none_is_proposed(reason: str) -> None:
    """Values decrease towards x = 1, but above .7 every trial fails before its first report."""
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(30):
        x = Random(trial).random()
        if x > 0.7:
            tell(sampler, trial, x, reason=reason)
        else:
            tell(sampler, trial, x, (1, 1 - x), reason="stopped")
    assert all(0.5 < x < 0.8 for x in proposed(sampler))


def test_trials_asked_at_the_same_time_differ() -> None:
    sampler = knowing(lambda x, step: 1.0, reach=lambda trial: 1, trials=12)
    drawn = []
    for trial in range(101, 105):
        drawn.append(float(sampler.ask(trial)["x"]))  # type: ignore[arg-type]
        sampler.tell(Started(trial=trial), {"x": drawn[-1]})
    assert min(abs(one - other) for one in drawn for other in drawn if one is not other) > 0.01


@pytest.mark.parametrize("value", [1.0, math.inf, 1e300, -1e300])
def test_equal_infinite_and_huge_values_are_survived(value: float) -> None:
    sampler = knowing(lambda x, step: value, reach=lambda trial: 1, trials=12)
    assert all(0 <= x <= 1 for x in proposed(sampler))


def test_a_space_of_constants_has_one_point() -> None:
    sampler = MultiFidelitySampler(parse_space({"batch": 64}), seed=3, rungs=RUNGS)
    for trial in range(14):
        assert sampler.ask(trial) == {"batch": 64}
        sampler.tell(Started(trial=trial), {"batch": 64})
        sampler.tell(Reported(trial=trial, step=1, value=0.5), {"batch": 64})


def test_the_number_of_kept_results_is_bounded() -> None:
    rng, sizes = Random(0), []
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(3000):
        x, value = rng.random(), rng.random()
        if value < 0.5:
            tell(sampler, trial, x, (1, value), (4, value), reason="stopped")
        else:
            tell(sampler, trial, x, (1, value), reason="stopped")
        if trial % 1000 == 999:
            sizes.append(len(pickle.dumps(sampler)))
    assert max(sizes[1:]) < 1.6 * sizes[0], "between one and two times as many as are kept are held at a time"
