"""Several objectives in Ray Tune: the decisions of the search, its state after a restore, and errors of misuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from searchers import ASHA, FieldError, Metric, Objectives, RandomSearch, Reported, Started, Stop
from searchers.tune import Scheduler, Searcher
from tests.searchers.fake_tune import begun, suggested, views
from tests.searchers.helpers import LINE as SPACE
from tests.searchers.helpers import new_search

OBJECTIVES = Objectives(
    (Metric(name="loss"), Metric(name="speed", smaller_is_better=False), Metric(name="mb", at_most=1))
)


def asha(*, pareto: bool = True) -> ASHA:
    return ASHA(max_trials=12, max_length=4, num_rungs=2, divisor=4, max_concurrent_trials=12, pareto=pareto)


def measured(x: float) -> dict[str, float]:
    return {"loss": x, "speed": (7 * x) % 1, "mb": 2 * x}


def new_searcher() -> tuple[Searcher, Scheduler]:
    return begun(asha(), SPACE, objectives=OBJECTIVES, seed=3)


def test_tune_gets_the_decisions_of_the_search(tmp_path: Path) -> None:
    searcher, scheduler = new_searcher()
    search = new_search(asha(), seed=3, objectives=OBJECTIVES)
    search.start()
    decisions = []
    for number, trial in enumerate(suggested(searcher, scheduler, 12)):
        search.on(Started(trial=number))
        assert trial.config == search.params(number)
        metrics = measured(trial.config["x"])
        decisions.append(scheduler.on_trial_result(None, trial, {"training_iteration": 1, **metrics}))
        actions = search.on(Reported(trial=number, step=1, metrics=tuple(metrics.values())))
        assert (decisions[-1] == "STOP") == (Stop(trial=number) in actions)
    assert {"STOP", "CONTINUE"} == set(decisions)

    searcher.save(str(tmp_path / "state.json"))
    again, _ = new_searcher()
    again.restore(str(tmp_path / "state.json"))
    assert views(again) == views(searcher)
    assert [view.losses for view in views(again)] == [view.losses for view in search.trials.values()]


def test_tune_expects_the_first_objective() -> None:
    searcher, scheduler = new_searcher()
    assert (searcher.metric, searcher.mode, scheduler.metric) == ("loss", "min", "loss")


def test_result_without_one_of_them_is_an_error() -> None:
    searcher, scheduler = new_searcher()
    [trial] = suggested(searcher, scheduler, 1)
    with pytest.raises(FieldError, match="objectives: a result of trial 0 lacks speed, mb; it has loss, training"):
        scheduler.on_trial_result(None, trial, {"training_iteration": 1, "loss": 0.5})


def test_misuse_is_told_at_once() -> None:
    with pytest.raises(FieldError, match=r"method: ASHA needs pareto=True"):
        Searcher(asha(pareto=False), SPACE, objectives=OBJECTIVES)
    with pytest.raises(FieldError, match=r"method: ASHA has pareto=True, but no objectives"):
        Searcher(asha(), SPACE, metric="loss", mode="min")
    with pytest.raises(FieldError, match="objectives: are given together with metric or mode"):
        Searcher(asha(), SPACE, metric="loss", objectives=OBJECTIVES)
    with pytest.raises(FieldError, match=r"tune.TuneConfig.metric: is 'speed', but the searcher has 'loss'"):
        Searcher(asha(), SPACE, objectives=OBJECTIVES).set_search_properties("speed", None, {})
    Searcher(RandomSearch(max_trials=2), SPACE, objectives=OBJECTIVES)
