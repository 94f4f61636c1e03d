"""Hugging Face's trainer as the loop of a trial. A loop with its order of events stands in for it, which is quick;
`test_with_the_real_trainer` has the real one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dray import core
from dray.core import ClusterInfo, TrialInfo
from dray.hosts import LocalHost, use_host
from dray.training.host import Report

pytestmark = pytest.mark.slow  # it imports transformers


@pytest.fixture
def callback(alias: None) -> Iterator[Any]:
    """The class, by Determined's name for it."""
    sys.modules.pop("dray.transformers", None)
    yield importlib.import_module("determined.transformers").DetCallback
    sys.modules.pop("dray.transformers")


class Searching(LocalHost):
    """A search that stops the trial at a length."""

    def __init__(self, directory: Path, stop_at: int | None = None) -> None:
        super().__init__(directory)
        self.stop_at, self.reports, self.heard = stop_at, list[Report](), 0

    def report(self, report: Report) -> bool:
        self.reports.append(report)
        return report.validation is not None and report.batches == self.stop_at

    def interrupted(self) -> None:
        self.heard += 1

    def validations(self) -> dict[int, Any]:
        return {report.batches: report.validation for report in self.reports if report.validation is not None}


@pytest.fixture
def in_trial(set_info: Any) -> Any:
    def begin(latest: str | None = None) -> None:
        config = {"searcher": {"name": "single", "metric": "eval_loss"}}
        trial = TrialInfo(trial_id=3, experiment_id=1, trial_seed=0, config=config)
        set_info(ClusterInfo(trial=trial, latest_checkpoint=latest))

    return begin


def arguments(directory: Path, **other: Any) -> Any:
    usual = {"eval_strategy": "steps", "save_strategy": "steps", "resume_from_checkpoint": None}
    return SimpleNamespace(output_dir=str(directory / "out"), **{**usual, **other})


def train(callback: Any, args: Any, steps: int, *, every: int = 2, enough: int | None = None) -> int:
    """What the trainer does of all this: logs and evaluates every so many steps, and saves when it is told to.

    Args:
        enough: after this step's evaluation another callback stops training.
    """
    state = SimpleNamespace(global_step=0, max_steps=steps, epoch=0.0, is_world_process_zero=True)
    control = SimpleNamespace(should_training_stop=False, should_evaluate=False, should_save=False)

    def log_evaluate_save(log: bool) -> None:
        if log:
            callback.on_log(args, state, control, logs={"loss": 1 / state.global_step, "epoch": round(state.epoch, 1)})
        if control.should_evaluate:
            found = {"eval_loss": 2 / state.global_step, "eval_runtime": 0.5, "epoch": round(state.epoch, 1)}
            callback.on_log(args, state, control, logs=found)
            callback.on_evaluate(args, state, control, metrics=found)
            control.should_training_stop |= state.global_step == enough
        if control.should_save:
            directory = Path(args.output_dir, f"checkpoint-{state.global_step}")
            directory.mkdir(parents=True)
            (directory / "model.bin").write_text(str(state.global_step))
            callback.on_save(args, state, control)
        control.should_evaluate = control.should_save = False

    while state.global_step < steps and not control.should_training_stop:
        state.global_step += 1
        state.epoch = state.global_step / 4
        due = state.global_step % every == 0
        control.should_evaluate = due and args.eval_strategy == "steps"
        callback.on_step_end(args, state, control)
        log_evaluate_save(log=due)
        if state.global_step % 4 == 0 or state.global_step == steps or control.should_training_stop:
            callback.on_epoch_end(args, state, control)
            log_evaluate_save(log=False)
    callback.on_log(args, state, control, logs={"train_runtime": 1.0, "train_loss": 0.5})
    return int(state.global_step)


def test_what_it_logs_is_reported_and_what_it_saves_is_a_checkpoint(
    callback: Any, tmp_path: Path, in_trial: Any
) -> None:
    in_trial()
    host, args = Searching(tmp_path / "trial"), arguments(tmp_path)
    with use_host(host), core.init() as context:
        assert train(callback(context, args, user_data={"mine": 1}), args, steps=5) == 5
    assert host.validations() == {
        2: {"batches": 2, "epochs": 0.5, "eval_loss": 1.0},
        4: {"batches": 4, "epochs": 1.0, "eval_loss": 0.5},
        5: {"batches": 5, "epochs": 1.25, "eval_loss": 0.4},  # the end, though it was not due
    }
    training = [report.training for report in host.reports if report.training is not None]
    assert training[0] == {"batches": 2, "epochs": 0.5, "loss": 0.5}
    assert [found["batches"] for found in training] == [2, 4, 5]
    (checkpoint,) = (tmp_path / "trial").glob("checkpoint_*")
    assert (checkpoint / "checkpoint-5" / "model.bin").read_text() == "5"
    assert json.loads((checkpoint / "checkpoint-5" / "my_data.json").read_text()) == {"mine": 1}
    assert host.heard == 0  # it has finished


def test_the_search_ends_it_at_the_step_that_it_has_judged(callback: Any, tmp_path: Path, in_trial: Any) -> None:
    in_trial()
    host, args = Searching(tmp_path / "trial", stop_at=4), arguments(tmp_path)
    with use_host(host), core.init() as context:
        assert train(callback(context, args), args, steps=20) == 4
    assert host.heard == 1
    assert [path.name for path in (tmp_path / "trial").glob("checkpoint_*")] == ["checkpoint_4"]


def test_what_another_callback_has_stopped_early_is_saved_and_complete(
    callback: Any, tmp_path: Path, in_trial: Any
) -> None:
    in_trial()
    host, args = Searching(tmp_path / "trial"), arguments(tmp_path)
    with use_host(host), core.init() as context:
        assert train(callback(context, args), args, steps=20, enough=6) == 6
    assert list(host.validations()) == [2, 4, 6], "once each"
    assert [path.name for path in (tmp_path / "trial").glob("checkpoint_*")] == ["checkpoint_6"]
    assert host.heard == 0


def test_a_trial_that_is_started_again_finds_its_checkpoint_and_not_a_later_one(
    callback: Any, tmp_path: Path, in_trial: Any
) -> None:
    in_trial()
    host, args = Searching(tmp_path / "trial", stop_at=4), arguments(tmp_path)
    with use_host(host), core.init() as context:
        train(callback(context, args), args, steps=20)
    (checkpoint,) = (tmp_path / "trial").glob("checkpoint_*")
    (tmp_path / "out" / "trial_3" / "checkpoint-9").mkdir()  # of an attempt whose upload never ended
    in_trial(latest=str(checkpoint))
    again = arguments(tmp_path)
    with use_host(Searching(tmp_path / "again")), core.init() as context:
        callback(context, again)
    assert again.resume_from_checkpoint == str(tmp_path / "out" / "trial_3" / "checkpoint-4")
    assert Path(again.resume_from_checkpoint, "model.bin").read_text() == "4"
    anew = arguments(tmp_path, overwrite_output_dir=True)
    with use_host(Searching(tmp_path / "anew")), core.init() as context:
        callback(context, anew)
    assert anew.resume_from_checkpoint is None


def test_metrics_are_chosen_by_their_names_and_the_searchs_own_is_kept(
    callback: Any, tmp_path: Path, in_trial: Any
) -> None:
    in_trial()
    host, args = Searching(tmp_path / "trial"), arguments(tmp_path)
    with use_host(host), core.init() as context:
        train(callback(context, args, filter_metrics=["accuracy"]), args, steps=2)
    assert host.validations() == {2: {"batches": 2, "epochs": 0.5, "eval_loss": 1.0}}
    assert [report.training for report in host.reports if report.training] == [{"batches": 2, "epochs": 0.5}]


def test_a_local_run_writes_where_path_says(callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "home"))
    args = arguments(tmp_path, eval_strategy="no", save_strategy="no")
    with core.init() as context:
        train(callback(context, args), args, steps=3)
    assert args.output_dir == str(tmp_path / "out")
    (checkpoint,) = (tmp_path / "home").glob("local/*/checkpoint_3")
    assert (checkpoint / "checkpoint-3" / "model.bin").exists()


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), float(index % 4)), "labels": torch.tensor(float(index % 2))}


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.linear(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def test_with_the_real_trainer(callback: Any, tmp_path: Path, in_trial: Any) -> None:
    """Stopped by the search, gone on with: as if it had not been."""
    import transformers  # not where no test of it is chosen: it takes a second

    def run(name: str, latest: str | None = None, stop_at: int | None = None) -> tuple[Searching, Linear]:
        in_trial(latest)
        host, model = Searching(tmp_path / name, stop_at), Linear()
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / f"{name}-out"), max_steps=12, eval_strategy="steps", eval_steps=4,
            save_strategy="no", logging_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        with use_host(host), core.init() as context:
            trainer = transformers.Trainer(model=model, args=args, train_dataset=Numbers(), eval_dataset=Numbers())
            trainer.add_callback(callback(context, args))
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        return host, model

    whole, expected = run("whole")
    assert list(whole.validations()) == [4, 8, 12]
    stopped, _ = run("stopped", stop_at=8)
    assert list(stopped.validations()) == [4, 8]
    (checkpoint,) = (tmp_path / "stopped").glob("checkpoint_*")
    resumed, model = run("resumed", latest=str(checkpoint))
    assert resumed.validations() == {12: whole.validations()[12]}
    assert torch.equal(model.linear.weight, expected.linear.weight)
