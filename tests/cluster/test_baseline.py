"""Between two trials a process is put back into the state that it was in."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.cluster.baseline import Baseline

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "environment": (lambda: dict(os.environ), lambda tmp: os.environ.update(MY_NEW="1", PATH="/mine")),
    "working directory": (os.getcwd, os.chdir),
    "sys.path": (lambda: list(sys.path), lambda tmp: sys.path.insert(0, "src")),
    "sys.argv": (lambda: list(sys.argv), lambda tmp: sys.argv.append("--mine")),
    "excepthook": (lambda: sys.excepthook, lambda tmp: setattr(sys, "excepthook", print)),
    "excepthook of threads": (lambda: threading.excepthook, lambda tmp: setattr(threading, "excepthook", print)),
    "warnings": (lambda: list(warnings.filters), lambda tmp: warnings.simplefilter("error")),
    "logging": (lambda: list(logging.getLogger().handlers), lambda tmp: logging.basicConfig(force=True)),
    "start method": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda tmp: multiprocessing.set_start_method("spawn"),
    ),
    "recursion": (sys.getrecursionlimit, lambda tmp: sys.setrecursionlimit(12_345)),
    "dtype": (torch.get_default_dtype, lambda tmp: torch.set_default_dtype(torch.float64)),
    "device": (lambda: torch.ones(1).device, lambda tmp: torch.set_default_device("meta")),
    "threads": (torch.get_num_threads, lambda tmp: torch.set_num_threads(torch.get_num_threads() + 1)),
    "determinism": (torch.are_deterministic_algorithms_enabled, lambda tmp: torch.use_deterministic_algorithms(True)),
    "precision": (torch.get_float32_matmul_precision, lambda tmp: torch.set_float32_matmul_precision("medium")),
    "benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda tmp: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    ),
    "gradients": (torch.is_grad_enabled, lambda tmp: torch.set_grad_enabled(False)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_trial_changes_is_undone(what: str, tmp_path: Path) -> None:
    look, change = CHANGES[what]
    if what == "start method" and look() is not None:
        multiprocessing.set_start_method(None, force=True)
    before = look()
    with Baseline().kept():
        change(tmp_path)
        assert look() != before
    assert look() == before


def test_trials_of_ever_other_shapes_are_all_compiled() -> None:
    calls = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal calls
        calls += 1
        return graph.forward

    def square(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * len(name)

    baseline = Baseline()
    # More than torch keeps of one function (8): without a reset the last ones would not reach the backend.
    for number in range(12):
        with baseline.kept():
            torch.compile(square, backend=backend)(torch.ones(2), "x" * number)
    assert calls == 12
