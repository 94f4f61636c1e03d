"""A sweep in which a Tune handle is killed, and then a worker in the middle of a trial."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

import dray
from dray.desk.messages import GroupEnded, GroupReady, Message
from tests.ray.harness import (
    TRIALS,
    Attempt,
    Meanwhile,
    attempts,
    ends,
    journal,
    killed_in_the_middle,
    recorded,
    wait_for,
)

M = TypeVar("M")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT, BATCHES = 4, 40


@dataclass(slots=True, kw_only=True)
class Sweep:
    record: Path
    result: dray.Result
    experiment: dray.Experiment
    killed: Attempt
    ended_before: int  # how many trials had ended when the handle was killed
    messages: list[Message] = field(default_factory=list)

    def heard(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    directory = tmp_path_factory.mktemp("faults")
    record, path = directory / "record", directory / "experiment"
    one = {"slot": "cpu", "max_slots": 1}  # or else another group may train all that is left before a new one is ready
    config = recorded(record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.05, resources=one)
    experiment = dray.Experiment(config, model_dir=TRIALS, path=path)
    messages: list[Message] = []
    done: dict[str, object] = {}

    def faults() -> None:
        wait_for(lambda: any(a.batches for mine in attempts(record).values() for a in mine), "the first batch")
        handle = wait_for(lambda: experiment.last_run.driver.handle, "Tune's handle")  # may come after the first batch
        os.kill(handle, signal.SIGKILL)
        done.update(ended_before=len(ends(path)))
        wait_for(lambda: ends(path), "the first trial's end")
        done.update(killed=wait_for(lambda: killed_in_the_middle(path, record), "a trial past its first checkpoint"))

    with Meanwhile(faults):
        result = experiment.run(on_message=messages.append)
    return Sweep(record=record, result=result, experiment=experiment, messages=messages, **done)  # type: ignore[arg-type]


def test_every_trial_ends_once_and_completed(sweep: Sweep) -> None:
    assert sweep.result.trials["state"].tolist() == ["COMPLETED"] * TRIAL_COUNT
    assert sweep.result.trials["batches"].tolist() == [BATCHES] * TRIAL_COUNT
    assert ends(sweep.result.path) == dict.fromkeys(range(TRIAL_COUNT), 1)


def test_trial_of_a_killed_worker_goes_on_from_its_latest_checkpoint(sweep: Sweep) -> None:
    killed, after = attempts(sweep.record)[sweep.killed.trial]
    assert killed == sweep.killed
    last_checkpoint = (killed.batches[-1] + 1) // 10 * 10
    assert last_checkpoint > 0
    assert after.pid != killed.pid
    assert after.batches == tuple(range(last_checkpoint, BATCHES))


def test_other_trials_are_trained_once_from_start_to_end(sweep: Sweep) -> None:
    for trial, mine in attempts(sweep.record).items():
        if trial != sweep.killed.trial:
            assert [attempt.batches for attempt in mine] == [tuple(range(BATCHES))]


def test_restart_is_counted_for_its_trial_alone(sweep: Sweep) -> None:
    expected = [int(trial == sweep.killed.trial) for trial in range(TRIAL_COUNT)]
    assert sweep.result.trials["restarts"].tolist() == expected
    [restart] = [record for record in journal(sweep.result.path) if record["event"] == "restarted"]
    assert restart["error"].startswith("a process of worker group group-")


def test_only_the_killed_group_was_lost(sweep: Sweep) -> None:
    assert [message.is_lost for message in sweep.heard(GroupEnded)].count(True) == 1
    groups = {message.group for message in sweep.heard(GroupReady)}
    assert len(sweep.heard(GroupReady)) == len(groups) + 1


def test_search_goes_on_with_a_new_handle_after_the_first_is_killed(sweep: Sweep) -> None:
    assert sweep.ended_before < TRIAL_COUNT
    assert sweep.experiment.last_run.driver.counts.handles_started == 2


def test_metrics_have_each_validation_once(sweep: Sweep) -> None:
    errors = sweep.result.metrics.query("kind == 'validation' and name == 'error'")
    for _, mine in errors.groupby("trial_id"):
        assert mine["batches"].tolist() == list(range(10, BATCHES + 1, 10))
