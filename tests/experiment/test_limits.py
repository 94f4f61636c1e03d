"""When an experiment ends before its search does."""

from __future__ import annotations

from typing import Any

import pytest

from dray.config.load import load_config
from dray.experiment.limits import Limits
from dray.records.spending import Usage
from searchers import Exited, Method, RandomSearch, Repeats, Reported, Search, Started
from searchers.objectives import of_names
from searchers.space import parse

SEARCHER: dict[str, Any] = {"name": "random", "metric": "loss", "max_length": {"batches": 8}, "max_trials": 9}


def limits(searcher: dict[str, Any] = SEARCHER, **fields: Any) -> Limits:
    space = {"global_batch_size": 1, "lr": {"type": "double", "minval": 0, "maxval": 1}}
    return Limits(load_config({"entrypoint": "m:T", "hyperparameters": space, "searcher": searcher, **fields}))


def searched(found: Limits, *trials: Any, method: Method | None = None, **search: Any) -> None:
    """Let a search log these values of its trials, one after another, and their ends."""
    given: dict[str, Any] = {"seed": 1, "smaller_is_better": True, "log": found.record, **search}
    space = parse({"lr": {"type": "double", "minval": 0, "maxval": 1}})
    running = Search(method or RandomSearch(max_trials=100), space, **given)
    running.start()
    for number, (reported, reason) in enumerate(trials):
        running.on(Started(trial=number))
        for step, value in enumerate(reported):
            values = {"metrics": value} if isinstance(value, tuple) else {"value": value}
            running.on(Reported(trial=number, step=step, **values))
        running.on(Exited(trial=number, reason=reason))


def test_patience_counts_trials_since_the_best_and_not_failures() -> None:
    nan = float("nan")
    done, stopped, failed = "completed", "stopped", "errored"
    trials = [([0.5], done), ([0.7], stopped), ([0.4], done), ([nan], stopped), ([0.9], failed), ([0.6], done)]
    for several, reason in ((trials[:-1], ""), (trials, "no better loss in 2 trials")):
        found = limits(patience=2)
        searched(found, *several)
        assert (found.reason, found.remedy) == (reason, "--patience 4" if reason else "")


def test_patience_does_not_count_repeats() -> None:
    found = limits(patience=3)
    trials = [([0.4], "completed"), *[([0.5], "completed")] * 5]
    searched(found, *trials, method=Repeats(RandomSearch(max_trials=2), seeds=2, top=2))
    assert found.reason == ""
    found = limits(patience=3)
    searched(found, *trials)
    assert found.reason == "no better loss in 3 trials"


def test_with_several_metrics_a_gain_is_one_of_the_first_objective_within_the_constraints() -> None:
    metrics = [{"name": "acc", "smaller_is_better": False}, {"name": "size"}, {"name": "size", "at_most": 10}]
    values = [(0.5, 5.0, 5.0), (0.9, 20.0, 20.0), ()]  # better but too large, and without metrics
    for several, reason in ((values[:2], ""), (values, "no better acc in 2 trials")):
        found = limits({**SEARCHER, "metric": None, "metrics": metrics}, patience=2)
        searched(found, *(([each], "completed") for each in several), objectives=of_names(metrics))
        assert found.reason == reason


TWO = {"metric": None, "metrics": [{"name": "loss"}, {"name": "acc", "at_least": 0.5}]}


@pytest.mark.parametrize(
    ("searcher", "until", "misses", "reaches"),
    [
        ({}, {"loss": 0.5}, [0.51], [0.5]),
        ({"metric": "acc", "smaller_is_better": False}, {"acc": 0.9}, [0.8], [0.95]),
        ({}, {"loss": 0.5}, [float("nan")], [float("-inf")]),
        (TWO, {"acc": 0.9}, [0.1, 0.8], [0.9, 0.91]),
        (TWO, {"loss": 0.5, "acc": 0.9}, [0.4, 0.8], [0.4, 0.91]),
    ],
)
def test_a_target_is_reached_in_the_direction_of_its_metric(
    searcher: dict[str, Any], until: dict[str, float], misses: list[float], reaches: list[float]
) -> None:
    found = limits({**SEARCHER, **searcher}, until=until)
    for values, is_reached in ((misses, False), (reaches, True)):
        found.record({"event": "reported", "trial": 3, "step": 1, "value": values[0], "metrics": values})
        assert (f"of trial 3 reaches {next(iter(until.values())):g}" in found.reason) == is_reached


def test_a_target_that_the_search_has_reached_before_counts() -> None:
    found = limits(until={"loss": 0.3})
    searched(found, ([0.2], "completed"))
    assert found.reason == "loss 0.2 of trial 0 reaches 0.3"
    assert found.remedy == "--until loss=VALUE"


def test_the_limit_that_is_spent_most_counts() -> None:
    found = limits(budget={"time": "2h", "slot_hours": 40})
    rates = {"time": 1.0, "slot_hours": 4 / 3600, "usd": 0.0}
    found.spend(Usage(spent={"time": 3600, "slot_hours": 30.0, "usd": 0.0}, per_s=rates))
    assert (found.usage, found.share, found.reason) == ("1 of 2 h, 30 of 40 slot-hours", 0.75, "")
    found.spend(Usage(spent={"time": 4800, "slot_hours": 40.0, "usd": 0.0}, per_s=rates))
    assert found.reason == "budget.slot_hours is spent"
    assert found.remedy == "--budget slot_hours=80"


@pytest.mark.parametrize(
    ("time", "spent", "more"),
    [("2h", 7200, "4h"), ("40s", 40, "2m"), ("90m", 5400, "3h"), ("500h1s", 1800001, "1001h"), ("5s", 6, "10s")],
)
def test_the_time_that_is_proposed_is_a_round_one(time: str, spent: float, more: str) -> None:
    found = limits(budget={"time": time})
    found.spend(Usage(spent={"time": spent}, per_s={"time": 1.0}))
    assert found.remedy == f"--budget time={more}"


def test_at_the_end_no_trial_begins_that_would_not_reach_its_next_rung() -> None:
    found = limits(budget={"slot_hours": 10})
    rates = {"time": 1.0, "slot_hours": 2 / 3600, "usd": 0.0}
    for step in (0, 1):  # 60 s for a unit
        found.trained(0, step, 60.0 * step)
    found.leaves(0)
    found.spend(Usage(spent={"time": 0.0, "slot_hours": 5.0, "usd": 0.0}, per_s=rates))
    assert found.may_begin(1000)
    found.spend(Usage(spent={"time": 0.0, "slot_hours": 9.899, "usd": 0.0}, per_s=rates))  # 182 s are left
    assert (found.may_begin(3), found.may_begin(4)) == (True, False)
