"""Trials that are forked, added with code of their own and stopped, while a search runs and after it has ended."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dray
from dray.experiment import requests
from dray.experiment.request_files import RequestFiles
from dray.records.directory import ExperimentDirectory
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

BATCHES = 40
LAYER = "        model = nn.Linear(4, 1)\n"
WITHOUT_BIAS = (
    f"--- a/recorded.py\n+++ b/recorded.py\n@@ -1 +1 @@\n-{LAYER}+        model = nn.Linear(4, 1, bias=False)\n"
)
BROKEN = (
    "--- a/recorded.py\n+++ b/recorded.py\n@@ -1 +1,4 @@\n import dray\n"
    "+import ray\n+if ray.is_initialized():\n+    raise ValueError('only on workers')\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Two trials of the search, four with code of their own, two forks of the first of these, and a slow one."""

    record: Path
    path: Path
    result: dray.Result

    def batches(self, trial: int) -> list[int]:
        return [batch for attempt in attempts(self.record)[trial] for batch in attempt.batches]


@pytest.fixture(scope="module")
def story(ray_is_up: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("requests")
    record, path, until, exact = (directory / name for name in ("record", "experiment", "until", "exact"))
    shutil.copytree(TRIALS, exact)
    text = (exact / "recorded.py").read_text()
    (exact / "recorded.py").write_text(text.replace('{"error": self.error(batch),', '{"error": 0.0,'))

    def ask(**fields: Any) -> None:
        requests.place(path, Requested(id=requests.new_id(), **fields))

    def steer() -> None:
        wait_for(lambda: record.exists() and attempts(record).get(0), "the first trial")
        reader = ExperimentReader(ExperimentDirectory.open(path))
        reader.refresh()
        for change in ({"patch": WITHOUT_BIAS}, {"code": exact}, {"patch": BROKEN}, {"patch": WITHOUT_BIAS}):
            # As the import on trial would cost seconds, `tests/code/test_trial_import.py` has it alone.
            requests.place(path, requests.add(reader, {"lr": 0.01}, importer=lambda *_: "", **change))
        until.touch()
        wait_for(lambda: (path / "trial_2" / f"checkpoint_{BATCHES}").exists(), "the first variant's checkpoint")
        reader.refresh()
        source = requests.source_of(reader, 2, "20")
        reader.close()
        ask(source=source)
        ask(source=source, hparams={"lr": 0.0})
        ask(hparams={"lx": 1.0})
        ask(hparams={"pause_s": 1.0})
        wait_for(lambda: 8 in attempts(record) and len(attempts(record)[8][-1].batches) > 2, "the added trial")
        ask(trial=8)

    config = recorded(record, trials=2, batches=BATCHES, pause_s=0.02, entrypoint="recorded:Held")
    config["checkpoint_storage"] = {"save_trial_latest": BATCHES}
    config["hyperparameters"] |= {"until": str(until), "longer": str(until)}
    config["resources"]["max_slots"] = 1
    with Meanwhile(steer):
        result = dray.Experiment(config, path=path, model_dir=TRIALS).run()
    return Story(record=record, path=path, result=result)


def test_one_process_trains_one_variant_after_the_other(story: Story) -> None:
    of_trials = attempts(story.record)
    assert sorted(of_trials) == [0, 1, 2, 3, 5, 6, 7, 8]
    # The second one begins with the variant that can't be imported, and runs the trials after it.
    assert len({each.pid for mine in of_trials.values() for each in mine}) == 2
    assert ends(story.path) == dict.fromkeys(range(9), 1)


def test_each_trial_runs_its_own_code_and_stores_it(story: Story) -> None:
    codes = story.result.trials["code"].tolist()
    assert codes[:2] == ["", ""]
    assert codes[2] == codes[5] == codes[6] == codes[7], "a fork has its source's"
    assert len({*codes}) == 4
    for trial in (0, 1, 2, 3, 5, 6, 7):
        checkpoint = latest_checkpoint(story.path / f"trial_{trial}")
        assert checkpoint is not None
        has_bias = any("bias" in name for name in weights(checkpoint))
        stored = (checkpoint / "code" / "recorded.py").read_text()
        assert has_bias == (LAYER in stored) == (codes[trial] != codes[2])


def test_the_best_trial_may_be_a_variant_and_is_loaded_with_its_code(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert story.result.best_trial.trial_id == 3
    info = SimpleNamespace(trial=SimpleNamespace(trial_id=3))
    monkeypatch.setattr(dray, "get_cluster_info", lambda: info)  # its constructor asks
    trial = story.result.load_best_trial()
    assert trial.evaluate_batch((None, None), 0)["error"] == 0.0


def test_code_that_only_workers_can_not_import_ends_its_own_trial(story: Story) -> None:
    states = story.result.trials["state"].tolist()
    assert (states[4], states[8], states.count("COMPLETED")) == ("ERRORED", "CANCELED", 7)
    failures = [record for record in story.result.reader.failures if record["trial"] == 4]
    assert "only on workers" in failures[-1]["error"]


def test_a_fork_continues_its_source_bit_for_bit_or_as_set(story: Story) -> None:
    assert story.batches(6) == story.batches(7) == list(range(20, BATCHES))
    source, fork = (latest_checkpoint(story.path / f"trial_{trial}") for trial in (2, 6))
    assert source is not None
    assert fork is not None
    before, after = weights(source), weights(fork)
    assert all((before[name] == after[name]).all() for name in before)
    error = story.result.metrics.query("trial_id == 7 and kind == 'validation' and name == 'error'")["value"]
    assert error.nunique() == 1, "with a rate of 0 nothing changes"


def test_a_stopped_trial_leaves_and_each_request_has_one_answer(story: Story) -> None:
    assert len(story.batches(8)) < 10
    answered = [record["event"] for record in journal(story.path) if record["event"] in ("requested", "rejected")]
    assert sorted(answered) == ["rejected"] + ["requested"] * 8
    [rejected] = [record["error"] for record in journal(story.path) if record["event"] == "rejected"]
    assert "lx: is not a hyperparameter of the space" in rejected
    assert not RequestFiles(ExperimentDirectory(story.path)).waiting()


@pytest.mark.long
def test_a_fork_of_a_search_that_is_done_runs_it(story: Story) -> None:
    said = run_here("fork", story.path, "7", "--at", "30", "--set", "lr=0.01", group="trial")
    assert said.code == 3, f"the broken variant failed for good before: {said.err}"
    assert said.out.endswith("trial 9, from trial 7 at batch 30, lr = 0.01\n")
    assert dray.Result(story.path).trials["state"].tolist()[9] == "COMPLETED"
    assert story.batches(9) == list(range(30, BATCHES))
