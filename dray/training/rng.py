"""RNGs and deterministic algorithms, which make two runs of a trial the same."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch (CPU) within the block, and restore their states at its end."""
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def capture(device: torch.device) -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's RNGs (and that of a CUDA `device`) as tensors and numbers."""
    state = packed(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state())
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def packed(python: Any, numpy: Any, cpu: torch.Tensor) -> dict[str, Any]:
    """Convert results of `random.getstate()`, `numpy.random.get_state()` and `torch.get_rng_state()` for `restore`."""
    version, words, gauss = python
    name, keys, position, has_gauss, cached = numpy
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": cpu,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state from `capture`; its CUDA state, if any, only if `device` is a GPU."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["name"], numpy["keys"].numpy().astype(np.uint32), numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


#: Environment variables that CUDA's libraries read at their first use. A variable that is already set keeps its value.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, older versions of torch refuse to multiply matrices
    "NCCL_NVLS_ENABLE": "0",  # reductions in NVSwitches may add in another order in each call
}


@contextlib.contextmanager
def deterministic(enable: bool) -> Iterator[None]:
    """If `enable`, torch uses deterministic algorithms within the block; an operation without one raises an error."""
    if not enable:
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
