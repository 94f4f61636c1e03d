"""Marks and time limits that hold for every test."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.ray.shared import SharedCluster

collect_ignore = [] if importlib.util.find_spec("mcp") else ["agents"]  # the oldest versions are tested without it

# A deadline on each example measures the machine; the limit on the whole test stays.
settings.register_profile("dray", deadline=None, max_examples=50)
settings.load_profile("dray")

# Models in tests are tiny: one thread trains them faster than several that fight for a small machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script that starts pytest in the background has it ignore Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

NUMBERS = itertools.count()
SLOW_TEST_LIMIT_S = 600.0  # two processes that train, or starting Ray, take minutes on a loaded two-core machine


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of those that the Makefile chooses, the fast or the slow ones, are not even imported."""
    fast = config.option.markexpr.startswith("not slow")
    if not fast and not config.option.markexpr.startswith("(slow"):
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    has_none = all((_all_slow if fast else _no_slow)(file) for file in files if file.suffix == ".py")
    return has_none or None


@functools.cache
def _all_slow(file: Path) -> bool:
    return re.search(r"(?m)^pytestmark = [^=]*?\bmark\.(slow|ray|gpu|cluster)\b", file.read_text()) is not None


@functools.cache
def _no_slow(file: Path) -> bool:
    return re.search(r"\bmark\.(slow|ray|gpu|cluster)\b", file.read_text()) is None


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    # Torch, Ray and pandas are a million objects, which each collection of garbage would visit: each trial makes some.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # collecting as often as usual takes a twelfth of the time of all fast tests
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        slow = any(item.get_closest_marker(name) for name in ("slow", "ray", "cluster"))
        if slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TEST_LIMIT_S))
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(not _has_gpu(), reason="needs a CUDA device"))
            item.add_marker(pytest.mark.filterwarnings("default"))  # torch warns of what differs from GPU to GPU


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory. pytest's own is named after its test, and reads the names of all others each time."""
    path = tmp_path_factory.getbasetemp() / str(next(NUMBERS))
    path.mkdir()
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default storage, of a run in a directory with little code: each checkpoint has a copy of it."""
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    return tmp_path / "results"


@pytest.fixture
def few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preview simulates 40 searches instead of 200: its ranges are wider, and it takes a fifth of the time."""
    monkeypatch.setattr("searchers.previews.MAX_RUNS", 40)


@pytest.fixture(scope="session")
def clusters() -> Iterator[SharedCluster]:
    """See `tests.ray.shared`."""
    from tests.ray.shared import SharedCluster

    clusters = SharedCluster()
    yield clusters
    clusters.shutdown()


@pytest.fixture(scope="module")
def shared_cluster(clusters: SharedCluster) -> str:
    """The address of a Ray cluster with two CPUs, both of them free, for all tests that need no particular one."""
    return clusters.when_free()


@pytest.fixture
def set_info() -> Iterator[Callable[[Any], Any]]:
    """Sets what `get_cluster_info()` returns; None, as in a local run, until it is called."""
    from dray.training.cluster_info import use_cluster_info

    with use_cluster_info(None), contextlib.ExitStack() as stack:
        yield lambda info: stack.enter_context(use_cluster_info(info))
