"""Marks and time limits that hold for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# A deadline on each example measures the machine; the limit on the whole test stays.
settings.register_profile("dray", deadline=None)
settings.load_profile("dray")

# Models in tests are tiny: one thread trains them faster than several that fight for a small machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

RAY_TEST_LIMIT_S = 300.0  # starting Ray on a loaded two-core machine alone can take 20 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None and (
            item.get_closest_marker("ray") or item.get_closest_marker("cluster")
        ):
            item.add_marker(pytest.mark.timeout(RAY_TEST_LIMIT_S))
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(not _has_gpu(), reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
