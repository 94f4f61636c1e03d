"""Arguments of the searcher and scheduler for Ray Tune, and errors for invalid ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from ray import cloudpickle, tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders

from searchers import FieldError, Grid, RandomSampler, Single, Space
from searchers.events import Event
from searchers.tune import Scheduler, Searcher
from tests.searchers.fake_tune import METHODS, SPACE, SPEC, FakeTrial, begun, pair, report, suggested


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
