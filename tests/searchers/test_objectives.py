"""Directions, limits and NaN become losses, and the journal preserves reports of several metrics."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from searchers import (
    ASHA,
    FieldError,
    IllegalEvent,
    JournalError,
    Losses,
    Metric,
    Objectives,
    RandomSearch,
    Reported,
    Search,
    Started,
    Stop,
)
from searchers.objectives import is_better, of_names
from tests.searchers.helpers import new_search

OBJECTIVES = Objectives(
    (
        Metric(name="accuracy", smaller_is_better=False),
        Metric(name="mb", at_most=100),
        Metric(name="ms"),
        Metric(name="recall", at_least=0.5),
    )
)


def several(log: list[dict[str, Any]], method: Any = None, objectives: Objectives | None = OBJECTIVES) -> Search:
    method = RandomSearch(max_trials=2) if method is None else method
    return new_search(method, log=log, smaller_is_better=False, objectives=objectives)


LOSS = Metric(name="loss")


@pytest.mark.parametrize(
    ("metrics", "measured", "losses"),
    [
        (OBJECTIVES.metrics, (0.9, 150.0, 12.0, 0.4), Losses((-0.9, 12.0), (0.5, pytest.approx(0.2)))),
        (OBJECTIVES.metrics, (0.9, 50.0, 12.0, 0.75), Losses((-0.9, 12.0), (-0.5, -0.5))),
        ((LOSS, Metric(name="drift", at_most=0)), (1.0, 0.25), Losses((1.0,), (0.25,))),  # not divided by 0
        ((LOSS, Metric(name="share", at_least=1, at_most=2)), (0.0, 3.0), Losses((0.0,), (0.5, -2.0))),
        ((LOSS, Metric(name="share", at_least=1, at_most=2)), (0.0, 0.5), Losses((0.0,), (-0.75, 0.5))),
        ((LOSS, Metric(name="loss", at_most=10)), (15.0, 15.0), Losses((15.0,), (0.5,))),  # an objective and a limit
    ],
)
def test_objectives_are_minimised_and_limits_are_relative(metrics: Any, measured: Any, losses: Losses) -> None:
    assert Objectives(metrics).normalised(measured) == losses


def test_violation_counts_only_exceeded_limits() -> None:
    assert [Losses((1.0,), excesses).violation for excesses in ((0.5, -3.0, 0.25), (-0.5, 0.0), ())] == [0.75, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_one_metric_that_is_not_finite_leaves_no_losses(bad: float | None) -> None:
    for place in range(4):
        measured = tuple(bad if at == place else 1.0 for at in range(4))
        assert OBJECTIVES.normalised(measured) is None


def test_measured_keeps_the_order_and_marks_missing_metrics() -> None:
    assert OBJECTIVES.measured({"ms": 3, "accuracy": 0.5, "recall": "high"}) == (0.5, None, 3.0, None)


def test_faults_name_the_entry() -> None:
    with pytest.raises(FieldError) as caught:
        Objectives(
            (Metric(name="mb", at_most=1), Metric(name="mb", at_least=2), Metric(name="s", at_least=3, at_most=2))
        )
    assert [path for path, _ in caught.value.faults] == [
        "searcher.metrics[1].name",
        "searcher.metrics[2]",
        "searcher.metrics",
    ]


def test_json_is_the_config_and_back() -> None:
    stored = json.loads(json.dumps(OBJECTIVES.to_json()))
    assert stored[1] == {"name": "mb", "at_most": 100}
    assert of_names(stored) == OBJECTIVES


def test_report_that_stands_for_a_trial_has_the_least_violation_then_the_best_first_objective() -> None:
    kept, better, exceeded = Losses((0.5, 9.0), (-1.0,)), Losses((0.4, 9.0), (0.0,)), Losses((0.1, 0.0), (0.5,))
    assert is_better(better, kept)
    assert is_better(kept, exceeded)
    assert not is_better(kept, better)
    assert not is_better(kept, kept)


def test_method_gets_losses_and_the_first_objective() -> None:
    seen: list[Any] = []

    class Spy(RandomSearch):
        def on(self, event: Any) -> Any:
            seen.append(event)
            return super().on(event)

    search = several([], Spy(max_trials=1))
    search.start()
    search.on(Started(trial=0))
    search.on(Reported(trial=0, step=1, metrics=(0.9, 50.0, 12.0, 0.75)))
    search.on(Reported(trial=0, step=2, metrics=(0.9, 150.0, 12.0, 0.75)))
    search.on(Reported(trial=0, step=3, metrics=(0.9, math.nan, 12.0, 0.75)))
    assert [(event.value, event.losses) for event in seen[1:]] == [
        (-0.9, Losses((-0.9, 12.0), (-0.5, -0.5))),
        (math.inf, Losses((-0.9, 12.0), (0.5, -0.5))),
        (math.inf, None),
    ]


def test_view_shows_the_best_report_that_keeps_the_limits() -> None:
    search = several([])
    search.start()
    search.on(Started(trial=0))
    search.on(Reported(trial=0, step=1, metrics=(0.99, 150.0, 1.0, 0.75)))
    assert search.trials[0].best is None
    assert search.trials[0].last == 0.99
    search.on(Reported(trial=0, step=2, metrics=(0.8, 50.0, 1.0, 0.75)))
    search.on(Reported(trial=0, step=3, metrics=(0.7, 50.0, 0.1, 0.75)))
    view = search.trials[0]
    assert (view.best, view.best_step, view.last, view.last_step) == (0.8, 2, 0.7, 3)
    assert view.losses == Losses((-0.8, 1.0), (-0.5, -0.5))


def test_journal_has_every_metric_and_a_replay_decides_the_same() -> None:
    def method() -> ASHA:
        return ASHA(max_trials=4, max_length=4, num_rungs=2, divisor=4, max_concurrent_trials=2, pareto=True)

    log: list[dict[str, Any]] = []
    search = several(log, method())
    search.start()
    for trial in (0, 1):
        search.on(Started(trial=trial))
    search.on(Reported(trial=0, step=1, metrics=(0.9, 50.0, 12.0, 0.75)))
    actions = search.on(Reported(trial=1, step=1, metrics=(0.9, math.inf, 12.0, None)))
    assert actions[0] == Stop(trial=1)
    records = json.loads(json.dumps(log, allow_nan=False))
    assert records[0]["metrics"] == OBJECTIVES.to_json()
    assert records[4]["value"] == 0.9
    assert records[4]["metrics"] == [0.9, "inf", 12.0, None]
    again = several([], method()).replay(records)
    assert dict(again.trials) == dict(search.trials)
    assert again.method.ranked == search.method.ranked  # type: ignore[attr-defined]


def test_report_with_another_number_of_metrics_is_refused() -> None:
    search = several([])
    search.start()
    search.on(Started(trial=0))
    with pytest.raises(
        IllegalEvent, match="reported 2 metrics at step 1, but this search has 4: accuracy, mb, ms, rec"
    ):
        search.on(Reported(trial=0, step=1, metrics=(0.9, 1.0)))
    single = several([], objectives=None)
    single.start()
    single.on(Started(trial=0))
    with pytest.raises(IllegalEvent, match="but this search has one, its value"):
        single.on(Reported(trial=0, step=1, metrics=(0.9, 1.0)))


@pytest.mark.parametrize("other", [None, Objectives((Metric(name="ms"),))])
def test_journal_of_other_metrics_is_refused(other: Objectives | None) -> None:
    log: list[dict[str, Any]] = []
    several(log).start()
    with pytest.raises(JournalError, match="belongs to another search: its metrics"):
        several([], objectives=other).replay(log)


def test_method_that_ranks_by_losses_refuses_a_plain_value() -> None:
    asha = ASHA(max_trials=2, max_length=4, num_rungs=2, pareto=True)
    asha.start()
    with pytest.raises(IllegalEvent, match="ranks by losses"):
        asha.on(Reported(trial=0, step=1, value=0.5))
