"""Ctrl-C and other signals: running trials save what they have, the command says how to go on, and going on ends the
search."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import dray
from tests.ray.harness import (
    OWN_CLUSTER,
    TRIALS,
    Attempt,
    Driver,
    Meanwhile,
    attempts,
    ends,
    journal,
    lines,
    recorded,
    run_here,
    saved_batches,
    wait_for,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT, BATCHES, HELD_AT = 3, 60, 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    record: Path
    code: int
    output: str
    stopped: dict[int, Attempt]  # the trials that were running, each with what it had trained by its end
    saved: dict[int, int]
    result: dray.Result


@pytest.fixture(scope="module")
def story(drive: Callable[..., Driver], tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("interrupt")
    record, path = directory / "record", directory / "experiment"
    config = recorded(record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.05, entrypoint="recorded:FirstAhead")
    config["hyperparameters"] |= {"held_at": HELD_AT, "until": str(directory / "until")}

    def running() -> dict[int, Attempt]:
        ended = ends(path)  # before the attempts are read: a trial may end meanwhile
        return {trial: mine[-1] for trial, mine in attempts(record).items() if trial not in ended}

    def all_held(trials: dict[int, Attempt]) -> bool:
        return bool(trials) and {len(attempt.batches) for attempt in trials.values()} == {HELD_AT}

    driver = drive("create", write_config(directory, config), TRIALS, "--path", path)
    driver.wait_for(lambda: ends(path), "the first trial's end")
    driver.wait_for(lambda: all_held(running()), "the middle of those that run now")
    for _ in range(2):  # as `timeout` does
        driver.signal_group(signal.SIGTERM)
    driver.wait_for(lambda: "running trials save a checkpoint" in driver.log.read_text(), "a word on it")
    (directory / "until").touch()
    code, output = driver.wait(), driver.log.read_text()
    stopped = running()
    saved = {trial: saved_batches(path, trial) for trial in stopped}
    result = dray.Experiment.resume(path).run()
    return Story(record=record, code=code, output=output, stopped=stopped, saved=saved, result=result)


@pytest.mark.api("8.16")
def test_running_trials_save_and_the_command_says_how_to_go_on(story: Story) -> None:
    assert story.code == 128 + signal.SIGTERM
    assert "dray: stopped by SIGTERM\n" in story.output
    assert f"resume with: dray experiment resume {story.result.path}\n" in story.output
    assert "Traceback" not in story.output
    assert story.stopped
    assert story.saved == {trial: attempt.batches[-1] + 1 for trial, attempt in story.stopped.items()}
    assert all(0 < batches < BATCHES for batches in story.saved.values())


def test_going_on_ends_every_trial_once_and_trains_no_batch_twice(story: Story) -> None:
    for mine in attempts(story.record).values():
        assert [batch for attempt in mine for batch in attempt.batches] == list(range(BATCHES))
    assert story.result.trials["state"].tolist() == ["COMPLETED"] * TRIAL_COUNT
    assert ends(story.result.path) == dict.fromkeys(range(TRIAL_COUNT), 1)
    assert not [record for record in journal(story.result.path) if record["event"] == "restarted"]


@pytest.mark.long
def test_trials_save_when_the_terminal_is_closed(drive: Callable[..., Driver], tmp_path: Path) -> None:
    record, path = tmp_path / "record", tmp_path / "experiment"
    config = recorded(record, trials=1, batches=1000, pause_s=0.2, min_validation_period=None)
    terminal, inner = os.openpty()
    driver = drive("create", write_config(tmp_path, config), TRIALS, "--path", path, terminal=inner, **OWN_CLUSTER)
    os.close(inner)
    os.set_blocking(terminal, False)

    def trains() -> bool:
        with contextlib.suppress(OSError):
            os.read(terminal, 1 << 16)  # a terminal that nobody reads holds up who writes
        return len(lines(record)) > 5

    driver.wait_for(trains, "batches")
    os.close(terminal)
    assert driver.wait() == 128 + signal.SIGHUP
    [attempt] = attempts(record)[0]
    assert saved_batches(path, 0) == len(attempt.batches) < 1000


@pytest.mark.long
def test_an_experiment_that_is_deleted_ends_with_one_line(tmp_path: Path) -> None:
    record, path = tmp_path / "record", tmp_path / "experiment"
    config = recorded(record, trials=1, batches=1000, pause_s=0.2)

    def delete() -> None:
        wait_for(lambda: len(lines(record)) > 12, "a validation")
        path.rename(tmp_path / "elsewhere")  # all of it at once

    with Meanwhile(delete):
        said = run_here("create", write_config(tmp_path, config), TRIALS, "--path", path)
    assert said.code == 1
    assert said.out == ""
    before, last = said.err.rstrip("\n").rsplit("\n", 1)
    assert last == f"dray: the experiment's directory {path} was deleted or moved while it ran, so it was ended"
    usual = {"recorded:", "experiment", "searching", "on", "sending", "recorded"}
    assert {line.split()[0] for line in before.splitlines()} <= usual, "nothing else went wrong"
