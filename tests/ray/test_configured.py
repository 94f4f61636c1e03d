"""Fields of Determined's experiment file on a real Ray: environment variables, log policies, initial validation."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

import dray
from dray.masking import MASK
from tests.ray.harness import TRIALS, journal, lines, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOKEN = "c4n4ry-t0k3n"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    """A grid of four trials: one that does well, and three that fail in their own ways."""
    directory = tmp_path_factory.mktemp("configured")
    model = directory / "model"
    shutil.copytree(TRIALS, model, ignore=shutil.ignore_patterns("__pycache__"))
    (model / "startup-hook.sh").write_text('test "$FLAVOUR" = vanilla\n')
    config: dict[str, Any] = recorded(
        directory / "record",
        trials=4,
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
    )
    config["reproducibility"]["deterministic"] = True
    fails = ["no", "raises", "dies", "otherwise"]
    config["hyperparameters"] |= {"lr": 0.1, "fails": {"type": "categorical", "vals": fails}}
    found: dray.Result = dray.Experiment(config, model_dir=model, path=directory / "experiment").run()
    return found


def by_failure(result: dray.Result, column: str) -> dict[str, Any]:
    return dict(zip(result.trials["hparams.fails"], result.trials[column], strict=True))


def test_no_trial_is_started_again_whose_log_a_policy_is_about(result: dray.Result) -> None:
    assert by_failure(result, "restarts") == {"no": 0, "raises": 0, "dies": 0, "otherwise": 1}
    errored = dict.fromkeys(("raises", "dies", "otherwise"), "ERRORED")
    assert by_failure(result, "state") == {"no": "COMPLETED", **errored}
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
