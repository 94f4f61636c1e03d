"""kill -9 of the driver during start-up, and twice in the middle, each time followed by `resume`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import dray
from tests.ray.harness import (
    TRIALS,
    Attempt,
    Driver,
    attempts,
    ends,
    in_the_middle,
    journal,
    recorded,
    saved_batches,
    write_config,
)

# The fault matrix kills a driver, too, at a single trial.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

TRIAL_COUNT, BATCHES = 6, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A trial that ran when the driver was killed, with its latest checkpoint after that."""

    attempt: Attempt
    number: int
    checkpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    record: Path
    result: dray.Result
    interrupted: list[Interrupted]
    left_behind: list[list[str]]


@pytest.fixture(scope="module")
def story(drive: Callable[..., Driver], tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("death")
    record, path = directory / "record", directory / "experiment"
    config = write_config(directory, recorded(record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.1))
    left_behind: list[list[str]] = []
    interrupted: list[Interrupted] = []

    driver = drive("create", config, TRIALS, "--path", path)
    driver.wait_for(lambda: journal(path), "the search has started")
    time.sleep(2)  # Ray is starting
    left_behind.append(driver.kill())
    assert not attempts(record)

    for ended in (0, 2):
        driver = drive("resume", path)
        driver.wait_for(
            lambda ended=ended: len(ends(path)) >= ended and in_the_middle(path, record), "a trial is past a checkpoint"
        )
        left_behind.append(driver.kill())
        live = {trial: mine for trial, mine in attempts(record).items() if trial not in ends(path)}
        interrupted += [
            Interrupted(attempt=mine[-1], number=len(mine), checkpoint=saved_batches(path, trial))
            for trial, mine in live.items()
            if mine[-1].batches
        ]
    driver = drive("resume", path)
    assert driver.wait() == 0, driver.log.read_text()
    return Story(record=record, result=dray.Result(path), interrupted=interrupted, left_behind=left_behind)


def test_all_trials_are_accounted_for_and_each_ended_once(story: Story) -> None:
    assert story.result.trials["state"].tolist() == ["COMPLETED"] * TRIAL_COUNT
    assert ends(story.result.path) == dict.fromkeys(range(TRIAL_COUNT), 1)


def test_no_trial_is_trained_to_the_end_twice(story: Story) -> None:
    for trial, mine in attempts(story.record).items():
        # Killed between its last batch and the checkpoint after it, a trial trains that batch again.
        unsaved = [cut for cut in story.interrupted if cut.attempt.trial == trial and cut.checkpoint < BATCHES]
        again = sum(cut.attempt.batches[-1] == BATCHES - 1 for cut in unsaved)
        assert sum(attempt.batches[-1:] == (BATCHES - 1,) for attempt in mine) == 1 + again


def test_interrupted_trials_go_on_from_their_latest_checkpoint(story: Story) -> None:
    assert any(cut.checkpoint > 0 for cut in story.interrupted)
    for cut in story.interrupted:
        mine = attempts(story.record)[cut.attempt.trial]
        after = [attempt.batches[0] for attempt in mine[cut.number :] if attempt.batches]
        # Killed between its last checkpoint and the journal's word of it, a trial has nothing left to train.
        assert after[:1] == ([cut.checkpoint] if cut.checkpoint < BATCHES else [])
        assert cut.checkpoint >= cut.attempt.batches[-1] // 10 * 10, "no more is lost than what came after it"


def test_other_trials_are_not_trained_again(story: Story) -> None:
    cut = {interrupted.attempt.trial for interrupted in story.interrupted}
    assert len(cut) < TRIAL_COUNT
    for trial, mine in attempts(story.record).items():
        if trial not in cut:
            assert [attempt.batches for attempt in mine] == [tuple(range(BATCHES))]


def test_a_drivers_death_is_no_restart_of_its_trials(story: Story) -> None:
    assert story.result.trials["restarts"].eq(0).all()


def test_journal_has_every_opening(story: Story) -> None:
    assert sum(record["event"] == "opened" for record in journal(story.result.path)) == 4


def test_each_metric_is_there_once(story: Story) -> None:
    errors = story.result.metrics.query("kind == 'validation' and name == 'error'")
    for _, mine in errors.groupby("trial_id"):
        assert mine["batches"].tolist() == list(range(10, BATCHES + 1, 10))


def test_a_killed_driver_leaves_no_process_behind(story: Story) -> None:
    assert story.left_behind == [[], [], []]
