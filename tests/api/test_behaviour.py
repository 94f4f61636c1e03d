"""Behaviours of API.md that are shown nowhere else: names, defaults, what is called with what."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, callback


def defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def keyword_only(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.api("1.2")
def test_train_batch_is_called_by_keyword(fit: Fit) -> None:
    class Keywords(OneWeight):
        def train_batch(self, *, batch_idx: int, epoch_idx: int, batch: Any) -> Any:  # type: ignore[override]
            return super().train_batch(batch, epoch_idx, batch_idx)

    assert fit(Keywords, max_length=Batch(6)).seen == [(i // 5, i) for i in range(6)]


@pytest.mark.api("1.6", "1.7")
def test_evaluate_batch_is_called_by_keyword(fit: Fit) -> None:
    seen: list[int] = []

    class Keywords(OneWeight):
        def evaluate_batch(self, *, batch_idx: int, batch: Any) -> dict[str, Any]:  # type: ignore[override]
            seen.append(batch_idx)
            return {"validation_loss": self.loss(batch)}

    fit(Keywords, max_length=Batch(1))
    assert seen == [0, 1, 2]


@pytest.mark.api("1.4", "1.9")
def test_a_trial_has_no_callbacks_and_averages_by_default(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        trial = OneWeight(context)
        assert pytorch.PyTorchTrial.build_callbacks(trial) == {}
        assert trial.evaluation_reducer() is pytorch.Reducer.AVG


@pytest.mark.api("1.10")
def test_the_length_of_each_batch_is_asked_once(fit: Fit) -> None:
    asked: list[int] = []

    class Counting(OneWeight):
        def get_batch_length(self, batch: Any) -> int:
            asked.append(len(batch))
            return super().get_batch_length(batch)

    fit(Counting, max_length=Batch(4))
    assert asked == [2] * (4 + 3)


@pytest.mark.api("5.2")
def test_schedules_step_after_train_batch(fit: Fit) -> None:
    class Watching(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.rates: list[float] = []
            schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH, 2)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            found = super().train_batch(batch, epoch_idx, batch_idx)
            self.rates.append(self.optimizer.param_groups[0]["lr"] / self.lr)
            return found

    assert fit(Watching, max_length=Batch(6)).rates == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.api("7.5")
def test_a_workload_ends_at_every_boundary_of_any_kind(fit: Fit) -> None:
    ends: list[int] = []

    fit(
        OneWeight,
        callbacks=callback(on_training_workload_end=lambda metrics, _: ends.append(metrics["batches"])),
        max_length=Batch(13),
        reporting_period=Batch(10),
        validation_period=Batch(4),
        checkpoint_period=Epoch([1]),
        checkpoint_policy="none",
    )
    assert ends == [4, 5, 8, 10, 12, 13]


@pytest.mark.api("8.1", "2.10")
def test_init_takes_keywords_and_gives_a_context(host: FakeHost) -> None:
    assert keyword_only(pytorch.init) == {
        "hparams",
        "exp_conf",
        "distributed",
        "aggregation_frequency",
        "enable_tensorboard_logging",
        "max_length",  # dray's own
        "mesh",  # dray's own
    }
    assert defaults(pytorch.init) == {
        "hparams": None,
        "exp_conf": None,
        "distributed": None,
        "aggregation_frequency": 1,
        "enable_tensorboard_logging": True,
        "max_length": None,
        "mesh": None,
    }
    with use_host(host), pytorch.init(hparams={"lr": 1}, exp_conf={"name": "x"}) as context:
        assert isinstance(context, pytorch.PyTorchTrialContext)
        assert (context.get_hparams(), context.get_experiment_config()) == ({"lr": 1}, {"name": "x"})


@pytest.mark.api("8.2")
def test_fit_has_determineds_arguments_in_their_order(fit: Fit) -> None:
    arguments = defaults(pytorch.Trainer.fit)
    assert list(arguments) == [
        "checkpoint_period",
        "validation_period",
        "max_length",
        "reporting_period",
        "checkpoint_policy",
        "latest_checkpoint",
        "step_zero_validation",
        "test_mode",
        "profiling_enabled",
    ]
    given = {name: value for name, value in arguments.items() if value is not None}
    assert given == {
        "reporting_period": Batch(100),
        "checkpoint_policy": "best",
        "step_zero_validation": False,
        "test_mode": False,
    }


@pytest.mark.api("8.4b")
def test_the_kinds_of_boundaries_can_be_imported() -> None:
    from dray.pytorch import _TrainBoundaryType

    assert {"TRAIN", "VALIDATE", "CHECKPOINT", "REPORT"} == {kind.name for kind in _TrainBoundaryType}


@pytest.mark.api("8.9")
def test_test_mode_needs_a_length_too(fit: Fit) -> None:
    with pytest.raises(ValueError, match="needs max_length"):
        fit(OneWeight, test_mode=True)


@pytest.mark.api("8.10", "8.4")
def test_epochs_end_at_their_last_batch_and_nowhere_else(fit: Fit, host: FakeHost) -> None:
    fit(
        OneWeight,
        max_length=Epoch(3),
        validation_period=Epoch(2),
        checkpoint_period=Epoch(1),
        reporting_period=Epoch(1),
        checkpoint_policy="none",
    )
    told = [(r.batches, r.validation is not None, r.checkpoint is not None) for r in host.reports]
    assert told == [(5, False, True), (10, True, True), (15, True, True)]


@pytest.mark.api("8.11", "8.12")
def test_the_ways_to_leave_have_determineds_arguments() -> None:
    assert defaults(pytorch.ShouldExit) == {"skip_exit_checkpoint": False}
    assert str(pytorch.InvalidHP("lr is too large")) == "lr is too large"
    assert isinstance(pytorch.InvalidHP("x"), Exception)


@pytest.mark.api("9.6")
def test_a_context_for_loading_knows_what_it_was_given() -> None:
    context = pytorch.CheckpointLoadContext(hparams={"lr": 1}, exp_conf={"data": {"path": "x"}})
    assert (context.get_hparam("lr"), context.get_data_config()) == (1, {"path": "x"})
    assert context.distributed.get_size() == 1
    with pytest.raises(ValueError, match="no hyperparameters"):
        pytorch.CheckpointLoadContext().get_hparams()
