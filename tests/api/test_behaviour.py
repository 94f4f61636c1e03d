"""Behaviours of API.md that are shown nowhere else: names, defaults, what is called with what."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, Ones, OneWeight, one_weight

Mode = pytorch.LRScheduler.StepMode


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


@pytest.mark.api("1.3")
def test_one_tensor_is_reported_as_the_loss(fit: Fit, host: FakeHost) -> None:
    class Bare(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch(batch, epoch_idx, batch_idx)["loss"]

    fit(Bare, max_length=Batch(1))
    assert host.reports[-1].training == {"loss": 1.0}


@pytest.mark.api("1.4", "1.9")
def test_a_trial_has_no_callbacks_and_averages_by_default(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        trial = OneWeight(context)
        assert pytorch.PyTorchTrial.build_callbacks(trial) == {}
        assert trial.evaluation_reducer() is pytorch.Reducer.AVG


@pytest.mark.api("1.4")
def test_the_name_of_a_callback_is_the_key_of_its_state(fit: Fit, host: FakeHost) -> None:
    class Stateful(pytorch.PyTorchCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"patience": 3}

    fit(OneWeight, prepare=lambda trial: trial.callbacks.update(early=Stateful()), max_length=Batch(1))
    state = torch.load(Path(host.checkpoints()[0]) / "state-dict.pth", weights_only=True)
    assert state["callbacks"] == {"early": {"patience": 3}}


@pytest.mark.api("1.9", "6.1")
def test_the_average_is_over_batches_and_not_over_records(fit: Fit, host: FakeHost) -> None:
    class Uneven(OneWeight):
        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Ones(3), batch_size=2)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"records": float(len(batch))}

    fit(Uneven, max_length=Batch(1))
    assert host.reports[-1].validation == {"records": 1.5}


@pytest.mark.api("1.10")
def test_the_length_of_each_batch_is_asked_once(fit: Fit) -> None:
    asked: list[int] = []

    class Counting(OneWeight):
        def get_batch_length(self, batch: Any) -> int:
            asked.append(len(batch))
            return super().get_batch_length(batch)

    fit(Counting, max_length=Batch(4))
    assert asked == [2] * (4 + 3)


@pytest.mark.api("1.14")
def test_models_and_optimizers_take_turns_as_the_trial_says(fit: Fit, host: FakeHost) -> None:
    """The second model steps first, and twice in every second batch; the first one in the others only."""

    class Turns(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            second = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(second.weight)
            self.second = context.wrap_model(second)
            self.other = context.wrap_optimizer(torch.optim.SGD(self.second.parameters(), lr=self.lr))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx % 2:
                return super().train_batch(batch, epoch_idx, batch_idx)
            for _ in range(2):
                loss = ((self.second(batch) - 1) ** 2).mean()
                self.context.backward(loss)
                self.context.step_optimizer(self.other)
            return {"loss": loss}

    trial = fit(Turns, max_length=Batch(5))
    assert (trial.weight, float(trial.second.weight.detach())) == (one_weight(2), one_weight(6))
    saved = torch.load(Path(host.checkpoints()[0]) / "state-dict.pth", weights_only=True)
    assert [state["weight"].item() for state in saved["models_state_dict"]] == [one_weight(2), one_weight(6)]
    assert len(saved["optimizers_state_dict"]) == 2


@pytest.mark.api("2.1", "2.2", "2.3")
@pytest.mark.parametrize("given", ["8", 8.0, True, None])
def test_init_refuses_a_batch_size_that_is_no_int(host: FakeHost, given: Any) -> None:
    with (
        use_host(host),
        pytest.raises(ValueError, match=r"hparams\['global_batch_size'\] must be an int, got"),
        pytorch.init(hparams={"global_batch_size": given}),
    ):
        pass


@pytest.mark.api("2.15")
def test_a_context_shows_what_was_wrapped_and_where_it_is(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        trial = OneWeight(context)
        schedule = torch.optim.lr_scheduler.StepLR(trial.optimizer, 1)
        context.wrap_lr_scheduler(schedule, Mode.MANUAL_STEP)
        assert (context.models, context.optimizers) == ([trial.model], [trial.optimizer])
        assert isinstance(context.lr_schedulers[0], pytorch.LRScheduler)
        assert isinstance(context.device, torch.device)
        assert isinstance(context.distributed, DistributedContext)
        assert isinstance(context.experimental, pytorch.PyTorchExperimentalContext)


@pytest.mark.api("2.24", "9.2", "9.7")
def test_the_state_of_a_wrapped_scaler_is_saved_and_restored(fit: Fit, host: FakeHost) -> None:
    class Scaling(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1))
            super().__init__(context)
            self.scales: list[float] = []

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.scales.append(self.scaler.get_scale())
            loss = self.loss(batch)
            self.context.backward(self.scaler.scale(loss))
            self.scaler.unscale_(self.optimizer)
            self.context.step_optimizer(self.optimizer, scaler=self.scaler)
            self.scaler.update()
            return loss

    whole = fit(Scaling, max_length=Batch(3))
    assert whole.scales == [4.0, 8.0, 16.0]
    assert whole.weight == one_weight(3)
    saved = torch.load(Path(host.checkpoints()[0]) / "state-dict.pth", weights_only=True)
    assert saved["scaler_state_dict"]["scale"] == 32.0
    resumed = fit(Scaling, max_length=Batch(5), latest_checkpoint=host.checkpoints()[0])
    assert resumed.scales == [32.0, 64.0]
    assert resumed.weight == one_weight(5)


@pytest.mark.api("2.14", "2.28")
@pytest.mark.parametrize("automatic", [True, False])
def test_batches_are_moved_unless_the_trial_does_it_by_itself(fit: Fit, automatic: bool) -> None:
    seen: list[type] = []

    class Moving(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            if not automatic:
                context.experimental.disable_auto_to_device()

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Ones(4), batch_size=2, collate_fn=lambda rows: torch.stack(rows).numpy())

        build_validation_data_loader = build_training_data_loader

        def loss(self, batch: Any) -> torch.Tensor:
            seen.append(type(batch))
            return super().loss(self.context.to_device(batch))

    assert fit(Moving, max_length=Batch(2)).weight == one_weight(2)
    assert set(seen) == {torch.Tensor if automatic else np.ndarray}


@pytest.mark.api("3.2")
def test_methods_return_the_ranks_too() -> None:
    context = DistributedContext(
        rank=5, size=6, local_rank=1, local_size=2, cross_rank=2, cross_size=3, chief_ip="10.0.0.1", transport=Silent()
    )
    told = (context.get_rank(), context.get_local_rank(), context.get_size(), context.get_num_agents())
    assert told == (5, 1, 6, 3)
    assert (context.cross_rank, context.cross_size, context.local_size) == (2, 3, 2)


class Silent:
    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        raise AssertionError("nothing is to be said here")

    def close(self) -> None: ...


@pytest.mark.api("4.1")
def test_a_data_loader_has_torchs_arguments_and_defaults() -> None:
    ours, torchs = defaults(pytorch.DataLoader), defaults(torch.utils.data.DataLoader)
    # None and False both mean that the order is the dataset's.
    torchs["shuffle"] = torchs["shuffle"] or False
    assert ours == {name: torchs[name] for name in ours}
    assert list(inspect.signature(pytorch.DataLoader).parameters)[:13] == [
        "dataset",
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "drop_last",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
    ]
    assert keyword_only(pytorch.DataLoader) == {"prefetch_factor", "persistent_workers"}


@pytest.mark.api("4.1", "4.3")
def test_torchs_loader_gets_the_arguments() -> None:
    def setup(worker: int) -> None: ...

    given: dict[str, Any] = {
        "num_workers": 2,
        "collate_fn": list,
        "pin_memory": True,
        "timeout": 7.0,
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    made = pytorch.DataLoader(range(5), batch_size=2, worker_init_fn=setup, multiprocessing_context="spawn", **given)
    torchs = made.get_data_loader()
    assert isinstance(torchs, torch.utils.data.DataLoader)
    assert {name: getattr(torchs, name) for name in given} == given
    assert torchs.multiprocessing_context.get_start_method() == "spawn"
    assert len(made) == len(torchs) == 3


@pytest.mark.api("4.7")
def test_shuffled_data_resume_in_the_same_order(fit: Fit, host: FakeHost) -> None:
    class Watching(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.order: list[list[int]] = []

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(range(10), batch_size=2, shuffle=True)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.order.append(batch.tolist())
            return super().train_batch(torch.ones(2, 1), epoch_idx, batch_idx)

    whole = fit(Watching, max_length=Batch(9), checkpoint_period=Batch(3)).order
    assert fit(Watching, max_length=Batch(9), latest_checkpoint=host.checkpoints()[0]).order == whole[3:]


@pytest.mark.api("5.2")
@pytest.mark.parametrize(
    ("mode", "frequency", "expected"),
    [
        (Mode.STEP_EVERY_BATCH, 1, [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (Mode.STEP_EVERY_BATCH, 4, [1, 1, 1, 1, 0.5, 0.5]),
        (Mode.STEP_EVERY_EPOCH, 1, [1, 1, 1, 1, 1, 0.5]),
        (Mode.MANUAL_STEP, 1, [1] * 6),
    ],
)
def test_schedules_step_after_train_batch(fit: Fit, mode: Mode, frequency: int, expected: list[float]) -> None:
    class Watching(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.rates: list[float] = []
            schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            context.wrap_lr_scheduler(schedule, mode, frequency)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            found = super().train_batch(batch, epoch_idx, batch_idx)
            self.rates.append(self.optimizer.param_groups[0]["lr"] / self.lr)
            return found

    assert fit(Watching, max_length=Batch(6)).rates == expected


@pytest.mark.api("6.2")
def test_a_reducer_is_reset_then_reduced_a_slot_then_over_slots_for_each_workload(fit: Fit, host: FakeHost) -> None:
    class Recording(pytorch.MetricReducer):
        def __init__(self) -> None:
            self.log: list[Any] = []

        def reset(self) -> None:
            self.log.append("reset")

        def update(self) -> None:
            self.log.append("update")

        def per_slot_reduce(self) -> int:
            self.log.append("slot")
            return 7

        def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
            self.log.append(per_slot_metrics)
            return 0.5

    class Reducing(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.reducer = context.wrap_reducer(Recording(), name="auc")

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.reducer.update()
            return super().train_batch(batch, epoch_idx, batch_idx)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.reducer.update()
            return super().evaluate_batch(batch, batch_idx)

    workload = ["reset", "update", "update", "slot", [7]]
    trial = fit(Reducing, max_length=Batch(2), validation_period=Batch(2))
    assert trial.reducer.log == [*workload, "reset", *["update"] * 3, "slot", [7]]
    assert (host.reports[-1].training or {})["auc"] == 0.5
    assert (host.reports[-1].validation or {})["auc"] == 0.5


@pytest.mark.api("7.5")
def test_a_workload_ends_at_every_boundary_of_any_kind(fit: Fit) -> None:
    ends: list[int] = []

    class Watching(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
            ends.append(avg_metrics["batches"])

    fit(
        OneWeight,
        prepare=lambda trial: trial.callbacks.update(watching=Watching()),
        max_length=Batch(13),
        reporting_period=Batch(10),
        validation_period=Batch(4),
        checkpoint_period=Epoch([1]),
        checkpoint_policy="none",
    )
    assert ends == [4, 5, 8, 10, 12, 13]


@pytest.mark.api("7.6")
def test_a_validation_by_batches_is_one_epoch_of_validation(fit: Fit) -> None:
    log: list[Any] = []

    class Watching(pytorch.PyTorchCallback):
        def on_validation_epoch_start(self) -> None:
            log.append("start")

        def on_validation_epoch_end(self, outputs: list[Any]) -> None:
            log.append([{name: float(value) for name, value in row.items()} for row in outputs])

    class Counting(OneWeight):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"index": torch.tensor(float(batch_idx))}

    fit(Counting, prepare=lambda trial: trial.callbacks.update(watching=Watching()), max_length=Batch(1))
    assert log == ["start", [{"index": 0.0}, {"index": 1.0}, {"index": 2.0}]]


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


@pytest.mark.api("8.3b")
@pytest.mark.parametrize(
    ("wanted", "asked", "trained"), [(Batch(4), Batch(2), 4), (None, Batch(2), 2), (Batch(4), None, 4)]
)
def test_the_searchers_length_counts_where_there_is_one(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture, wanted: Any, asked: Any, trained: int
) -> None:
    host.max_length = wanted
    assert fit(OneWeight, max_length=asked).weight == one_weight(trained)
    assert ("is not used" in caplog.text) == (wanted is not None and asked is not None)


@pytest.mark.api("8.4b")
def test_the_kinds_of_boundaries_can_be_imported() -> None:
    from dray.pytorch import _TrainBoundaryType

    assert {"TRAIN", "VALIDATE", "CHECKPOINT", "REPORT"} == {kind.name for kind in _TrainBoundaryType}


@pytest.mark.api("8.9")
def test_test_mode_needs_a_length_too(fit: Fit) -> None:
    with pytest.raises(ValueError, match="needs max_length"):
        fit(OneWeight, test_mode=True)


@pytest.mark.api("8.8")
def test_a_resumed_run_has_no_step_zero(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    fit(OneWeight, max_length=Batch(1))
    again = FakeHost(tmp_path / "again")
    fit(OneWeight, again, max_length=Batch(2), step_zero_validation=True, latest_checkpoint=host.checkpoints()[0])
    assert [report.batches for report in again.reports] == [2]


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
