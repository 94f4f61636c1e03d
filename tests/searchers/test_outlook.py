"""What the model says of searches whose best hyperparameters are known."""

from __future__ import annotations

import math
from dataclasses import replace

from searchers import parse_space
from searchers.outlook import outlook
from tests.searchers.test_like import SPACE, earlier, near

SEVERAL = {**SPACE, "optimizer": {"type": "categorical", "vals": ["adam", "sgd"]}}


def test_the_best_points_and_ranges_are_around_the_optimum() -> None:
    space = parse_space(SEVERAL)
    found = outlook(space, earlier(lambda each: near(-2)(each) + (each["optimizer"] == "sgd"), SEVERAL))
    assert found["results"] == 3 * 48
    best = found["best"][0]
    assert abs(math.log10(best["hparams"]["lr"]) + 2) < 0.4
    assert best["hparams"]["optimizer"] == "adam"
    assert best["expected"] < 0.1 < 0.5 < max(part["expected"] for part in found["hparams"]["lr"])
    parts = found["hparams"]["lr"]
    assert [round(math.log10(part["low"])) for part in parts] == [-5, -4, -3, -2, -1]
    assert min(parts, key=lambda part: part["expected"]) in parts[2:4]
    adam, sgd = found["hparams"]["optimizer"]
    assert (adam["value"], sgd["value"]) == ("adam", "sgd")
    assert adam["expected"] < sgd["expected"]


def test_points_where_nothing_was_tried_are_uncertain() -> None:
    whole = earlier(near(-2), trials=80)
    seen = {trial: each for trial, each in whole.hparams.items() if each["lr"] < 1e-3}
    found = outlook(parse_space(SPACE), replace(whole, hparams=seen))
    assert found["uncertain"]
    assert all(each["hparams"]["lr"] > 1e-2 for each in found["uncertain"])
    assert all(each["expected"] - 2 * each["deviation"] < 0 for each in found["uncertain"])


def test_a_constraint_that_allows_no_point_leaves_the_ranges() -> None:
    whole = earlier(near(-2))
    found = outlook(replace(parse_space(SPACE), constraint=lambda point: False), whole)
    assert (found["best"], found["uncertain"], found["results"]) == ([], [], 3 * 48)
    assert found["hparams"] == outlook(parse_space(SPACE), whole)["hparams"]


def test_few_results_are_no_model() -> None:
    found = outlook(parse_space(SPACE), earlier(near(-2), trials=2))
    assert found == {"results": 6, "best": [], "uncertain": [], "hparams": {}}
    assert outlook(parse_space({"epochs": 3}), earlier(lambda each: 1.0, {"epochs": 3}))["best"] == []
