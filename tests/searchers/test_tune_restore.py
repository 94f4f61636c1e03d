"""Searches in Ray Tune after `Tuner.restore`: no trial is lost, none runs twice, and the decisions are the same."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle, tune

from searchers import Method, RandomSearch
from searchers.asha_promotion import PromotionASHA
from searchers.tune import Scheduler, Searcher
from tests.searchers.fake_tune import (
    LENGTH,
    METHODS,
    SPACE,
    FakeTrial,
    FakeTune,
    begun,
    journal,
    pair,
    report,
    suggested,
    trials_of,
    value,
    views,
)
from tests.searchers.helpers import new_search


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=["two runs", "ten more"]
)
@pytest.mark.parametrize("name", METHODS)
def test_after_a_kill_no_trial_is_lost_or_run_twice(name: str, seeds: range, tmp_path: Path) -> None:
    """Tune's files may have been saved at slightly different times."""
    for seed in seeds:
        rng, make, state = Random(seed), METHODS[name], tmp_path / "state"
        given = cloudpickle.dumps(pair(make(), seed=seed))  # as in tuner.pkl
        settings: dict[str, Any] = {"workers": 3, "value": value, "length": LENGTH, "failures": 0.05}
        steps = sum(1 for _ in FakeTune(*pickle.loads(given), seed=seed, **settings).run())
        tune = FakeTune(*pickle.loads(given), seed=seed, **settings)
        known: dict[int, Mapping[str, object] | None] = {}
        is_one_moment = True
        for kill in range(1, 4):
            saved = last_saved(tune, state, steps=rng.randrange(1, max(2, steps // 3)))
            of_searcher = rng.choice(saved)
            of_trials = rng.choice(saved) if seed % 2 else of_searcher
            is_one_moment &= of_searcher is of_trials
            state.write_bytes(of_searcher[0])
            tune = FakeTune(*pickle.loads(given), seed=100 * seed + kill, restored=(state, of_trials[1]), **settings)
            known |= {view.id: view.hparams for view in views(tune.searcher) if view.hparams is not None}
        for _ in tune.run():
            pass
        found = views(tune.searcher)
        assert [view.id for view in found] == list(range(trials_of(make())))
        assert [view.id for view in found if not view.ended or view.hparams is None] == []
        assert {number: found[number].hparams for number in known} == known
        assert len(tune.trials) == len(found) or not is_one_moment
        replayed = new_search(make(), SPACE, seed=seed).replay(journal(tune.searcher, tmp_path))
        assert repr(list(replayed.trials.values())) == repr(found)  # NaN is not equal to itself


def last_saved(tune: FakeTune, state: Path, *, steps: int) -> list[tuple[bytes, list[FakeTrial]]]:
    """Run some steps; return the searcher's and trials' saved states after each of the last four."""
    saved: list[tuple[bytes, list[FakeTrial]]] = []
    for step, _ in enumerate(tune.run(), start=1):
        if step > steps - 4:
            tune.searcher.save(str(state))
            saved.append((state.read_bytes(), tune.snapshot()))
        if step == steps:
            break
    return saved


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.parametrize("name", METHODS)
def test_a_restored_search_decides_as_one_that_was_not_killed(name: str, sampler: str, tmp_path: Path) -> None:
    """With one worker the order of results is fixed; results after the last save are repeated."""
    given = cloudpickle.dumps(pair(METHODS[name](), sampler=sampler))
    settings: dict[str, Any] = {"workers": 1, "value": value, "length": LENGTH}
    undisturbed = FakeTune(*pickle.loads(given), **settings)
    steps = sum(1 for _ in undisturbed.run())
    for seed in range(2):
        tune = FakeTune(*pickle.loads(given), **settings)
        state, trials = Random(seed).choice(last_saved(tune, tmp_path / "state", steps=(seed + 1) * steps // 4))
        (tmp_path / "state").write_bytes(state)
        tune = FakeTune(*pickle.loads(given), seed=seed + 1, restored=(tmp_path / "state", trials), **settings)
        for _ in tune.run():
            pass
        assert repr(views(tune.searcher)) == repr(views(undisturbed.searcher))


def restored(searcher: Searcher, make: Method, tmp_path: Path, trials: list[FakeTrial]) -> tuple[Searcher, Scheduler]:
    """Return a new pair with the state of this one, to which Tune has added these trials."""
    searcher.save(str(tmp_path / "state"))
    again = pair(make)
    tune = FakeTune(*again, workers=1, value=value, restored=(tmp_path / "state", trials))
    assert tune.trials == trials
    return again


def test_a_trial_that_the_search_has_paused_is_paused_in_tune(tmp_path: Path) -> None:
    searcher, scheduler = begun(METHODS["promotion"]())
    one, other, third = suggested(searcher, scheduler, 3)
    assert [report(scheduler, trial, 1) for trial in (one, other)] == ["PAUSE", "PAUSE"]
    one.saved = 1  # but Tune died while it paused the other
    restored(searcher, METHODS["promotion"](), tmp_path, [one, other, third])
    assert [trial.status for trial in (one, other, third)] == ["PAUSED", "PENDING", "PENDING"]


def test_a_trial_that_has_ended_for_the_search_does_not_run_again(tmp_path: Path) -> None:
    """This occurs if Tune died between the search's decision and its own, or was told to resume failed trials."""
    searcher, scheduler = begun(METHODS["asha"]())
    stopped, failed, unknown = *suggested(searcher, scheduler, 2), FakeTrial(trial_id="of another", config={})
    assert report(scheduler, stopped, 1, math.nan) == "STOP"
    searcher.on_trial_complete(failed.trial_id, error=True)
    restored(searcher, METHODS["asha"](), tmp_path, [stopped, failed, unknown])
    assert [trial.status for trial in (stopped, failed, unknown)] == ["TERMINATED", "ERROR", "TERMINATED"]


def test_a_trial_that_tune_left_out_is_canceled(tmp_path: Path) -> None:
    """`Tuner.restore(resume_unfinished=False)`."""
    searcher, scheduler = begun(RandomSearch(max_trials=2))
    trials = suggested(searcher, scheduler, 2)
    report(scheduler, trials[0], 1, 0.5)
    for trial in trials:
        trial.status = "TERMINATED"
    again, _ = restored(searcher, RandomSearch(max_trials=2), tmp_path, trials)
    assert again.suggest("next") == "FINISHED"
    assert [view.state for view in views(again)] == ["CANCELED", "CANCELED"]


def test_a_trial_that_tune_stopped_after_the_search_was_saved_is_stopped(tmp_path: Path) -> None:
    searcher, scheduler = begun(METHODS["asha"]())
    [trial] = suggested(searcher, scheduler, 1)
    trial.status = "TERMINATED"
    trial.last_result = {"training_iteration": 1, "loss": math.nan, "done": True}
    again, _ = restored(searcher, METHODS["asha"](), tmp_path, [trial])
    again.suggest("next")
    assert views(again)[0].state == "PRUNED"


def test_a_trial_that_tune_does_not_know_is_suggested_again(tmp_path: Path) -> None:
    searcher, scheduler = begun(METHODS["asha"]())
    trials = suggested(searcher, scheduler, 3)
    again, schedules = restored(searcher, METHODS["asha"](), tmp_path, [trials[0], trials[2]])
    assert again.suggest("lost") == trials[1].config
    schedules.on_trial_add(None, lost := FakeTrial(trial_id="lost", config={}))
    assert report(schedules, lost, 1, math.nan) == "STOP"
    assert views(again)[1].state == "PRUNED"


def test_a_state_that_ends_in_the_middle_of_a_line_is_an_earlier_state(tmp_path: Path) -> None:
    searcher, scheduler = begun(METHODS["asha"]())
    suggested(searcher, scheduler, 2)
    searcher.save(str(tmp_path / "state"))
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:-30])
    again, _ = pair(METHODS["asha"]())
    again.set_search_properties("loss", "min", {})
    again.restore(str(tmp_path / "state"))
    assert [view.state for view in views(again)][:3] == ["RUNNING", "RUNNING", "PENDING"]


def test_the_space_of_the_tuner_is_restored_without_it(tmp_path: Path) -> None:
    """`Tuner.restore` accepts no space, or only the same one."""
    searcher, _ = begun(METHODS["asha"](), None)
    assert searcher.set_search_properties("loss", "min", {"lr": tune.uniform(0, 1), "data": object()})
    config = searcher.suggest("t0")
    assert isinstance(config, dict)
    assert set(config) == {"lr"}
    again, _ = restored(searcher, METHODS["asha"](), tmp_path, [])
    assert again.suggest("t0 again") == config


@pytest.mark.parametrize("is_resumed_before", [True, False])
def test_a_paused_trial_that_tune_does_not_know_is_suggested_again_when_it_is_resumed(
    is_resumed_before: bool, tmp_path: Path
) -> None:
    def make() -> Method:
        return PromotionASHA(max_trials=2, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=2)

    searcher, scheduler = begun(make())
    lost, other = suggested(searcher, scheduler, 2)
    assert report(scheduler, lost, 2, 0.5) == "PAUSE"
    if is_resumed_before:
        assert report(scheduler, other, 2, 0.6) == "STOP"
    again, scheduler = restored(searcher, make(), tmp_path, [other])
    controller = SimpleNamespace(stop_trial=None)
    assert scheduler.choose_trial_to_run(controller) is None
    if not is_resumed_before:
        assert again.suggest("too early") is None
        assert report(scheduler, other, 2, 0.6) == "STOP"
    assert again.suggest("again") == lost.config
    assert scheduler.choose_trial_to_run(controller) is None
