"""The examples in the docstrings of `searchers` run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import searchers

MODULES = sorted(
    path.stem
    for path in Path(searchers.__file__).parent.glob("*.py")
    if not path.stem.startswith(("ray_tune", "optuna_")) and path.stem != "tune"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = searchers if name == "__init__" else importlib.import_module(f"searchers.{name}")
    assert doctest.testmod(module).failed == 0


def test_there_are_examples() -> None:
    found = [importlib.import_module(f"searchers.{name}") for name in MODULES if name != "__init__"]
    assert sum(bool(test.examples) for module in found for test in doctest.DocTestFinder().find(module)) >= 15
