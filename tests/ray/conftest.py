"""Fixtures for tests on a real Ray: drivers that end with the test, and a driver's process as it was before."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray import cloudpickle

from dray import imports
from tests.ray.harness import DIGITS, TRIALS, Driver


@pytest.fixture(scope="module", autouse=True)
def imports_kept() -> Iterator[None]:
    """Experiments in this process import model code; other tests should not find it."""
    path = list(sys.path)
    yield
    imports.forget_model_dir()
    imports._current, imports._older = None, frozenset()
    sys.path[:] = path


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A thread that still waits for Ray when the connection is closed ends the process by a segmentation fault."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("dray-")]
    assert not left, f"an experiment in this process has ended, and left {left}"


@pytest.fixture(autouse=True)
def no_setting_left() -> Iterator[None]:
    """Variables of Tune and Train, and modules that are pickled by value, would change what else the process does."""
    yield
    assert _settings() - SETTINGS == set(), "an experiment in this process has ended, and left these"


def _settings() -> set[str]:
    variables = {name for name in os.environ if name.startswith(("TUNE_", "RAY_TRAIN_", "RAY_AIR_"))}
    return variables | set(cloudpickle.list_registry_pickle_by_value())


SETTINGS = _settings()


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Driver]]:
    """Start a driver: ``drive("create", config, ...)``."""
    drivers: list[Driver] = []
    log = tmp_path_factory.mktemp("drivers") / "output.txt"

    def start(*arguments: object, **environment: str) -> Driver:
        drivers.append(Driver(*arguments, log=log, **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model code: the example's, and a trial of it that notes what it does."""
    directory = tmp_path_factory.mktemp("digits") / "model"
    directory.mkdir()
    for file in (DIGITS / "model_def.py", TRIALS / "recorded.py", TRIALS / "recorded_digits.py"):
        shutil.copy(file, directory)
    return directory
