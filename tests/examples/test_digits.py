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
from dray.experiment.local import run_local

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture
def model_def() -> Iterator[ModuleType]:
    with import_from_path(DIGITS):
        yield importlib.import_module("model_def")


def test_split_is_fixed_stratified_and_disjoint(model_def: ModuleType) -> None:
    training, held_out = model_def.datasets()
    assert (len(training), len(held_out)) == (1437, 360)  # six batches of 60: their mean is the mean of records
    assert model_def.datasets() is model_def.datasets(), "read once in a process"
    assert held_out.tensors[1].bincount().min() >= 34  # of 36 or so: each digit in equal share
    rows = [{tuple(row) for row in part.tensors[0].tolist()} for part in (training, held_out)]
    assert not rows[0] & rows[1]


def test_driver_runs_the_search_of_the_yaml() -> None:
    with import_from_path(DIGITS):
        driver = importlib.import_module("driver")
        from_python = load_config({**driver.CONFIG, "entrypoint": "model_def:DigitsTrial"})
    assert from_python == load_config(DIGITS / "asha.yaml")


@pytest.mark.slow
def test_it_reaches_96_percent_in_16_epochs(tmp_path: Path) -> None:
    before = list(sys.path)
    directory = run_local(load_config(DIGITS / "const.yaml"), DIGITS, path=tmp_path / "run")
    sys.path[:] = before
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    validations = [row["validation"] for row in rows if "validation" in row]
    assert len(validations) == 16
    assert validations[-1]["accuracy"] > 0.96
