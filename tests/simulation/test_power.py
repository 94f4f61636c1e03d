"""What has been acknowledged survives a power failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.experiment import requests
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.serve import manager
from dray.storage import CheckpointStore
from searchers.events import Requested
from tests.report.simulated import simulated
from tests.simulation.test_kernel import run_on


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of an experiment."""
    directory = tmp_path / "experiment"
    directory.mkdir()
    return directory


def after_power_failures(root: Path, acts: Callable[[], object], holds: Callable[[], bool]) -> list[int]:
    """The seeds of schedules after which this does not hold, in which the power fails once this was done."""
    failed = []
    for seed in range(20):
        run_on(root, seed, acts, power=True)
        if not holds():
            failed.append(seed)
    return failed


def test_a_request_survives(root: Path) -> None:
    found = RequestFiles(ExperimentDirectory(root))
    request = Requested(id="r", trial=1)
    assert not after_power_failures(root, lambda: requests.place(root, request), lambda: found.waiting() == [request])


def test_a_checkpoint_that_was_forced_to_the_disk_survives(root: Path) -> None:
    store = CheckpointStore(root / "trial_1")

    def save() -> None:
        staging = store.stage(7)
        (staging / "state").write_text("state")
        store.commit(staging, 7)
        store.force_to_disk(7)

    assert not after_power_failures(root, save, lambda: store.find(7) is not None)


def test_the_end_that_a_server_notes_survives(root: Path) -> None:
    directory, of = ExperimentDirectory(root), simulated(root / "of", 2)
    process: Any = SimpleNamespace(failure=None, exit_code=-9, how_ended="killed by signal 9")

    def end() -> None:
        directory.journal.write_bytes(of.journal.read_bytes())  # and it is killed before it syncs the file
        assert manager.end_of(process, root).kind == "COMPLETED"

    directory.config_file.write_bytes(of.config_file.read_bytes())
    directory.journal.touch()
    assert not after_power_failures(root, end, lambda: StoredExperiment.here(directory).overview().state == "COMPLETED")
