"""Deterministic algorithms, for as long as they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.training.rng import VARIABLES, deterministic


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def state() -> tuple[Any, ...]:
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        variables,
    )


def put() -> None:
    """An operation that has no deterministic algorithm, on CPUs either."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_an_operation_without_a_deterministic_algorithm_is_an_error_within_the_block() -> None:
    with deterministic(True), pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        put()
    put()


def test_settings_hold_within_the_block_only() -> None:
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = state()
    with deterministic(True):
        assert state() == (True, False, False, VARIABLES)
        with deterministic(True):
            pass
        assert state() == (True, False, False, VARIABLES)
    assert state() == before
    with deterministic(False):
        assert state() == before


def test_variables_that_are_set_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_init_takes_it_from_the_config() -> None:
    before = state()
    with pytorch.init(exp_conf={"reproducibility": {"deterministic": True}}):
        assert state() == (True, False, False, VARIABLES)
    for config in (None, {}, {"reproducibility": None}, {"reproducibility": {"experiment_seed": 1}}):
        with pytorch.init(exp_conf=config):
            assert state() == before
    with (
        pytest.raises(
            ValueError, match=r"exp_conf\['reproducibility'\]\['deterministic'\] must be true or false, got 1"
        ),
        pytorch.init(exp_conf={"reproducibility": {"deterministic": 1}}),
    ):
        pass


@pytest.mark.gpu
def test_on_a_gpu_an_operation_without_a_deterministic_algorithm_is_an_error() -> None:
    indices, weights = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.ones(4, device="cuda")
    with deterministic(True):
        (torch.eye(4, device="cuda") @ weights.diag()).sum().item()
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.bincount(indices, weights)
    assert torch.bincount(indices, weights).tolist() == [4.0]
