"""Fixtures for tests on a real Ray: a cluster that they share, drivers that end with the test, and a process as before.

Starting a cluster takes five seconds of CPU, and a driver's process five more. So an experiment runs in pytest's own
process, on the shared cluster, unless the test is about its process or its cluster. The shared cluster's workers are
forked, see `tests.forks.server`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray import cloudpickle

from tests.model_code import imports_undone
from tests.ray.harness import DIGITS, TRIALS, Driver
from tests.ray.watched import Watched
from tests.ray.watched import watched as run_watched

if TYPE_CHECKING:
    from tests.ray.shared import SharedCluster


@pytest.fixture(scope="module", autouse=True)
def imports_kept() -> Iterator[None]:
    """Experiments in this process import model code; other tests should not find it."""
    with imports_undone():
        yield


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A thread that still waits for Ray when the connection is closed ends the process by a segmentation fault."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("dray-"):
            thread.join(60)  # it may be about to end
            assert not thread.is_alive(), f"an experiment in this process has ended, and left {thread.name}"


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
def ray_is_up(shared_cluster: str) -> Iterator[None]:
    """The shared cluster: this process is connected to it, and drivers will be.

    When the connection is closed, Ray ends whatever the module's tests have left there. No other module may start a
    cluster by ``ray.init("local")``: back on this one, the process's actors would die at once (Ray 2.60). One that
    `ray.cluster_utils.Cluster` has started does no harm.
    """
    assert not ray.is_initialized(), "another test left its connection to Ray"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", shared_cluster)
        ray.init(shared_cluster, log_to_driver=False, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def drivers(log: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers, which end with the block."""
    started: list[Driver] = []

    def start(*arguments: object, **fields: Any) -> Driver:
        started.append(Driver(*arguments, log=log, **fields))
        return started[-1]

    try:
        yield start
    finally:
        for driver in started:
            driver.close()


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Driver]]:
    """Start a driver: ``drive("create", config, ...)``."""
    with drivers(tmp_path_factory.mktemp("drivers") / "output.txt") as start:
        yield start


@pytest.fixture(scope="session")
def watched(clusters: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """See `tests.ray.watched`."""
    pytest.importorskip("wandb")
    home = tmp_path_factory.mktemp("watched")
    with drivers(home.with_name("watched.txt")) as drive, run_watched(home, drive, clusters.when_free()) as found:
        yield found


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model code: the example's, and a trial of it that notes what it does."""
    directory = tmp_path_factory.mktemp("digits") / "model"
    directory.mkdir()
    for file in (DIGITS / "model_def.py", TRIALS / "recorded.py", TRIALS / "recorded_digits.py"):
        shutil.copy(file, directory)
    return directory
