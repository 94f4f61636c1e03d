"""The one worker group's Ray Train controller is killed: its resources must come free for the successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

import dray
from tests.ray.harness import TRIALS, Meanwhile, attempts, descendants, in_the_middle, recorded, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BATCHES = 60


@pytest.mark.long  # the fault matrix has it, too
def test_trial_goes_on_after_its_groups_controller_died(tmp_path: Path) -> None:
    record, path = tmp_path / "record", tmp_path / "experiment"
    cpus = os.cpu_count() or 1  # all of them: there is no room for a second group
    config = recorded(record, trials=1, batches=BATCHES, pause_s=0.05, resources={"slot": "cpu", "cpus_per_slot": cpus})
    experiment = dray.Experiment(config, model_dir=TRIALS, path=path)

    def fault() -> None:
        wait_for(lambda: in_the_middle(path, record), "a trial past its first checkpoint")
        (controller,) = [pid for pid, name in descendants(os.getpid()).items() if name.startswith("ray::TrainContr")]
        os.kill(controller, signal.SIGKILL)

    with Meanwhile(fault):
        result = experiment.run()
    first, second = attempts(record)[0]
    assert result.trials["state"].tolist() == ["COMPLETED"]
    assert second.pid != first.pid
    assert second.batches == tuple(range((first.batches[-1] + 1) // 10 * 10, BATCHES))
    assert experiment.last_run.counts.restarts == {0: 1}


@pytest.mark.long
def test_trial_runs_after_a_controller_died_that_had_resources_and_no_workers_yet(tmp_path: Path) -> None:
    record = tmp_path / "record"
    config = recorded(
        record, trials=1, batches=BATCHES, resources={"slot": "cpu", "cpus_per_slot": os.cpu_count() or 1}
    )
    experiment = dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment")

    def fault() -> None:
        wait_for(lambda: ray.is_initialized() and placement_group_table(), "a placement group")
        (controller,) = [pid for pid, name in descendants(os.getpid()).items() if name.startswith("ray::TrainContr")]
        os.kill(controller, signal.SIGKILL)

    with Meanwhile(fault):
        result = experiment.run()
    assert result.trials["state"].tolist() == ["COMPLETED"]
    assert experiment.last_run.counts.restarts == {}
    assert [len(attempt.batches) for attempt in attempts(record)[0]] == [BATCHES], "it began once"
