"""The sweep that a newcomer runs first, from the wheel: ``dray demo``."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import dray
from dray.config.load import load_config
from dray.config.search import build_method
from searchers.search import Search
from tests.pytorch.test_tensorboard import scalars
from tests.ray.harness import ROOT, STARTS_IN_S, ends, journal, run_here

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EPOCH = 23  # batches of 64 in 1,437 images


@pytest.fixture(scope="module")
def result(shared_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    home = tmp_path_factory.mktemp("sweep")
    python = [sys.executable, "-m"]
    subprocess.run([*python, "hatchling", "build", "-t", "wheel", "-d", home], cwd=ROOT, check=True)
    venv.create(home / "env")
    [wheel] = home.glob("*.whl")
    install = ["--python", home / "env/bin/python", "install", "-qq", "--no-index", "--no-deps", wheel]
    subprocess.run([*python, "pip", *install], check=True)
    [site] = home.glob("env/lib/*/site-packages")
    (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    environment = {**os.environ, "DRAY_HOME": str(home / "results"), "RAY_ADDRESS": shared_cluster}
    with (home / "output.txt").open("w") as log:
        demo = subprocess.Popen([home / "env/bin/dray", "demo"], cwd=home, env=environment, stdout=log, stderr=log)
    assert demo.wait(2 * STARTS_IN_S) == 0, (home / "output.txt").read_text()
    assert f"cp -r {site}/dray/demo digits" in (home / "output.txt").read_text()
    [path] = (home / "results").glob("digits-asha-*")
    return dray.Result(path)


def test_every_trial_ends_once_at_a_third_of_random_searchs_cost(result: dray.Result) -> None:
    assert set(result.trials["state"]) == {"COMPLETED", "PRUNED"}
    assert ends(result.path) == dict.fromkeys(range(64), 1)
    assert result.trials["restarts"].eq(0).all()
    lengths = result.trials["batches"] / EPOCH
    assert set(lengths) == {1, 4, 16}
    assert set(lengths[result.trials["state"] == "COMPLETED"]) == {16}
    assert lengths.sum() <= 0.3 * 64 * 16


def test_journal_replays_with_every_decision_the_rules(result: dray.Result) -> None:
    config = load_config(result.path / "experiment.yaml")
    records = journal(result.path)
    # Raises if one recorded decision is not the one that the method takes.
    search = Search(build_method(config), config.space, seed=7, smaller_is_better=True, log=lambda record: None)
    search.replay(records)
    assert search.done is not None
    assert search.done.reason == "completed"
    # And by a rule of its own: who went on was, when it reported, in the best quarter of its rung so far.
    actions = [action for record in records for action in record.get("actions", [])]
    stops = {action["trial"] for action in actions if action["action"] == "stop"}
    seen: dict[float, list[float]] = {}
    for record in records:
        if record["event"] == "reported" and record["step"] in (1, 4):
            rung = seen.setdefault(record["step"], [])
            better = sum(value < record["value"] for value in rung)
            rung.append(record["value"])
            goes_on = better < max(len(rung) // 4, 1)
            stopped = any(action["action"] == "stop" for action in record["actions"])
            assert stopped != goes_on
    assert stops == set(result.trials["trial_id"][result.trials["state"] == "PRUNED"])


def test_best_trial_reads_96_percent_of_the_held_out_digits(result: dray.Result) -> None:
    best = result.best_trial
    [accuracy] = result.metrics.query(
        "trial_id == @best.trial_id and batches == @best.best_batches and name == 'accuracy'"
    )["value"]
    assert accuracy > 0.96
    assert best.metric == result.trials["best_metric"].min()


def test_loaded_best_trial_gives_the_reported_metric_exactly(result: dray.Result) -> None:
    trial: Any = result.load_best_trial()
    trial.model.eval()
    losses = []
    # Not of the loader's batches: of the data, as it came from the library.
    held_out = trial.build_validation_data_loader().dataset
    with torch.no_grad():
        for start in range(0, len(held_out), 60):
            images, labels = held_out[start : start + 60]
            losses.append(nn.functional.cross_entropy(trial.model(images), labels).item())
    assert sum(losses) / len(losses) == result.best_trial.metric


def test_time_of_each_worker_group_is_told_without_a_gap(result: dray.Result) -> None:
    timeline = result.timeline
    assert set(timeline["trial_id"]) == {-1, *range(64)}
    for _, mine in timeline.groupby("group"):
        gaps = mine["start"].to_numpy()[1:] - mine["end"].to_numpy()[:-1]
        assert (abs(gaps) < 1e-6).all()
        assert mine["phase"].iloc[0] == "booting"
    assert (timeline["end"] >= timeline["start"]).all()
    phases = timeline.groupby("trial_id")["phase"].agg(set)
    assert all({"starting", "training", "data", "validating", "checkpointing"} <= phases[trial] for trial in range(64))


def test_trials_tell_what_they_took(result: dray.Result) -> None:
    figures = result.system_metrics.pivot(index=["trial_id", "batches"], columns="name", values="value")
    # At each rung at least, and how a trial began only once.
    ends = {(trial, batches) for trial, batches in result.trials.set_index("trial_id")["batches"].items()}
    assert ends <= set(figures.index)
    assert figures["starting_s"].notna().groupby("trial_id").sum().eq(1).all()
    assert {"training_s", "data_s", "validating_s", "checkpointing_s", "waiting_s"} < set(figures.columns)
    trained = figures["batches_per_second"] * (figures["training_s"] + figures["data_s"])
    assert trained.groupby("trial_id").sum().round().astype(int).tolist() == result.trials["batches"].tolist()
    assert figures["cpu_cores"].dropna().between(0, 8, inclusive="neither").all()
    assert figures["memory_gb"].dropna().between(0.1, 10).all()
    spent = figures.filter(regex="_s$").groupby("trial_id").sum()
    lasted = (result.trials["ended"] - result.trials["started"]) / pd.Timedelta(seconds=1)
    assert (spent.sum(axis=1).to_numpy() < lasted.to_numpy() + 0.5).all()


@pytest.mark.api("2.8", "2.11")
def test_every_batch_of_every_trial_is_in_its_tensorboard(result: dray.Result) -> None:
    last = result.metrics.query("kind == 'validation' and name == 'accuracy'").groupby("trial_id").last()["value"]
    for trial, batches in result.trials.set_index("trial_id")["batches"].items():
        shown = scalars(result.path / f"trial_{trial}" / "tensorboard")
        assert [step for step, _ in shown["Determined/loss"]] == list(range(batches))
        assert shown["Determined/val_accuracy"][-1] == (batches, pytest.approx(last[trial]))


def test_command_ends_with_a_table_of_the_best_and_the_path(result: dray.Result) -> None:
    # A finished experiment has nothing left to do: `resume` prints its outcome again, without starting Ray.
    said = run_here("resume", result.path)
    assert said.code == 0
    for output in ((result.path.parents[1] / "output.txt").read_text(), said.out + said.err):
        table = output.rpartition("best trials by validation_loss")[2]
        assert table.splitlines()[2].split()[0] == str(result.best_trial.trial_id)
        assert f"Results: {result.path}" in table
        assert "Traceback" not in output
