"""Deterministic algorithms, as `reproducibility.deterministic` asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

VARIABLES = {
    # Without it, older versions of torch refuse to multiply matrices.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Reductions in NVSwitches may add in another order in each call.
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables, which CUDA's libraries read when they are first used. Those already set stay as they are."""


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the block, if `wanted`, torch uses deterministic algorithms; an operation without one raises an error."""
    if not wanted:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    added = {name: value for name, value in VARIABLES.items() if name not in os.environ}
    os.environ.update(added)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        for name in added:
            os.environ.pop(name, None)
