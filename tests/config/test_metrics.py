"""searcher.metrics: what it means, that it comes back from a file, and one clear error for each fault."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.config.search import build_method, build_sampler
from searchers import ASHA, AdaptiveASHA, MethodError, Metric, PromotionASHA
from searchers.optuna_sampler import OptunaSampler
from tests.config.configs import faults
from tests.searchers.helpers import needs_constraints

METRICS = [
    {"name": "val_loss"},
    {"name": "tokens_per_s", "smaller_is_better": False},
    {"name": "memory_mb", "at_most": 8000},
]


def config(metrics: object = METRICS, **searcher: Any) -> dict[str, Any]:
    base = {"name": "asha", "max_length": {"epochs": 4}, "max_trials": 8, "num_rungs": 2, "metrics": metrics}
    return {
        "entrypoint": "model:Trial",
        "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {**base, **searcher},
    }


def test_metrics_become_objectives_and_the_first_stands_for_all() -> None:
    searcher = load_config(config()).searcher
    assert searcher.objectives is not None
    assert searcher.objectives.metrics == (
        Metric(name="val_loss"),
        Metric(name="tokens_per_s", smaller_is_better=False),
        Metric(name="memory_mb", at_most=8000),
    )
    assert (searcher.first_metric, searcher.sign) == ("val_loss", 1)
    searcher = load_config(config([METRICS[2], METRICS[1], METRICS[0]])).searcher
    assert (searcher.first_metric, searcher.sign) == ("tokens_per_s", -1)


def test_one_metric_is_as_before() -> None:
    searcher = load_config(config(None, metric="val_loss", smaller_is_better=False)).searcher
    assert searcher.objectives is None
    assert (searcher.first_metric, searcher.sign) == ("val_loss", -1)


def test_config_comes_back_from_a_file() -> None:
    checked = load_config(config())
    stored = yaml.safe_load(yaml.safe_dump(checked.to_dict()))
    assert stored["searcher"]["metrics"] == [METRICS[0] | {"smaller_is_better": True}, *METRICS[1:]]
    assert load_config(stored) == checked


def test_methods_rank_by_several_metrics_only_then() -> None:
    for method, kind in (({}, ASHA), ({"variant": "promotion"}, PromotionASHA)):
        made = build_method(load_config(config(**method)))
        assert isinstance(made, kind)
        assert made.pareto
    adaptive = config(name="adaptive_asha")
    del adaptive["searcher"]["num_rungs"]
    made = build_method(load_config(adaptive))
    assert isinstance(made, AdaptiveASHA)
    assert all(bracket.pareto for bracket in made.brackets)
    assert not build_method(load_config(config(None, metric="val_loss"))).pareto  # type: ignore[attr-defined]


@needs_constraints
@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2"])
def test_sampler_of_several_metrics(name: str) -> None:
    assert isinstance(build_sampler(load_config(config(sampler=name))), OptunaSampler)


def test_rungs_are_compared_by_one_metric_only() -> None:
    [(path, what)] = faults(config(skip_uninformative_rungs=True)).items()
    assert path == "searcher.skip_uninformative_rungs"
    assert what == "compares trials by one metric, not by metrics; remove it"
    with pytest.raises(MethodError, match="skip_uninformative_rungs: compares trials by one metric"):
        ASHA(max_trials=8, max_length=4, num_rungs=2, pareto=True, skip_uninformative_rungs=True)


def test_either_metric_or_metrics() -> None:
    assert "missing required field" in faults(config(None))["searcher.metric"]
    both = faults(config(metric="val_loss", smaller_is_better=True))
    assert both == {
        "searcher.metric": "can't be given together with metrics; remove one of them",
        "searcher.smaller_is_better": "belongs to metric; remove it, and set smaller_is_better in the entries of "
        "metrics that are objectives",
    }
    assert set(faults(config([], metric="val_loss"))) == {"searcher.metric", "searcher.metrics"}


A = [{"name": "a"}]


@pytest.mark.parametrize(
    ("metrics", "path", "what"),
    [
        ([{"name": "mb", "at_most": 9}], "searcher.metrics", "needs an objective, an entry without at_most and"),
        ([], "searcher.metrics", "needs an objective"),
        (["val_loss"], "searcher.metrics[0]", "must be a mapping, got 'val_loss'"),
        ([{"name": "a", "nam": "a"}], "searcher.metrics[0].nam", "unknown field; did you mean name?"),
        ([{"at_most": 1}], "searcher.metrics[0].name", "missing required field"),
        ([{"name": "a", "at_most": "8 GB"}], "searcher.metrics[0].at_most", "must be a number, got '8 GB'"),
        ([*A, {"name": "b", "at_most": 1, "smaller_is_better": True}], "searcher.metrics[1]", "a constraint is not"),
        ([*A, *A], "searcher.metrics[1].name", "'a' is an objective twice"),
        ([*A, {"name": "b", "at_most": 1, "at_least": 2}], "searcher.metrics[1]", "at_least must be <= at_"),
    ],
)
def test_fault_names_the_entry_and_the_cure(metrics: object, path: str, what: str) -> None:
    found = faults(config(metrics))
    assert list(found) == [path]
    assert what in found[path]


def test_an_entry_is_checked_whatever_the_method() -> None:
    found = faults(config([{"at_most": 1}], name="asa"))
    assert {"searcher.name", "searcher.metrics[0].name"} <= set(found)


def test_sampler_that_takes_one_objective_is_refused() -> None:
    [(path, what)] = faults(config(sampler="cmaes")).items()
    assert path == "searcher.sampler.name"
    assert what == (
        "cmaes takes one objective without constraints, but searcher.metrics has: val_loss, smaller is better; "
        "tokens_per_s, larger is better; memory_mb at most 8000. Use tpe, gp, nsga2 or random"
    )


def config_with(**searcher: Any) -> dict[str, Any]:
    searcher = {"name": "single", "max_length": {"batches": 4}, **searcher}
    return {"entrypoint": "model_def:Trial", "searcher": searcher}


@pytest.mark.parametrize(
    "name", ["acc", "val_accuracy", "AUC", "BinaryAUROC", "f1", "F1-macro", "f1score", "mAP", "mIoU", "acc@1", "top5"]
)
def test_metric_that_sounds_better_if_larger_needs_a_direction(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(config_with(metric=name))
    several = load_config(config_with(metrics=[{"name": "loss"}, {"name": name}, {"name": name, "at_least": 0.5}]))
    assert [f"minimizes {name!r}" in text for text in caplog.messages] == [True, True]
    caplog.clear()
    for direction in (True, False):
        load_config(config_with(metric=name, smaller_is_better=direction))
    assert [load_config(each.to_dict()) for each in (config, several)] == [config, several]
    assert caplog.messages == [], "an experiment's own copy has the default"


def test_a_metric_that_may_well_be_minimized_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("loss", "top1_error", "dice_loss", "1-acc", "accumulated_s", "mapping_time", "macc", "perplexity"):
        load_config(config_with(metric=name))
    assert caplog.messages == []
