"""Several objectives in Ray Tune: the decisions of the search, its state after a restore, and errors of misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from searchers import ASHA, FieldError, Metric, Objectives, RandomSearch, Reported, Search, Started, Stop, parse_space
from searchers.search import Record
from searchers.tune import Scheduler, Searcher
from tests.searchers.fake_tune import FakeTrial

SPACE = parse_space({"x": {"type": "double", "minval": 0, "maxval": 1}})
OBJECTIVES = Objectives(
    (Metric(name="loss"), Metric(name="speed", smaller_is_better=False), Metric(name="mb", at_most=1))
)
UNLIMITED = 10**9


def asha(*, pareto: bool = True) -> ASHA:
    return ASHA(max_trials=12, max_length=4, num_rungs=2, divisor=4, max_concurrent_trials=12, pareto=pareto)


def measured(x: float) -> dict[str, float]:
    return {"loss": x, "speed": (7 * x) % 1, "mb": 2 * x}


def new_searcher() -> tuple[Searcher, Scheduler]:
    searcher = Searcher(asha(), SPACE, objectives=OBJECTIVES, seed=3)
    searcher.set_search_properties(None, None, {})
    scheduler = Scheduler(searcher)
    scheduler.set_search_properties(None, None, num_samples=UNLIMITED)
    return searcher, scheduler


def result_of(trial: FakeTrial, **fields: Any) -> dict[str, Any]:
    return {"training_iteration": 1, **measured(trial.config["x"]), **fields}


def test_tune_gets_the_decisions_of_the_search(tmp_path: Path) -> None:
    searcher, scheduler = new_searcher()
    log: list[Record] = []
    search = Search(asha(), SPACE, seed=3, smaller_is_better=True, log=log.append, objectives=OBJECTIVES)
    search.start()
    decisions = []
    for number in range(12):
        config = searcher.suggest(f"t{number}")
        assert isinstance(config, dict)
        search.on(Started(trial=number))
        assert config == search.params(number)
        trial = FakeTrial(trial_id=f"t{number}", config=config)
        scheduler.on_trial_add(None, trial)
        decisions.append(scheduler.on_trial_result(None, trial, result_of(trial)))
        actions = search.on(Reported(trial=number, step=1, metrics=tuple(measured(config["x"]).values())))
        assert (decisions[-1] == "STOP") == (Stop(trial=number) in actions)
    assert {"STOP", "CONTINUE"} == set(decisions)

    searcher.save(str(tmp_path / "state.json"))
    again, _ = new_searcher()
    again.restore(str(tmp_path / "state.json"))
    assert searcher.search is not None
    assert again.search is not None
    assert dict(again.search.trials) == dict(searcher.search.trials)
    assert [view.losses for view in again.search.trials.values()] == [view.losses for view in search.trials.values()]


def test_tune_expects_the_first_objective() -> None:
    searcher, scheduler = new_searcher()
    assert (searcher.metric, searcher.mode, scheduler.metric) == ("loss", "min", "loss")


def test_result_without_one_of_them_is_an_error() -> None:
    searcher, scheduler = new_searcher()
    config = searcher.suggest("t0")
    assert isinstance(config, dict)
    trial = FakeTrial(trial_id="t0", config=config)
    scheduler.on_trial_add(None, trial)
    with pytest.raises(
        FieldError, match="objectives: speed, mb missing in a result of trial 0, which has loss, training"
    ):
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
