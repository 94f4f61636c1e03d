"""A sweep of many checkpoints, most of which are gone while it still runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

import dray
from dray.desk.messages import CheckpointSaved, Message
from dray.experiment.retention import Policy, Saved, checkpoints_needed, saved_in
from dray.storage import CheckpointStore, verify
from tests.experiment.test_retention import kept_by
from tests.ray.harness import TRIALS, journal, promotion, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT = int(os.environ.get("DRAY_RETENTION_TRIALS", "40"))
"""200 in the benchmark: `DRAY_RETENTION_TRIALS=200 pytest -s tests/ray/test_retention.py`."""
BATCHES, POLICY = 40, Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was there when the driver heard of a checkpoint.

    Attributes:
        there: on the disk.
        implied: by the policy and by what trials need that have not ended, of all that was told.
    """

    there: int
    implied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    result: dray.Result
    told: list[Saved]
    looks: list[Look]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    directory = tmp_path_factory.mktemp("retention")
    path = directory / "experiment"
    searcher = promotion(TRIAL_COUNT, BATCHES)
    config = recorded(directory / "record", trials=TRIAL_COUNT, batches=BATCHES, searcher=searcher)
    # A checkpoint at each of a trial's validations, of which there are twice as many as rungs.
    experiment = dray.Experiment({**config, "min_validation_period": {"batches": 5}}, model_dir=TRIALS, path=path)
    told: list[Saved] = []
    looks: list[Look] = []

    def look(message: Message) -> None:
        if isinstance(message, CheckpointSaved):
            saved = Saved(
                trial=message.trial, batches=message.batches, checkpoint=message.checkpoint, value=message.value
            )
            told.append(saved)
            trials = experiment.last_run.driver.search.trials
            kept = kept_by(POLICY, told, {trial.id: checkpoints_needed(trial) for trial in trials.values()})
            looks.append(Look(there=len(list(path.glob("trial_*/checkpoint_*"))), implied=len(kept)))

    result = experiment.run(on_message=look)
    return Sweep(result=result, told=told, looks=looks)


def test_most_of_what_the_policy_does_not_keep_is_gone_while_the_sweep_still_runs(sweep: Sweep) -> None:
    # How many wait to be removed depends on how quickly the driver gets to it, beside trials of milliseconds.
    over = max(look.there - look.implied for look in sweep.looks)
    print(
        f"{len(sweep.told)} checkpoints saved, {sweep.looks[-1].implied} implied at the end, at most "
        f"{max(look.there for look in sweep.looks)} there at once, at most {over} more than implied"
    )
    assert over < (len(sweep.told) - sweep.looks[-1].implied) / 2


def test_in_the_end_there_is_what_the_policy_keeps(sweep: Sweep) -> None:
    kept = kept_by(POLICY, sweep.told)
    assert len(kept) < len(sweep.told) / 2
    there = {str(path) for path in sweep.result.path.glob("trial_*/checkpoint_*")}
    assert there == {each.checkpoint for each in kept}
    for checkpoint in there:
        verify(Path(checkpoint))


def test_the_journal_tells_of_each(sweep: Sweep) -> None:
    records = journal(sweep.result.path)
    assert {each.checkpoint for each in saved_in(records)} == {each.checkpoint for each in kept_by(POLICY, sweep.told)}
    assert sum(record["event"] == "saved" for record in records) == len({each.checkpoint for each in sweep.told})


def test_a_trials_best_and_latest_are_among_them(sweep: Sweep) -> None:
    errors = sweep.result.metrics.query("kind == 'validation' and name == 'error'")
    for trial, mine in errors.groupby("trial_id"):
        found = {batches for batches, _ in CheckpointStore(sweep.result.path / f"trial_{trial}").listed()}
        assert found == {mine["batches"].max(), mine.loc[mine["value"].idxmin(), "batches"]}
    assert sweep.result.best_trial.checkpoint.path.endswith(f"checkpoint_{sweep.result.best_trial.batches}")
