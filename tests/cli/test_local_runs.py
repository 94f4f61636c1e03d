"""Local runs in the command: listed and found by name; stopped by Ctrl-C and resumed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dray as package
from dray import pytorch
from dray.errors import NoExperiment
from dray.pytorch import Batch
from dray.records.local_runs import LocalRun, local_runs
from tests.cli.said import Said
from tests.model_code import imports_undone
from tests.pytorch.fakes import OneWeight

Dray = Callable[..., Said]

TRIAL = """
import os, signal
from tests.pytorch.fakes import OneWeight


class Trial(OneWeight):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 2 and os.environ.pop("INTERRUPT", None):
            os.kill(os.getpid(), signal.SIGINT)
        return super().train_batch(batch, epoch_idx, batch_idx)
"""
CONFIG = """
name: one weight
entrypoint: my_trial:Trial
hyperparameters: {global_batch_size: 2}
scheduling_unit: 2
searcher: {name: single, metric: validation_loss, max_length: {batches: 8}}
min_validation_period: {batches: 4}
"""


@pytest.fixture
def config(home: Path, tmp_path: Path) -> Iterator[Path]:
    level = logging.root.level
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_trial.py").write_text(TRIAL)
    (tmp_path / "one.yaml").write_text(CONFIG)
    with imports_undone():
        yield tmp_path / "one.yaml"
    logging.root.setLevel(level)


@pytest.fixture
def script(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of a script, which validates at 2 and 4 batches."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytorch.init() as context:
        pytorch.Trainer(OneWeight(context), context).fit(max_length=Batch(4), validation_period=Batch(2))
    [run] = (home / "local").iterdir()
    return run


def test_a_run_of_a_script_is_listed_and_described(script: Path, dray: Dray) -> None:
    names = {each["name"]: each for each in dray("experiment", "list", "--json").value}
    assert set(names) == {"digits-1", script.name}
    assert script.name.startswith("train-")
    there = names[script.name]
    assert (there["state"], there["trials"], there["ended"], there["best_metric"]) == ("COMPLETED", 1, 1, None)
    assert script.name in dray("e", "list").out
    told = dray("e", "describe", "latest")
    assert told.code == 0, told.err
    assert f"{script.name}  COMPLETED" in told.out
    assert "trained for   4 batches" in told.out
    value = dray("e", "describe", script.name[:9], "--json").value
    assert value["metrics"]["validation validation_loss"] == pytest.approx(0.5**8)
    assert [each["path"] for each in value["checkpoints"]] == [f"{script}/checkpoint_4", f"{script}/checkpoint_2"]


def test_its_metrics_are_printed_as_a_trials(script: Path, dray: Dray) -> None:
    rows = dray("trial", "metrics", "train", "--kind", "validation", "--json").value
    assert [(row["batches"], row["value"]) for row in rows] == [(2, 0.0625), (4, pytest.approx(0.5**8))]
    assert "validation validation_loss" in dray("trial", "metrics", "train").out


def test_figures_of_the_machine_are_printed_if_asked_for(script: Path, dray: Dray) -> None:
    figures = {row["name"] for row in dray("trial", "metrics", "train", "--kind", "system", "--json").value}
    assert {"records_per_second", "training_s"} <= figures
    assert "records_per_second" not in dray("trial", "metrics", "train").out


def test_a_slow_rank_of_a_run_is_named_by_its_last_figures(script: Path, dray: Dray) -> None:
    metrics = script / "metrics.jsonl"
    *earlier, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    for percent, named in ((19.0, False), (38.4, True)):
        last["system"] = {"slowest_rank_percent/gpu-7/3": percent}
        metrics.write_text("".join(json.dumps(row) + "\n" for row in [*earlier, last]))
        told = "rank 3 on gpu-7 takes 38% longer per step than the median of the others"
        assert (told in dray("e", "describe", "train").out) == named


def test_its_state_says_whether_it_runs_and_how_it_ended(script: Path, dray: Dray) -> None:
    def state() -> str:
        return str(dray("e", "describe", "train", "--json").value["state"])

    metrics = script / "metrics.jsonl"
    with metrics.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert state() == "RUNNING"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    del rows[-1]["decides"]  # it stopped early
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert state() == "STOPPED"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]) + '{"torn')
    assert state() == "UNKNOWN"
    assert f'fit(..., latest_checkpoint="{script}/checkpoint_4")' in dray("e", "describe", "train").out


@pytest.mark.parametrize("name", ["latest", "digits"])
def test_what_only_experiments_can_do_passes_over_local_runs(script: Path, home: Path, dray: Dray, name: str) -> None:
    script.rename(script.with_name("digits-20261128-120000-ab12"))
    assert dray("e", "describe", "latest", "--json").value["name"] == "digits-20261128-120000-ab12"
    assert {each["trial"] for each in dray("trial", "list", name, "--json").value} == set(range(8))
    for command in (["e", "logs", name], ["checkpoint", "list", name], ["diff", f"{name}/0", f"{name}/1"]):
        assert dray(*command).code == 0, command
    assert package.Result(name).path == home / "digits-1"


def test_a_local_run_whose_whole_name_is_given_is_not_replaced_by_an_experiment(script: Path, dray: Dray) -> None:
    script.rename(script.with_name("digits"))  # a part of the name of digits-1
    assert "digits is a local run" in dray("e", "delete", "digits").is_one_line()


def test_where_there_are_only_local_runs_the_latest_is_refused_by_its_name(
    script: Path, home: Path, dray: Dray
) -> None:
    shutil.rmtree(home / "digits-1")
    assert f"{script.name} is a local run, not an experiment" in dray("trial", "list", "latest").is_one_line()


@pytest.mark.parametrize("command", [["report", "train"], ["e", "resume", "train"], ["trial", "list", "train"]])
def test_what_only_experiments_can_do_says_what_to_use_instead(script: Path, dray: Dray, command: list[str]) -> None:
    said = dray(*command).is_one_line()
    assert f"{script.name} is a local run, not an experiment: look at it with dray experiment describe" in said
    with pytest.raises(NoExperiment, match="is a local run"):
        package.Result(script.name)


FAILING = """
from tests.pytorch.fakes import OneWeight


class Trial(OneWeight):
    def at_init(self):
        if self.context.get_hparam("where") == "constructor":
            raise ValueError("the password is hunter22")

    def train_batch(self, batch, epoch_idx, batch_idx):
        if self.context.get_hparam("where") == f"batch {batch_idx}":
            raise ValueError("the password is hunter22")
        return super().train_batch(batch, epoch_idx, batch_idx)
"""


@pytest.mark.parametrize(("where", "batches"), [("constructor", 0), ("batch 0", 0), ("batch 5", 5)])
def test_a_run_that_failed_is_listed_with_its_error(
    home: Path, config: Path, dray: Dray, where: str, batches: int
) -> None:
    (config.parent / "model" / "my_trial.py").write_text(FAILING)
    changes = [f"hyperparameters.where={where}", "environment.environment_variables=[PASSWORD=hunter22]"]
    options = [word for each in changes for word in ("--config", each)]
    with pytest.raises(ValueError, match="hunter22"):
        dray("e", "create", config, config.parent / "model", "--local", *options)
    [there] = [each for each in dray("e", "list", "--json").value if each["name"] != "digits-1"]
    assert (there["state"], there["trials"], there["failed"]) == ("ERROR", 1, 1)
    assert there["failure"] == "ValueError: the password is xxxxxxxx"
    assert dray("e", "describe", "one", "--json").value["batches"] == batches
    told = dray("e", "describe", "latest").out
    assert f"{there['name']}  ERROR" in told
    assert re.search("^failed with +ValueError: the password is xxxxxxxx$", told, re.MULTILINE)
    assert ("--local --path" in told) == (batches >= 4)


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(("stops", "state"), [("asks", "COMPLETED"), ("exits", "COMPLETED"), ("sigterm", "STOPPED")])
def test_a_run_that_ends_itself_early_is_completed(home: Path, stops: str, state: str, is_saved: bool) -> None:
    class Early(OneWeight):
        def at_batch(self, batch_idx: int) -> None:
            if batch_idx == 1 and stops == "exits":
                raise pytorch.ShouldExit
            if batch_idx == 1 and stops == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            if batch_idx == 1 and stops == "asks":
                self.context.set_stop_requested(True)

    with pytorch.init() as context, contextlib.suppress(SystemExit):
        period = Batch(2) if is_saved else None
        pytorch.Trainer(Early(context), context).fit(
            max_length=Batch(6), validation_period=Batch(2), checkpoint_period=period
        )
    [run] = local_runs(home)
    assert LocalRun(run).state == state


def test_a_run_whose_failure_was_caught_has_failed(home: Path) -> None:
    class Failing(OneWeight):
        def at_batch(self, batch_idx: int) -> None:
            raise ValueError(batch_idx)

    with pytorch.init() as context, contextlib.suppress(ValueError):
        pytorch.Trainer(Failing(context), context).fit(max_length=Batch(4))
    [run] = local_runs(home)
    assert (LocalRun(run).state, LocalRun(run).failure) == ("ERROR", "ValueError: 0")


def test_local_is_named_after_its_config_stopped_by_ctrl_c_and_resumed_by_the_command_that_it_says(
    home: Path, config: Path, dray: Dray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INTERRUPT", "1")
    said = dray("experiment", "create", config, config.parent / "model", "--local", "--config", "max_restarts=0")
    assert said.code == 130
    [run] = (home / "local").iterdir()
    assert re.fullmatch(r"one-weight-\d{8}-\d{6}-[0-9a-f]{4}", run.name)
    assert dray("e", "describe", "one", "--json").value["state"] == "STOPPED"
    assert f"dray experiment create ... --local --path {run}\n" in dray("e", "describe", "one").out
    again = re.search(r"resume with: dray (.*)", caplog.text)
    assert again, caplog.text
    assert again[1].endswith(f"--config max_restarts=0 --local --path {run}")
    resumed = dray(*shlex.split(again[1]), "--json")
    assert (resumed.value["path"], resumed.value["state"], resumed.out.count("\n")) == (str(run), "COMPLETED", 1)
    assert re.search(r"training 8 batches .*, from batch [34] on", caplog.text)
    there = dray("e", "describe", "one", "--json").value
    assert (there["state"], there["batches"], there["best_metric"]) == ("COMPLETED", 8, pytest.approx(0.25**8))
