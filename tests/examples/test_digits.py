"""The digits example: its data, its search from Python, and that it learns."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dray import import_from_path
from dray.config.load import load_config

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture
def model_def() -> Iterator[ModuleType]:
    with import_from_path(DIGITS):
        yield importlib.import_module("model_def")


def test_split_is_fixed_stratified_and_disjoint(model_def: ModuleType) -> None:
    training, held_out = model_def.datasets()
    assert (len(training), len(held_out)) == (1437, 360)
    assert held_out.tensors[1].bincount().min() >= 34  # of 36 or so: each digit in equal share
    rows = [{tuple(row) for row in part.tensors[0].tolist()} for part in (training, held_out)]
    assert not rows[0] & rows[1]


def test_data_are_read_once_in_a_process(model_def: ModuleType) -> None:
    assert model_def.datasets() is model_def.datasets()


def test_held_out_batches_are_equal_so_that_their_mean_is_the_mean_of_records(model_def: ModuleType) -> None:
    assert len(model_def.datasets()[1]) % 60 == 0


def test_driver_runs_the_search_of_the_yaml() -> None:
    with import_from_path(DIGITS):
        driver = importlib.import_module("driver")
        from_python = load_config({**driver.CONFIG, "entrypoint": "model_def:DigitsTrial"})
    assert from_python == load_config(DIGITS / "asha.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-2, *(pytest.param(lr, marks=pytest.mark.long) for lr in (8e-3, 2e-2))])
def test_good_learning_rate_reaches_96_percent_in_16_epochs(lr: float, tmp_path: Path) -> None:
    from dray.experiment.local import run_local

    config = load_config(DIGITS / "const.yaml")
    config = load_config({**config.to_dict(), "hyperparameters": {**config.hyperparameters, "lr": lr}})
    before = list(sys.path)
    directory = run_local(config, DIGITS, path=tmp_path / "run")
    sys.path[:] = before
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    validations = [row["validation"] for row in rows if "validation" in row]
    assert len(validations) == 16
    assert validations[-1]["accuracy"] > 0.96
