"""Searches through Ray Tune's searcher and scheduler decide as without Tune."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from ray import cloudpickle, tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.search import ConcurrencyLimiter

from searchers import (
    ASHA,
    FieldError,
    Grid,
    IllegalEvent,
    PromotionASHA,
    RandomSampler,
    Reported,
    Requested,
    Single,
    Source,
    Space,
)
from searchers.events import Action, Event, Pause, Resume, Stop
from searchers.tune import Scheduler, Searcher
from tests.searchers.fake_tune import (
    LENGTH,
    METHODS,
    SPACE,
    SPEC,
    FakeTrial,
    FakeTune,
    begun,
    journal,
    pair,
    report,
    suggested,
    value,
    views,
)
from tests.searchers.helpers import Scripted
from tests.searchers.test_contract import METHODS as CONTRACT


@pytest.mark.parametrize("name", [name for name in CONTRACT if "several_objectives" not in name])
def test_every_method_of_the_contract_comes_to_its_end_in_tune(name: str) -> None:
    make, _ = CONTRACT[name]
    space = {"x": {"type": "double", "minval": 0, "maxval": 1, "count": make().max_trials}}  # type: ignore[attr-defined]
    tune = FakeTune(*pair(make(), space), workers=3, value=lambda config, step: config["x"], length=64, failures=0.02)
    for _ in tune.run():
        pass
    assert tune.searcher.search is not None
    assert tune.searcher.search.done is not None
    assert {view.ended for view in views(tune.searcher)} == {True}
    assert all(trial.has_ended for trial in tune.trials)


@pytest.mark.parametrize("name", METHODS)
def test_trials_are_added_and_stopped_on_request(name: str) -> None:
    tune = FakeTune(*pair(METHODS[name]()), workers=3, value=value, length=LENGTH, failures=0.02)
    added, stopped = -1, -1
    for step, _ in enumerate(tune.run()):
        if step == 2:
            added = tune.searcher.request(Requested(hparams={"lr": 0.5}))
        elif step == 4:
            assert tune.searcher.search is not None
            stopped = tune.searcher.request(Requested(trial=next(iter(tune.searcher.search.live))))
    found = views(tune.searcher)
    assert [view.id for view in found if view.state == "CANCELED"] == [stopped]
    assert (found[added].hparams or {})["lr"] == 0.5
    assert {view.ended for view in found} == {True}
    assert all(trial.has_ended for trial in tune.trials)


def test_a_trial_of_tune_begins_from_no_checkpoint_of_another() -> None:
    searcher, scheduler = begun(ASHA(max_trials=4, max_length=4, num_rungs=2))
    suggested(searcher, scheduler, 1)
    with pytest.raises(IllegalEvent, match="can't begin from another trial's checkpoint; leave out source"):
        searcher.request(Requested(source=Source(trial=0, step=1)))


def test_nan_is_the_worst_and_the_mode_is_the_direction() -> None:
    for mode, losses in (("min", [1.0, 0.5, 2.0, math.nan]), ("max", [1.0, 2.0, 0.5, math.nan])):
        asha = ASHA(max_trials=9, max_length=4, num_rungs=2, divisor=4, max_concurrent_trials=4)
        searcher, scheduler = pair(asha, metric="loss", mode=mode)
        assert scheduler.set_search_properties(None, None, num_samples=2**63 - 1)
        trials = suggested(searcher, scheduler, 4)
        decisions = [report(scheduler, trial, 1, loss) for trial, loss in zip(trials, losses, strict=True)]
        assert decisions == ["CONTINUE", "CONTINUE", "STOP", "STOP"]


def test_a_trial_ends_at_its_whole_length_even_if_its_results_skip_it() -> None:
    searcher, scheduler = begun(Single(max_length=4), time_attr="epoch")
    [trial] = suggested(searcher, scheduler, 1)
    assert scheduler.on_trial_result(None, trial, {"epoch": 3, "loss": 1.0, "training_iteration": 1}) == "CONTINUE"
    assert scheduler.on_trial_result(None, trial, {"epoch": 6, "loss": 1.0, "training_iteration": 2}) == "STOP"
    assert [view.state for view in views(searcher)] == ["COMPLETED"]


def test_the_last_result_of_a_trial_that_ends_by_itself_counts(tmp_path: Path) -> None:
    """Tune does not pass this result to the scheduler."""
    searcher, scheduler = begun(METHODS["random"]())
    one, other = suggested(searcher, scheduler, 2)
    report(scheduler, one, 1, 0.5)
    searcher.on_trial_complete(
        one.trial_id, {"training_iteration": 1, "loss": 0.5, "done": True}
    )  # a function's, again
    searcher.on_trial_complete(other.trial_id, {"training_iteration": 1, "loss": 0.25, "done": True})
    assert [(view.state, view.last) for view in views(searcher)[:2]] == [("COMPLETED", 0.5), ("COMPLETED", 0.25)]
    assert [each["event"] for each in journal(searcher, tmp_path)].count("reported") == 2


def test_a_trial_that_could_not_be_reset_has_failed() -> None:
    """Tune (2.60) does not report this; otherwise the search would wait for the trial forever."""
    searcher, scheduler = begun(Single())
    [trial] = suggested(searcher, scheduler, 1)
    trial.status = "ERROR"
    assert searcher.suggest("next") == "FINISHED"
    assert [view.state for view in views(searcher)] == ["ERRORED"]


def test_a_trial_that_fails_while_it_is_paused_may_be_resumed_meanwhile() -> None:
    method = PromotionASHA(max_trials=2, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=2)
    searcher, scheduler = begun(method)
    one, other = suggested(searcher, scheduler, 2)
    assert report(scheduler, one, 2, 0.5) == "PAUSE"
    scheduler.on_trial_error(None, one)  # with max_failures Tune restarts the trial from an earlier checkpoint
    one.status, one.saved = "PENDING", 1
    scheduler.on_trial_add(None, one)
    assert one.status == "PENDING"
    assert report(scheduler, other, 2, 0.6) == "STOP"  # and the first is promoted
    controller = SimpleNamespace(stop_trial=lambda trial: None)
    assert scheduler.choose_trial_to_run(controller) is None, "it runs"
    assert report(scheduler, one, 2, 0.5) == "CONTINUE"
    one.status, one.saved = "PAUSED", 2
    assert scheduler.choose_trial_to_run(controller) is None, "nor is it resumed later"


def test_a_trial_that_is_stopped_before_it_starts_or_resumes_does_neither() -> None:
    """None of dray's methods does this."""
    answers: dict[Event, list[Action]] = {
        Reported(trial=0, step=1, value=1.0): [Pause(trial=0)],
        Reported(trial=1, step=1, value=1.0): [Resume(trial=0)],
        Reported(trial=1, step=2, value=1.0): [Stop(trial=0), Stop(trial=2)],
    }
    searcher, scheduler = begun(Scripted(3, answers))
    paused, other = suggested(searcher, scheduler, 2)
    assert report(scheduler, paused, 1) == "PAUSE"
    paused.status, paused.saved = "PAUSED", 1
    assert [report(scheduler, other, step) for step in (1, 2)] == ["CONTINUE", "CONTINUE"]
    stopped: list[FakeTrial] = []
    assert scheduler.choose_trial_to_run(SimpleNamespace(stop_trial=stopped.append)) is None
    assert stopped == [paused]
    assert searcher.suggest("next") is None


def test_paused_trials_do_not_count_for_the_limit_of_concurrent_ones() -> None:
    """Tune's own `ConcurrencyLimiter` would count paused trials, and wait forever."""
    searcher, scheduler = pair(METHODS["promotion"]())
    limited = ConcurrencyLimiter(searcher, max_concurrent=2)
    scheduler.set_search_properties("loss", "min", num_samples=2**63 - 1)
    trials: list[FakeTrial] = []
    for each in range(3):
        config = limited.suggest(f"t{each}")
        assert (config is None) == (each == 2)
        if config is not None:
            trials.append(FakeTrial(trial_id=f"t{each}", config=config, status="RUNNING"))
            scheduler.on_trial_add(None, trials[-1])
    assert report(scheduler, trials[0], 1) == "PAUSE"
    trials[0].status = "PAUSED"
    config = limited.suggest("t3")
    assert isinstance(config, dict)
    scheduler.on_trial_add(None, fourth := FakeTrial(trial_id="t3", config=config, status="RUNNING"))
    # The best of three trials at the rung resumes once a slot is free.
    trials[0].saved = 1
    assert [report(scheduler, trial, 1, 2.0) for trial in (trials[1], fourth)] == ["PAUSE", "PAUSE"]
    controller = SimpleNamespace(stop_trial=None)
    assert scheduler.choose_trial_to_run(controller) is None, "both still run while Tune pauses them"
    fourth.status = "PAUSED"
    assert scheduler.choose_trial_to_run(controller) is trials[0]


def test_a_resumed_trial_without_a_checkpoint_is_an_error() -> None:
    method = PromotionASHA(max_trials=2, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=2)
    searcher, scheduler = begun(method)
    trials = suggested(searcher, scheduler, 2)
    assert [report(scheduler, trial, 2) for trial in trials] == ["PAUSE", "STOP"]
    trials[0].status = "PAUSED"
    controller = SimpleNamespace(stop_trial=lambda trial: None)
    with pytest.raises(ValueError, match=r"trial t0 was paused .* saved no checkpoint: save one with each result"):
        scheduler.choose_trial_to_run(controller)
    trials[0].last_result["checkpoint_path"] = "/of/a/TorchTrainer"  # which restores it by itself
    assert scheduler.choose_trial_to_run(controller) is trials[0]


@pytest.mark.parametrize(
    "space",
    [
        SPEC,
        SPACE,
        {"lr": tune.loguniform(1e-4, 1e-1), "layers": tune.randint(1, 5)},
        {"lr": FloatDistribution(1e-4, 1e-1, log=True), "layers": IntDistribution(1, 4)},
    ],
    ids=["of an experiment file", "parsed", "of tune", "of optuna"],
)
def test_a_space_in_any_form(space: Any) -> None:
    searcher, _ = begun(METHODS["asha"](), space, seed=3)
    assert searcher.suggest("t0") == pytest.approx(RandomSampler(SPACE, 3).ask(0))


def test_the_space_of_the_tuner() -> None:
    searcher, _ = begun(METHODS["asha"](), None)
    param_space = {
        "loop": {"lr": tune.uniform(0, 1), "model": object()},
        "layers": tune.grid_search([1, 2]),
        "optimizer": tune.choice([{"name": "sgd", "momentum": tune.uniform(0, 1)}, {"name": "adam"}]),
        "epochs": 7,
    }
    assert searcher.set_search_properties("loss", "min", param_space)
    config = searcher.suggest("t0")
    assert isinstance(config, dict)
    assert set(config) == {"loop", "layers", "optimizer"}
    assert set(config["loop"]) == {"lr"}
    assert not begun(METHODS["asha"]())[0].set_search_properties("loss", "min", param_space), "it has a space"


class Mine:
    """A user's sampler."""

    def __init__(self, space: Space, *, seed: int, rungs: tuple[float, ...]) -> None:
        self.given = (space, seed, rungs)

    def ask(self, trial: int) -> dict[str, object]:
        return {"lr": 0.01, "layers": 2}

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass


@pytest.mark.parametrize("sampler", [Mine, lambda space, **about: Mine(space, **about), Mine(SPACE, seed=0, rungs=())])
def test_a_users_own_sampler_and_first_points(sampler: Any) -> None:
    searcher, _ = begun(METHODS["asha"](), sampler=sampler, points=[{"lr": 0.1, "layers": 4}])
    assert [searcher.suggest("t0"), searcher.suggest("t1")] == [{"lr": 0.1, "layers": 4}, {"lr": 0.01, "layers": 2}]


def test_a_grid_has_all_points_of_the_space() -> None:
    space = {"a": tune.grid_search([1, 2]), "b": tune.choice(["x", "y"])}
    searcher, _ = begun(Grid(points=4), space)
    configs = [searcher.suggest(f"t{each}") for each in range(4)]
    assert sorted(map(str, configs)) == sorted(str({"a": a, "b": b}) for a in (1, 2) for b in "xy")


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a name instead of a method": (lambda: pair("asha"), r"method: must be a search method, such as .*, got 'asha'"),  # type: ignore[arg-type]
    "a mode of neither kind": (lambda: pair(Single(), mode="less"), r"mode: must be min or max, got 'less'"),
    "no scheduler": (
        lambda: pair(Single(), metric="loss", mode="min")[0].suggest("t0"),
        r"TuneConfig\.scheduler: must be a searchers\.tune\.Scheduler",
    ),
    "no metric": (lambda: ask(pair(Single()), metric=None), r"TuneConfig\.metric: must be set"),
    "two metrics": (
        lambda: ask(pair(Single(), metric="acc", mode="min")),
        r"TuneConfig\.metric: is 'loss', but the searcher has 'acc'; set it in one place",
    ),
    "a number of samples": (lambda: ask(pair(Single()), num_samples=10), r"num_samples: must be -1, .* got 10; .*"),
    "a sampler that does not exist": (lambda: ask(pair(Single(), sampler="tpo")), r"searcher\.sampler\.name: .*tpo"),
    "a grid of another size": (
        lambda: ask(pair(Grid(points=3), {"a": tune.choice([1, 2])})),
        r"Grid\.points: must be 2, the size of the space's grid, got 3",
    ),
    "a grid with a sampler": (
        lambda: ask(pair(Grid(points=2), {"a": tune.choice([1, 2])}, sampler="tpe")),
        r"sampler: Grid tries each point of the space once",
    ),
    "a point outside of the space": (
        lambda: ask(pair(Single(), points=[{"lr": 7, "layers": 1}])),
        r"searcher\.points\[0\]\.lr",
    ),
    "a domain without bounds": (
        lambda: pair(Single(), {"x": tune.randn(0, 1)}),
        r"hyperparameters\.x: .* has no bounds",
    ),
    "objects as choices": (
        lambda: pair(Single(), None)[0].set_search_properties(
            "loss", "min", inject_placeholders({"a": {"b": tune.choice([Mine, None])}}, create_resolvers_map())
        ),
        r"hyperparameters\.a\.b: has objects as choices; use their names",
    ),
    "a domain in a list": (
        lambda: pair(Single(), None)[0].set_search_properties("loss", "min", {"a": [1, tune.uniform(0, 1)]}),
        r"hyperparameters\.a\.1: is in a list",
    ),
}


def ask(both: tuple[Searcher, Scheduler], metric: str | None = "loss", num_samples: int = 2**63 - 1) -> object:
    both[1].set_search_properties(metric, "min", num_samples=num_samples)
    return both[0].suggest("t0")


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_raise_one_error_with_a_remedy(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(FieldError, match=says):
        make()


def test_a_result_without_its_length_is_an_error() -> None:
    searcher, scheduler = begun(METHODS["asha"](), time_attr="epoch")
    [trial] = suggested(searcher, scheduler, 1)
    with pytest.raises(FieldError, match=r"time_attr: 'epoch' is not in a result of trial 0, which has loss, training"):
        report(scheduler, trial, 1)
    trial.last_result = {"seconds": 7}  # without the metric; Tune's check for it is disabled
    assert scheduler.on_trial_result(None, trial, dict(trial.last_result)) == "CONTINUE"


def test_a_scheduler_works_with_its_own_searcher_only() -> None:
    _, scheduler = begun(METHODS["asha"]())
    with pytest.raises(FieldError, match=r"search_alg: trial other was not suggested by this scheduler's searcher"):
        scheduler.on_trial_add(None, FakeTrial(trial_id="other", config={}))


def test_a_searcher_runs_once() -> None:
    searcher, scheduler = begun(METHODS["asha"]())
    searcher.suggest("t0")
    with pytest.raises(FieldError, match=r"has already run; create a new one, or continue with Tuner\.restore"):
        scheduler.set_search_properties("loss", "min", num_samples=-1)


def test_the_pair_is_one_after_it_was_pickled() -> None:
    searcher, scheduler = pickle.loads(cloudpickle.dumps(pair(METHODS["asha"](), sampler=lambda *_, **__: Mine)))
    scheduler.set_search_properties("loss", "min", num_samples=2**63 - 1)
    assert (searcher.metric, searcher.mode) == ("loss", "min")


def test_the_line_for_tunes_status() -> None:
    searcher, scheduler = begun(METHODS["promotion"]())
    assert scheduler.debug_string() == "Using PromotionASHA of searchers"
    suggested(searcher, scheduler, 2)
    assert scheduler.debug_string() == "Using PromotionASHA of searchers, 3 PENDING, 2 RUNNING"
