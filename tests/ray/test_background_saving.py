"""A worker is killed when it has reported what a checkpoint belongs to, and before the checkpoint is committed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.records.metrics import read_metrics
from dray.storage import CheckpointStore
from tests.ray.harness import TRIALS, Meanwhile, ends, journal, lines, recorded, saved_batches, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

BATCHES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    record: Path
    result: dray.Result
    saved: int
    """Where the latest checkpoint was when the worker was killed."""
    staged: list[str]
    """What was in the directory of the one that was being committed."""
    reported: list[int]
    """What the driver had recorded validations of."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("background")
    record, path = directory / "record", directory / "experiment"
    config = recorded(record, trials=1, batches=BATCHES, entrypoint="recorded:Large")
    found: dict[str, Any] = {}

    def validations() -> list[int]:
        return read_metrics(path / "metrics").query("kind == 'validation' and name == 'error'")["batches"].tolist()

    def fault() -> None:
        held = wait_for(lambda: [line for line in lines(record) if "held" in line], "a commit")[0]
        wait_for(lambda: 20 in validations(), "the report")
        # It has gone on meanwhile, as far as the next checkpoint.
        wait_for(lambda: [line for line in lines(record) if line.get("batch") == 29], "further batches")
        found.update(saved=saved_batches(path, 0), staged=sorted(os.listdir(held["held"])), reported=validations())
        os.kill(held["pid"], signal.SIGKILL)

    with Meanwhile(fault):
        result = dray.Experiment(config, model_dir=TRIALS, path=path).run()
    return Story(record=record, result=result, **found)


def trained(story: Story) -> list[list[tuple[int, float]]]:
    """(batch, loss) of each attempt."""
    found: list[list[tuple[int, float]]] = []
    for line in lines(story.record):
        if "made" in line:
            found.append([])
        elif "batch" in line:
            found[-1].append((line["batch"], line["loss"]))
    return found


def test_it_is_killed_between_report_and_commit(story: Story) -> None:
    assert story.reported == [10, 20]
    assert "state-dict.pth" in story.staged
    assert story.saved == 10


def test_the_trial_goes_on_from_the_checkpoint_before_as_it_was(story: Story) -> None:
    first, second = trained(story)
    assert [batch for batch, _ in first] == list(range(30))
    assert [batch for batch, _ in second] == list(range(10, BATCHES))
    assert second[:20] == first[10:], "the same losses, to the last bit"


def test_it_ends_once_and_each_metric_is_there_once(story: Story) -> None:
    assert story.result.trials["state"].tolist() == ["COMPLETED"]
    assert story.result.trials["restarts"].tolist() == [1]
    assert ends(story.result.path) == {0: 1}
    rows = story.result.metrics
    assert not rows.duplicated(["trial_id", "batches", "kind", "name"]).any()
    errors = rows.query("kind == 'validation' and name == 'error'")
    assert errors["batches"].tolist() == [10, 20, 30, 40]


def test_the_search_hears_of_the_end_alone(story: Story) -> None:
    """A step that is reported twice is none of its affairs, where it decides nothing there."""
    assert [record["step"] for record in journal(story.result.path) if record["event"] == "reported"] == [BATCHES]


def test_nothing_is_left_of_what_was_being_written(story: Story) -> None:
    directory = story.result.path / "trial_0"
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
    assert CheckpointStore(directory).latest() == str(directory / f"checkpoint_{BATCHES}")
