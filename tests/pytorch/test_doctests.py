"""The examples in the docstrings of the training floors are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "dray.core.cluster_info",
        "dray.core.distributed",
        "dray.pytorch.data",
        "dray.pytorch.samplers",
        "dray.training.reducers",
        "dray.training.units",
    ],
)
def test_examples_in_docstrings(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0
