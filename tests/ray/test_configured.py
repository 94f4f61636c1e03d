"""A grid of five trials, from the command line: one completes, one's loss is NaN, and three fail in their own ways.

With fields of Determined's experiment file: environment variables, log policies, initial validation.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Any

import pytest

import dray
from dray.masking import MASK
from tests.cli.said import Said
from tests.ray.harness import TRIALS, journal, lines, recorded, run_here, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TOKEN = "c4n4ry-t0k3n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    said: Said
    result: dray.Result


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("configured")
    model = directory / "model"
    shutil.copytree(TRIALS, model, ignore=shutil.ignore_patterns("__pycache__"))
    (model / "startup-hook.sh").write_text('test "$FLAVOUR" = vanilla\n')
    config: dict[str, Any] = recorded(
        directory / "record",
        trials=5,
        batches=12,
        entrypoint="configured:Configured",
        searcher={"name": "grid", "metric": "error", "max_length": {"batches": 12}, "max_concurrent_trials": 1},
        environment={
            "image": "determinedai/environments:py-3.9",
            "environment_variables": {"cpu": ["FLAVOUR=vanilla", f"SOME_TOKEN={TOKEN}"], "cuda": ["FLAVOUR=mint"]},
        },
        log_policies=[{"pattern": ".*disk is full.*", "action": {"type": "cancel_retries"}}],
        perform_initial_validation=True,
        scheduling_unit=3,
        max_restarts=1,
        stop_on_nan=True,
    )
    config["reproducibility"]["deterministic"] = True
    fails = ["no", "diverges", "raises", "dies", "otherwise"]
    config["hyperparameters"] |= {"lr": 0.1, "fails": {"type": "categorical", "vals": fails}}
    path = directory / "experiment"
    said = run_here("create", write_config(directory, config), model, "--path", path)
    return Story(said=said, result=dray.Result(path))


@pytest.fixture(scope="module")
def result(story: Story) -> dray.Result:
    return story.result


def by_failure(result: dray.Result, column: str) -> dict[str, Any]:
    return dict(zip(result.trials["hparams.fails"], result.trials[column], strict=True))


def test_failures_and_nan_are_told_first_and_have_an_exit_code(story: Story) -> None:
    assert story.said.code == 3, story.said.err
    result, told = story.result, story.said.err
    failed = ("raises", "dies", "otherwise")
    states = {"no": "COMPLETED", "diverges": "PRUNED", **dict.fromkeys(failed, "ERRORED")}
    assert by_failure(result, "state") == states
    batches = by_failure(result, "batches")
    del batches["dies"]  # a report that nobody waits for may die with its process
    assert batches == {"no": 12, "diverges": 6, "raises": 3, "otherwise": 3}
    trials = result.trials.set_index("hparams.fails")
    assert trials["nan_since"].dropna().to_dict() == {"diverges": 6}
    assert math.isfinite(by_failure(result, "best_metric")["diverges"])
    assert result.best_trial.hparams["fails"] == "no"
    reasons = {record["trial"]: record["reason"] for record in journal(result.path) if record["event"] == "exited"}
    numbers = by_failure(result, "trial_id")
    ends = {"no": "completed", "diverges": "diverged", **dict.fromkeys(failed, "errored")}
    assert reasons == {numbers[how]: reason for how, reason in ends.items()}
    assert f"trial {numbers['diverges']} is stopped (stop_on_nan): the training metric loss is nan" in told
    first = told.index("\n3 of 5 trials failed\n1 trial diverged: NaN since batch 6 ")
    assert first < told.index("\nbest trials by error:\n")


def test_journal_of_a_finished_search_replays_with_the_same_exit_code(result: dray.Result) -> None:
    before = journal(result.path)
    assert run_here("resume", result.path).code == 3
    assert [record["event"] for record in journal(result.path)[len(before) :]] == ["opened"]


def test_no_trial_is_started_again_whose_log_a_policy_is_about(result: dray.Result) -> None:
    assert by_failure(result, "restarts") == {"no": 0, "diverges": 0, "raises": 0, "dies": 0, "otherwise": 1}
    gave_up = {record["trial"]: record["why"] for record in journal(result.path) if record["event"] == "gave_up"}
    trials = by_failure(result, "trial_id")
    begins = "log_policies: cancel_retries, as its log has '.*disk is full.*': "
    assert gave_up[trials["raises"]].startswith(begins)
    assert gave_up[trials["dies"]] == f"{begins}fatal: the disk is full"
    assert "log_policies" not in gave_up[trials["otherwise"]]


def test_variables_are_those_of_the_slots_device_and_are_there_at_import(result: dray.Result) -> None:
    told = [line for line in lines(result.path.parent / "record") if "flavour" in line]
    assert {line["trial"] for line in told} == set(result.trials["trial_id"])
    assert {(line["flavour"], line["token"]) for line in told} == {("vanilla", len(TOKEN))}


def test_a_cpu_slot_sees_no_gpus(result: dray.Result) -> None:
    told = [line for line in lines(result.path.parent / "record") if "flavour" in line]
    assert {line["gpus"] for line in told} == {""}


def test_every_trial_has_deterministic_algorithms(result: dray.Result) -> None:
    told = [line for line in lines(result.path.parent / "record") if "deterministic" in line]
    assert {line["trial"] for line in told} == set(result.trials["trial_id"])
    assert {(line["deterministic"], line["workspace"]) for line in told} == {(True, ":4096:8")}


def test_values_of_variables_are_in_no_file_but_the_owners(result: dray.Result) -> None:
    files = [path for path in result.path.rglob("*") if path.is_file()]
    assert [path.name for path in files if TOKEN.encode() in path.read_bytes()] == ["secrets.yaml"]
    stored = result.config.environment.environment_variables
    assert stored == {"cpu": {"FLAVOUR": MASK, "SOME_TOKEN": MASK}, "cuda": {"FLAVOUR": MASK}}


def test_each_trial_validates_first_and_reports_as_often_as_it_is_scheduled(result: dray.Result) -> None:
    mine = result.metrics.query(f"trial_id == {by_failure(result, 'trial_id')['no']}")
    assert mine.query("name == 'error'")["batches"].tolist() == [0, 10, 12]
    assert mine.query("kind == 'training'")["batches"].tolist() == [3, 6, 9, 10, 12]
