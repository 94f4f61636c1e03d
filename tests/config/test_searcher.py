"""The searcher section: every method with its fields and defaults, both spellings of each, every fault by its path."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.config.search import as_extended, build_method, build_sampler, build_search, check_growth
from dray.errors import ConfigError
from searchers import (
    ASHA,
    AdaptiveASHA,
    Create,
    Exited,
    Grid,
    PromotionASHA,
    RandomSampler,
    Reported,
    Source,
    Started,
)
from searchers.pb2 import PB2
from searchers.pbt import Explorer
from tests.config import configs

LR = {"type": "log", "base": 10, "minval": -4, "maxval": -1}
HALVING = {"max_trials": 8, "max_length": {"epochs": 16}}
PBT_8 = {"name": "pbt", "population": 8, "interval": {"epochs": 2}, "max_length": {"epochs": 64}}
ASHA_3 = {"name": "asha", "num_rungs": 3, **HALVING}


def config(searcher: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """With ``metric: loss``, one hyperparameter, and a validation each epoch."""
    return {
        "entrypoint": "model_def:MyTrial",
        "hyperparameters": {"lr": LR},
        "min_validation_period": {"epochs": 1},
        "reproducibility": {"experiment_seed": 7},
        "searcher": {"metric": "loss", **searcher},
        **fields,
    }


def load(searcher: dict[str, Any], **fields: Any) -> ExperimentConfig:
    loaded = load_config(config(searcher, **fields))
    assert load_config(yaml.safe_load(yaml.safe_dump(loaded.to_dict()))) == loaded
    return loaded


def faults(searcher: dict[str, Any], **fields: Any) -> dict[str, str]:
    return configs.faults(config(searcher, **fields))


# ------------------------------------------------------------------------------------------------------ the methods


def test_promotion_is_another_variant_of_asha_by_either_spelling() -> None:
    for spelling in ({"variant": "promotion"}, {"stop_once": False}, {"variant": "promotion", "stop_once": False}):
        loaded = load({**ASHA_3, **spelling})
        assert loaded.searcher.variant == "promotion"
        assert type(build_method(loaded)) is PromotionASHA
    for spelling in ({}, {"variant": "stopping"}, {"stop_once": True}):
        assert type(build_method(load({**ASHA_3, **spelling}))) is ASHA


def test_grid_has_a_trial_for_each_point_the_last_first() -> None:
    space = {"lr": {**LR, "count": 4}, "size": {"type": "categorical", "vals": [1, 2]}, "seed": 3}
    loaded = load({"name": "grid", "max_length": {"epochs": 4}}, hyperparameters=space)
    assert isinstance(build_method(loaded), Grid)
    search = build_search(loaded, lambda record: None)
    created = [action.trial for action in search.start() if isinstance(action, Create)]
    assert created == list(range(8))
    points = [search.params(trial) for trial in created]
    # The first key is the slowest; the end comes first.
    assert [(point["lr"], point["size"]) for point in points] == [
        (pytest.approx(10.0**exponent), size) for exponent in (-1, -2, -3, -4) for size in (2, 1)
    ]


def test_a_large_grid_needs_a_larger_max_points() -> None:
    space = {
        name: {"type": "int", "minval": 0, "maxval": 999, "count": count} for name, count in (("a", 1000), ("b", 900))
    }
    grid = {"name": "grid", "max_length": {"epochs": 4}}
    with pytest.raises(ConfigError, match=r"has 900,000 points, and may have 10,000; .* or raise searcher\.max_points"):
        load(grid, hyperparameters=space)
    loaded = load({**grid, "max_points": 900_000}, hyperparameters=space)
    search = build_search(loaded, lambda record: None)
    created = [action.trial for action in search.start() if isinstance(action, Create)]
    assert created == list(range(16))
    assert [search.params(trial) for trial in (0, 1)] == [{"a": 999, "b": 999}, {"a": 999, "b": 998}]
    assert build_method(loaded).max_trials == 900_000  # type: ignore[attr-defined]


def test_grid_of_a_program_may_leave_the_length_to_fit() -> None:
    grid = {"lr": {"type": "categorical", "vals": [0.1, 0.2]}}
    loaded = load({"name": "grid"}, hyperparameters=grid, entrypoint="python3 train.py")
    assert build_method(loaded).rungs == ()


def test_pbt_explores_with_its_own_fields_from_its_first_points() -> None:
    point = {"lr": 0.01}
    loaded = load({**PBT_8, "resample_probability": 0, "factors": [0.5], "points": [point]})
    search = build_search(loaded, lambda record: None)
    assert len(search.start()) == 8
    assert search.method.rungs == tuple(range(2, 65, 2))
    assert search.params(0) == point
    for trial in range(8):
        search.on(Started(trial=trial))
    for trial in range(8):
        actions = search.on(Reported(trial=trial, step=2, value=float(trial), batches=10))
    assert isinstance(created := actions[1], Create)
    assert created.source in (Source(trial=0, step=2, batches=10), Source(trial=1, step=2, batches=10))
    assert search.params(created.trial)["lr"] == 0.5 * search.params(created.source.trial)["lr"]  # type: ignore[operator]
    assert as_extended(loaded, [{"event": "extended", "max_length": 80}]).searcher.length == 80


def test_pbt_explores_at_random_by_default_or_by_pb2() -> None:
    assert isinstance(build_sampler(load(PBT_8)), Explorer)
    assert isinstance(build_sampler(load({**PBT_8, "sampler": "pb2"})), PB2)


def test_adaptive_has_determineds_defaults_and_brackets() -> None:
    loaded = load({"name": "adaptive_asha", "max_trials": 64, "max_length": 64})
    assert (loaded.searcher.mode, loaded.searcher.max_rungs, loaded.searcher.bracket_rungs) == ("standard", 5, [])
    method = build_method(loaded)
    assert isinstance(method, AdaptiveASHA)
    assert [bracket.rungs for bracket in method.brackets] == [(1, 4, 16, 64), (4, 16, 64), (16, 64)]


@pytest.mark.parametrize(
    ("fields", "rungs"),
    [
        ({"mode": "aggressive"}, [4]),
        ({"mode": "conservative"}, [4, 3, 2, 1]),
        ({"max_rungs": 2}, [2, 1]),
        ({"bracket_rungs": [3, 1]}, [3, 1]),
    ],
)
def test_adaptive_takes_its_brackets_from_its_fields(fields: dict[str, Any], rungs: list[int]) -> None:
    method = build_method(load({"name": "adaptive_asha", "max_trials": 64, "max_length": 64, **fields}))
    assert isinstance(method, AdaptiveASHA)
    assert [len(bracket.rungs) for bracket in method.brackets] == rungs


def test_adaptive_promotes_too() -> None:
    method = build_method(load({"name": "adaptive_asha", "stop_once": False, **HALVING}))
    assert isinstance(method, AdaptiveASHA)
    assert {type(bracket) for bracket in method.brackets} == {PromotionASHA}


def test_rungs_are_in_the_unit_of_the_time_metric() -> None:
    timed = {"name": "asha", "num_rungs": 3, "max_trials": 8, "max_time": 160, "time_metric": "seconds"}
    for length in ({}, {"max_length": {"epochs": 16}}):
        loaded = load({**timed, **length})
        assert build_method(loaded).rungs == (10, 40, 160)
        assert loaded.searcher.length == 160


# ----------------------------------------------------------------------------------------------------- the samplers


def test_sampler_is_a_name_or_a_name_and_options() -> None:
    by_name, with_options = (
        load({**ASHA_3, "sampler": sampler}).searcher.sampler
        for sampler in ("tpe", {"name": "tpe", "options": {"n_startup_trials": 3}})
    )
    assert (by_name.name, by_name.options) == ("tpe", {})
    assert (with_options.name, with_options.options) == ("tpe", {"n_startup_trials": 3})
    assert load(ASHA_3).searcher.sampler.name == "random"


def test_multi_fidelity_sampler_is_made_for_the_methods_rungs() -> None:
    sampler, same = (build_sampler(load({**ASHA_3, "sampler": "multi_fidelity"})) for _ in range(2))
    assert type(sampler).__name__ == "MultiFidelitySampler"
    method = build_method(load(ASHA_3))
    for trial in range(20):
        for each in (sampler, same):
            each.tell(Started(trial=trial), {"lr": 10.0 ** -(1 + trial % 4)})
            each.tell(Reported(trial=trial, step=method.rungs[0], value=trial % 4), {})
            each.tell(Exited(trial=trial, reason="stopped"), {})
    assert sampler.ask(21) == same.ask(21) != RandomSampler(sampler.space, 7).ask(21)


def test_the_multi_fidelity_sampler_has_no_options() -> None:
    assert faults({**ASHA_3, "sampler": {"name": "multi_fidelity", "options": {"n": 1}}}) == {
        "searcher.sampler.options": "multi_fidelity has no options, got {'n': 1}; remove them"
    }


def test_first_points_come_first_and_constants_may_be_left_out() -> None:
    space = {"lr": LR, "layers": {"type": "int", "minval": 1, "maxval": 4}, "batch": 64}
    loaded = load({**ASHA_3, "points": [{"lr": 0.01, "layers": 2}]}, hyperparameters=space)
    sampler = build_sampler(loaded)
    assert sampler.ask(0) == {"lr": 0.01, "layers": 2, "batch": 64}
    assert sampler.ask(1) == loaded.space.sample(Random("7:1"))


def test_beliefs_are_for_multi_fidelity() -> None:
    belief = {"lr": {"around": 0.01, "within": 1.01}}
    sampler = build_sampler(load({**ASHA_3, "sampler": "multi_fidelity", "prior": belief}))
    draws = [float(str(sampler.ask(trial)["lr"])) for trial in range(20)]
    assert 6 <= sum(0.0095 < lr < 0.0105 for lr in draws) < 20
    for fields in (ASHA_3, {**ASHA_3, "sampler": "tpe"}, {**ASHA_3, "sampler": "my:Sampler"}):
        assert "use multi_fidelity" in faults({**fields, "prior": belief})["searcher.prior"]
    wrong = {
        **ASHA_3,
        "sampler": "multi_fidelity",
        "prior": {"lr": {"around": 1, "within": 3}, "x": {"around": 1}, "y": 1},
    }
    assert set(faults(wrong)) == {"searcher.prior.y"}
    del wrong["prior"]["y"]
    assert set(faults(wrong)) == {"searcher.prior.lr.around", "searcher.prior.x"}


def test_hyperparameters_may_be_optunas_distributions() -> None:
    optuna = pytest.importorskip("optuna")
    given = {"layers": optuna.distributions.IntDistribution(1, 4), "batch": 64}
    draws = [load(ASHA_3, hyperparameters=given).space.sample(Random(n)) for n in range(50)]
    assert {(draw["layers"], draw["batch"]) for draw in draws} == {(layers, 64) for layers in (1, 2, 3, 4)}


def test_unknown_distribution_is_a_fault_with_its_path() -> None:
    class Domain:
        """Neither library's."""

    assert "hyperparameters.lr" in faults(ASHA_3, hyperparameters={"lr": Domain()})


# -------------------------------------------------------------------------------------------------------- extension


def test_extended_config_has_the_last_budget_of_the_journal() -> None:
    records: list[dict[str, Any]] = [
        {"event": "extended", "max_trials": 16, "max_length": None},
        {"event": "extended", "max_trials": None, "max_length": 64},
        {"event": "extended", "max_trials": 20, "max_length": None},
    ]
    searcher = as_extended(load(ASHA_3), records).searcher
    assert (searcher.max_trials, str(searcher.max_length)) == (20, "64 epochs")
    timed = {"name": "asha", "num_rungs": 3, "max_trials": 8, "max_time": 160, "time_metric": "seconds"}
    assert as_extended(load(timed), records).searcher.max_time == 64
    assert as_extended(load(ASHA_3), []) == load(ASHA_3)


# ----------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("searcher", "path", "what"),
    [
        ({"name": "sync_halving"}, "searcher.name", "sync_halving was removed from Determined; use asha"),
        ({"name": "custom", "options": {}}, "searcher.options", "custom has no such field; remove it, or use"),
        ({"name": "a:B", "max_trials": 3}, "searcher.max_trials", "remove it, or put it below options, if the class"),
        ({"name": "a:b:c"}, "searcher.name", "adaptive_asha, auto, pbt, custom, module:Class, got 'a:b:c'"),
        ({"name": "custom", "points": [{"lr": 3}]}, "searcher.points[0].lr", "got 3"),
        ({**ASHA_3, "variant": "promotion", "stop_once": True}, "searcher.stop_once", "true means variant:"),
        ({**ASHA_3, "max_time": 60}, "searcher.time_metric", "missing required field; the unit of max_time"),
        ({**ASHA_3, "time_metric": "seconds"}, "searcher.max_time", "missing required field; maximum length of a"),
        ({**ASHA_3, "bracket_rungs": [3]}, "searcher.bracket_rungs", "or use name: adaptive_asha"),
        ({"name": "grid", **HALVING}, "searcher.max_trials", "grid has no such field"),
        ({"name": "grid", "max_length": 4, "sampler": "tpe"}, "searcher.sampler", "grid has no such field"),
        ({"name": "grid", "max_length": 4}, "hyperparameters.lr.count", "grid"),
        ({"name": "single", "max_length": 4, "points": [{}]}, "searcher.points", "single has no such field"),
        ({**ASHA_3, "sampler": {"nome": "tpe"}}, "searcher.sampler.nome", "unknown field; did you mean name?"),
        ({**ASHA_3, "sampler": {"options": {"a": 1}}}, "searcher.sampler.options", "random has no options, got"),
        ({**ASHA_3, "sampler": "tpi"}, "searcher.sampler.name", "tpe"),
        (
            {**ASHA_3, "sampler": {"name": "tpe", "options": {"n": 1}}},
            "searcher.sampler.options.n",
            "is not an option of TPE",
        ),
        (
            {**PBT_8, "interval": {"batches": 5}},
            "searcher.interval",
            "must be in the unit of max_length, epochs, got 5 batc",
        ),
        ({**PBT_8, "interval": {"epochs": 65}}, "searcher.interval", "must be at most max_length, which is 64, got 65"),
        (
            {**PBT_8, "sampler": "tpe"},
            "searcher.sampler.name",
            "must be random, pb2 or module:Class with pbt, got 'tpe'",
        ),
        ({**PBT_8, "sampler": {"name": "pb2", "options": {"a": 1}}}, "searcher.sampler.options", "pb2 has no options"),
        ({**PBT_8, "sampler": "pb2", "factors": [0.5]}, "searcher.factors", "has no effect with sampler pb2"),
        (
            {**PBT_8, "sampler": "pb2", "resample_probability": 0.25},
            "searcher.resample_probability",
            "has no effect with sampler pb2; remove it",
        ),
        ({**ASHA_3, "sampler": "pb2"}, "searcher.sampler.name", "pb2 is a sampler of pbt; write name: pbt"),
        ({**PBT_8, "quantile": 0.6}, "searcher.quantile", "must be <= 0.5, got 0.6"),
        ({**PBT_8, "points": [{"lr": 0.01}] * 9}, "searcher.points", "must be at most population (8) points, got 9"),
        ({**PBT_8, "metrics": [{"name": "loss"}]}, "searcher.metrics", "pbt compares trials by one metric"),
        ({"name": "pbt", "population": 8, "interval": {"epochs": 2}}, "searcher.max_length", "missing required field"),
        ({**ASHA_3, "points": [0.1]}, "searcher.points[0]", "must be a mapping, got 0.1"),
        ({**ASHA_3, "points": [{"lr": 0.01}] * 9}, "searcher.points", "must be at most max_trials (8) points, got 9"),
        ({**ASHA_3, "points": [{"lr": 0.01}, {"lr": 3}]}, "searcher.points[1].lr", "got 3"),
        ({**ASHA_3, "points": [{"lr": 0.01, "momentum": 1}]}, "searcher.points[0].momentum", ""),
    ],
)
def test_a_fault_of_the_searcher_has_its_path(searcher: dict[str, Any], path: str, what: str) -> None:
    found = faults(searcher)
    assert what in found[path]


def test_pbt_searches_batch_sizes_only_with_lengths_in_batches() -> None:
    sizes = {"lr": LR, "global_batch_size": {"type": "categorical", "vals": [32, 64]}}
    found = faults(PBT_8, hyperparameters=sizes)
    assert "must be a constant with pbt and lengths in epochs" in found["hyperparameters.global_batch_size"]
    load({**PBT_8, "interval": 2, "max_length": 64}, hyperparameters=sizes)


@pytest.mark.parametrize("entrypoint", ["model_def:MyTrial", None])
def test_max_time_needs_a_validation_period(entrypoint: str | None) -> None:
    timed = {"name": "asha", "num_rungs": 3, "max_trials": 8, "max_time": 160, "time_metric": "seconds"}
    found = faults(timed, entrypoint=entrypoint, min_validation_period=None)
    assert "required with searcher.max_time: the time is checked" in found["min_validation_period"]
    # A program's fit() may have one of its own.
    load(timed, entrypoint="python3 train.py", min_validation_period=None)


def test_an_extension_makes_no_search_smaller() -> None:
    extended = as_extended(load(ASHA_3), [{"event": "extended", "max_trials": 20, "max_length": 64}])
    check_growth(extended, {"max_trials": 20, "max_length": 65})
    check_growth(extended, {"patience": 3})
    with pytest.raises(ConfigError) as caught:
        check_growth(extended, {"max_trials": 19, "max_length": 63})
    assert caught.value.faults == (
        ("searcher.max_trials", "must be an integer >= 20, got 19"),
        ("searcher.max_length", "must be an integer >= 64, got 63"),
    )
