"""Trials that are forked, added and stopped while a search runs, and after it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.experiment import requests
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
from dray.records.journal import GrowingJournal
from dray.records.reader import ExperimentReader
from searchers import Requested
from tests.ray.harness import (
    TRIALS,
    Meanwhile,
    attempts,
    ends,
    journal,
    latest_checkpoint,
    recorded,
    run_here,
    wait_for,
    weights,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

BATCHES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    record: Path
    path: Path
    answers: dict[str, Any]
    result: dray.Result


@pytest.fixture(scope="module")
def story(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("requests")
    record, path = directory / "record", directory / "experiment"
    answers: dict[str, Any] = {}

    def ask(name: str, request: Requested) -> None:
        requests.place(path, request)
        growing = GrowingJournal(path / "journal.jsonl")
        answers[name] = wait_for(lambda: requests.answer(growing, request), f"an answer to {name}")

    def steer() -> None:
        wait_for(lambda: len(batches(record, 0)) > 25, "a checkpoint at batch 20")
        reader = ExperimentReader(ExperimentDirectory.open(path))
        reader.refresh()
        source = requests.source_of(reader, 0, "20")
        reader.close()
        ask("fork", Requested(id=requests.new_id(), source=source))
        ask("changed", Requested(id=requests.new_id(), source=source, hparams={"lr": 0.0}))
        ask("add", Requested(id=requests.new_id(), hparams={"pause_s": 1.0}))
        ask("unknown", Requested(id=requests.new_id(), hparams={"lx": 1.0}))
        wait_for(lambda: len(batches(record, 3)) > 2, "the added trial")
        ask("stop", Requested(id=requests.new_id(), trial=3))

    config = recorded(record, trials=1, batches=BATCHES, pause_s=0.05)
    config["resources"]["max_slots"] = 2
    with Meanwhile(steer):
        result = dray.Experiment(config, path=path, model_dir=TRIALS).run()
    return Story(record=record, path=path, answers=answers, result=result)


def batches(record: Path, trial: int) -> list[int]:
    return (
        [batch for attempt in attempts(record).get(trial, ()) for batch in attempt.batches] if record.exists() else []
    )


def test_a_fork_continues_its_source_bit_for_bit(story: Story) -> None:
    assert batches(story.record, 1) == list(range(20, BATCHES))
    source, fork = (latest_checkpoint(story.path / f"trial_{trial}") for trial in (0, 1))
    assert source is not None
    assert fork is not None
    before, after = weights(source), weights(fork)
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_a_fork_trains_with_the_rate_that_was_set(story: Story) -> None:
    error = story.result.metrics.query("trial_id == 2 and kind == 'validation' and name == 'error'")["value"]
    assert batches(story.record, 2) == list(range(20, BATCHES))
    assert error.nunique() == 1, "with a rate of 0 nothing changes"


def test_a_stopped_trial_leaves_before_its_next_report(story: Story) -> None:
    assert story.result.trials["state"].tolist() == ["COMPLETED", "COMPLETED", "COMPLETED", "CANCELED"]
    assert len(batches(story.record, 3)) < 10
    assert ends(story.path) == dict.fromkeys(range(4), 1)


def test_each_request_has_one_answer(story: Story) -> None:
    answered = [record for record in journal(story.path) if record["event"] in ("requested", "rejected")]
    assert [record["id"] for record in answered] == [answer["id"] for answer in story.answers.values()]
    assert "lx: is not a hyperparameter of the space" in story.answers["unknown"]["error"]
    assert not RequestFiles(ExperimentDirectory(story.path)).waiting()


def test_a_fork_of_a_search_that_is_done_runs_it(story: Story) -> None:
    said = run_here("fork", story.path, "2", "--at", "30", "--set", "lr=0.01", group="trial")
    assert said.code == 0, said.err
    assert said.out.endswith("trial 4, from trial 2 at batch 30, lr = 0.01\n")
    result = dray.Result(story.path)
    assert result.trials["state"].tolist()[4] == "COMPLETED"
    assert batches(story.record, 4) == list(range(30, BATCHES))
