"""What a search's journal says of its rungs."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.records.rungs import RungEstimate, rung_estimates


def config(searcher: dict[str, Any]) -> ExperimentConfig:
    return load_config(
        {
            "entrypoint": "model_def:MyTrial",
            "hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}},
            "min_validation_period": {"epochs": 1},
            "searcher": {"metric": "accuracy", "smaller_is_better": False, "max_trials": 500, **searcher},
        }
    )


ASHA = {"name": "asha", "num_rungs": 3, "divisor": 3, "max_length": {"epochs": 9}}


def journal(rho: float, trials: int = 600) -> list[dict[str, Any]]:
    """The best third (the largest) at 1 epoch go on to 3; the accuracies have this correlation."""
    rng, records = Random(4), [{"event": "created", "trial": 0}]
    for trial in range(trials):
        first = rng.gauss(0, 1)
        records.append({"event": "reported", "trial": trial, "step": 1, "value": first})
        if first > 0.43:
            later = rho * first + math.sqrt(1 - rho**2) * rng.gauss(0, 1)
            records.append({"event": "reported", "trial": trial, "step": 3, "value": later})
    return records


def test_a_rung_that_ranks_and_one_with_no_trials_beyond_it() -> None:
    first, second = rung_estimates(config(ASHA), journal(0.9))
    assert (first.length, first.trials) == (1, 600)
    assert first.correlation == pytest.approx(0.9, abs=0.1)
    assert (second.length, second.trials, second.compared, second.correlation) == (3, first.compared, 0, None)
    assert (
        second.sentence("epochs")
        == f"3 epochs: rank correlation with the next rung not known (0 of {second.trials} trials), 33% continue"
    )


def test_rung_that_one_trial_has_reached_is_in_the_singular() -> None:
    rung = RungEstimate(length=1, trials=1, compared=0, correlation=None, continues=1 / 3)
    assert rung.sentence("epochs") == (
        "1 epoch: rank correlation with the next rung not known (0 of 1 trial), 33% continue"
    )


def test_repeats_are_not_compared_at_rungs() -> None:
    records = journal(0.9)
    again = {"action": "create", "trial": 600, "repeat": {"trial": 7, "seed": 1}}
    more = [{"event": "exited", "trial": 599, "reason": "completed", "actions": [again]}]
    more += [{"event": "reported", "trial": 600, "step": step, "value": 0.1} for step in (1, 3)]
    assert rung_estimates(config(ASHA), [*records, *more]) == rung_estimates(config(ASHA), records)


@pytest.mark.parametrize(("skips", "share"), [(True, 1.0), (False, 1 / 3)])
def test_more_continue_from_a_useless_rung_if_it_may_be_skipped(skips: bool, share: float) -> None:
    first, _ = rung_estimates(config({**ASHA, "skip_uninformative_rungs": skips}), journal(0.0))
    assert first.correlation == pytest.approx(0, abs=0.2)
    assert first.continues == pytest.approx(share)


def test_auto_skips_rungs() -> None:
    first, *_ = rung_estimates(config({"name": "auto", "max_trials": 600, "max_length": {"epochs": 9}}), journal(0.0))
    assert first.continues == pytest.approx(1.0)


def test_other_methods_have_none() -> None:
    assert rung_estimates(config({"name": "random", "max_length": {"epochs": 9}}), journal(0.9)) == []
