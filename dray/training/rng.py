"""Seeding, capturing and restoring the RNGs of a process, as plain data."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch (CPU) for a block, and restore their states after it."""
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
    """For `restore`: results of `random.getstate()`, `numpy.random.get_state()` and `torch.get_rng_state()`."""
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
    """Restore what `capture` returned. The CUDA state is restored only if `device` is one, and it was captured."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["name"], numpy["keys"].numpy().astype(np.uint32), numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
