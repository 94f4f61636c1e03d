"""`Trainer.fit()`, tested by a trial whose weights and losses are known in closed form."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch
from dray.training.executor import Executor
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FULL, FakeHost, OneWeight, callback, fails, one_weight, trial


def losses(start: int, stop: int) -> float:
    """The average loss of batches start..stop-1."""
    return sum((1 - one_weight(i)) ** 2 for i in range(start, stop)) / (stop - start)


@pytest.mark.api("1.2", "6.6", "8.4")
def test_weights_and_metrics_are_those_of_the_closed_form(fit: Fit, host: FakeHost) -> None:
    made = fit(OneWeight, max_length=Batch(7), reporting_period=Batch(3), validation_period=Epoch(1))
    assert made.weight == one_weight(7)
    assert [(r.batches, r.epochs) for r in host.reports] == [(3, 0.6), (5, 1.0), (6, 1.2), (7, 1.4)]
    assert [r.training for r in host.reports] == [{"loss": losses(a, b)} for a, b in ((0, 3), (3, 5), (5, 6), (6, 7))]
    validated = {5: (1 - one_weight(5)) ** 2, 7: (1 - one_weight(7)) ** 2}
    assert {r.batches: r.validation["validation_loss"] for r in host.reports if r.validation} == validated
    assert made.seen == [(i // 5, i) for i in range(7)]


@pytest.mark.api("8.16")
def test_rungs_are_validated_saved_and_reported_as_deciding(fit: Fit, host: FakeHost) -> None:
    host.max_length, host.rungs = Epoch(4), [Epoch(1), Epoch(2), Epoch(4)]
    fit(OneWeight, checkpoint_policy="none")
    assert [(r.batches, r.decides, r.validation is not None, r.checkpoint is not None) for r in host.reports] == [
        (5, True, True, True),
        (10, True, True, True),
        (20, True, True, True),
    ]


@pytest.mark.api("8.16")
def test_a_stop_verdict_ends_training_and_saves(fit: Fit, host: FakeHost) -> None:
    host.stop_at = 4
    made = fit(OneWeight, max_length=Batch(9), reporting_period=Batch(2))
    assert made.weight == one_weight(4)
    assert [(r.batches, r.validation, r.checkpoint is not None) for r in host.reports] == [
        (2, None, False),
        (4, None, False),
        (4, None, True),
    ]


@pytest.mark.api("2.12")
def test_a_stop_requested_in_the_constructor_ends_training_at_the_first_boundary(fit: Fit, host: FakeHost) -> None:
    stopping = trial(at_init=lambda self: self.context.set_stop_requested(True))
    made = fit(stopping, max_length=Batch(9), reporting_period=Batch(2))
    assert made.weight == one_weight(2)
    assert len(host.checkpoints()) == 1
    assert all(r.validation is None for r in host.reports)

    context = made.context
    assert context.get_stop_requested()
    again = pytorch.Trainer(made, context)
    again.fit(max_length=Batch(5), reporting_period=Batch(2), latest_checkpoint=host.checkpoints()[0])
    assert made.weight == one_weight(5), "a request counts for one fit()"
    context.set_stop_requested(True)
    again.fit(max_length=Batch(9), reporting_period=Batch(2), latest_checkpoint=host.checkpoints()[-1])
    assert made.weight == one_weight(6), "and a new one between two of them for the next"


@pytest.mark.api("8.11")
def test_should_exit_leaves_at_once_and_saves(fit: Fit, host: FakeHost) -> None:
    assert fit(fails(pytorch.ShouldExit(), at=3), max_length=Batch(9)).weight == one_weight(3)
    assert [(r.batches, r.validation) for r in host.reports] == [(3, None)]
    assert len(host.checkpoints()) == 1
    fit(fails(pytorch.ShouldExit(skip_exit_checkpoint=True), at=3), max_length=Batch(9))
    assert len(host.checkpoints()) == 1


@pytest.mark.api("8.11")
@pytest.mark.parametrize(
    ("hook", "trained"),
    [
        ("on_training_start", 0),
        ("on_training_epoch_start", 0),
        ("on_training_workload_end", 5),
        ("on_validation_end", 5),
    ],
)
def test_callbacks_may_leave_too(fit: Fit, host: FakeHost, hook: str, trained: int) -> None:
    def leave(*args: Any, **kwargs: Any) -> None:
        raise pytorch.ShouldExit

    assert fit(OneWeight, callbacks=callback(**{hook: leave}), max_length=Batch(5)).weight == one_weight(trained)
    assert [Path(checkpoint).name for checkpoint in host.checkpoints()] == ["checkpoint_5"] * bool(trained)


@pytest.mark.api("8.12")
def test_invalid_hyperparameters_are_raised_after_saving(fit: Fit, host: FakeHost) -> None:
    class Invalid(OneWeight):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            raise pytorch.InvalidHP("lr is too large")

    with pytest.raises(pytorch.InvalidHP, match="lr is too large"):
        fit(Invalid, max_length=Batch(3))
    assert [(r.batches, r.checkpoint is not None) for r in host.reports] == [(3, True)]


@pytest.mark.api("8.13")
def test_other_exceptions_propagate_without_a_checkpoint(fit: Fit, host: FakeHost) -> None:
    with pytest.raises(KeyError, match="oops"):
        fit(fails(KeyError("oops"), at=1), max_length=Batch(3))
    assert host.reports == []


def test_a_stop_iteration_of_the_trial_is_an_error_and_no_end(fit: Fit) -> None:
    with pytest.raises(StopIteration):
        fit(trial(train_batch=lambda self, batch, epoch_idx, batch_idx: next(iter(()))), max_length=Batch(3))


@pytest.mark.api("8.7", "8.16")
def test_policy_best_saves_what_the_host_finds_best(fit: Fit, host: FakeHost) -> None:
    # w goes 0, 3, -3, 9: each validation is worse than the one before.
    fit(trial(lr=1.5), max_length=Batch(4), validation_period=Batch(1))
    assert [r.batches for r in host.reports if r.checkpoint] == [1, 4]


@pytest.mark.api("8.7")
def test_policy_best_acts_as_all_where_there_is_no_best(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.best_supported = False
    fit(OneWeight, max_length=Batch(3), validation_period=Batch(1), checkpoint_policy="best")
    assert [r.batches for r in host.reports if r.checkpoint] == [1, 2, 3]
    assert "this run uses 'all'" in caplog.text


@pytest.mark.api("8.7")
@pytest.mark.parametrize(("period", "saved"), [(None, [1, 2, 3, 4, 5]), (Batch(2), [2, 4, 5])])
def test_default_policy_where_there_is_no_best_obeys_the_period_and_says_nothing(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture, period: Batch | None, saved: list[int]
) -> None:
    host.best_supported = False
    fit(OneWeight, max_length=Batch(5), validation_period=Batch(1), checkpoint_period=period)
    assert [r.batches for r in host.reports if r.checkpoint] == saved
    assert not caplog.records


@pytest.mark.api("8.9")
def test_test_mode_trains_one_batch_and_validates_one(fit: Fit, host: FakeHost) -> None:
    validated: list[int] = []
    counting = trial(at_validation=lambda self, batch_idx: validated.append(batch_idx))
    made = fit(counting, max_length=Epoch(9), test_mode=True)
    assert (len(made.seen), validated, len(host.checkpoints())) == (1, [0], 1)


@pytest.mark.api("2.17", "2.20")
@pytest.mark.parametrize("average", [True, False])
def test_aggregation_steps_every_nth_batch_on_the_mean_or_the_sum(fit: Fit, average: bool) -> None:
    def at_init(self: OneWeight) -> None:
        still = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.context.wrap_optimizer(still, average_aggregated_gradients=average)

    made = fit(trial(at_init=at_init), init={"aggregation_frequency": 2}, max_length=Batch(5))
    assert made.weight == pytest.approx(one_weight(2, lr=0.25 if average else 0.5))


@pytest.mark.api("2.19", "2.20")
def test_gradients_are_clipped_after_averaging_and_before_the_step(fit: Fit) -> None:
    seen: list[float] = []

    class Clipping(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.context.backward(loss)

            def clip(parameters: Any) -> None:
                (parameter,) = parameters
                seen.append(parameter.grad.item())
                parameter.grad.clamp_(-1, 1)

            self.context.step_optimizer(self.optimizer, clip_grads=clip)
            return loss

    made = fit(Clipping, init={"aggregation_frequency": 2}, max_length=Batch(2))
    assert seen == [-2.0]
    assert made.weight == 0.25
    assert made.model.weight.grad is None


@pytest.mark.api("2.19")
def test_gradients_stay_without_auto_zero(fit: Fit) -> None:
    class Keeping(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
            return loss

    assert fit(Keeping, max_length=Batch(1)).model.weight.grad.item() == -2.0


@pytest.mark.api("1.11")
def test_models_train_in_train_mode_and_validate_in_eval_mode_without_gradients(fit: Fit) -> None:
    modes: list[tuple[str, bool, bool]] = []
    watching = trial(
        at_batch=lambda self, _: modes.append(("train", self.model.training, torch.is_grad_enabled())),
        at_validation=lambda self, _: modes.append(("validate", self.model.training, torch.is_grad_enabled())),
    )
    fit(watching, max_length=Batch(2), validation_period=Batch(1))
    assert set(modes) == {("train", True, True), ("validate", False, False)}


@pytest.mark.api("1.11")
def test_modules_train_in_the_mode_that_the_trial_left_them_in(fit: Fit) -> None:
    seen: list[tuple[bool, ...]] = []

    class Merging(nn.Linear):
        """Must be told that training begins or continues, as LoRA's layers that merge their weights in eval mode."""

        ready = False

        def train(self, mode: bool = True) -> Any:
            self.ready = mode
            return super().train(mode)

    class Frozen(OneWeight):
        def at_init(self) -> None:
            self.net = self.context.wrap_model(nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(), Merging(1, 1)))
            self.net[0].eval()
            self.teacher = self.context.wrap_model(nn.Sequential(nn.Dropout())).eval()

        def at_batch(self, batch_idx: int) -> None:
            norm, dropout, merging = self.net
            seen.append((norm.training, dropout.training, self.teacher[0].training, merging.ready))
            if batch_idx == 2:
                dropout.eval()

        def at_validation(self, batch_idx: int) -> None:
            assert not any(module.training for module in [*self.net.modules(), *self.teacher.modules()])

    made = fit(Frozen, max_length=Batch(4), validation_period=Batch(1), step_zero_validation=True)
    assert seen == [(False, True, False, True)] * 3 + [(False, False, False, True)]
    assert not made.net.training, "to predict with"


def test_a_model_in_eval_mode_that_is_trained_is_warned_of(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fit(OneWeight, max_length=Batch(1))
    assert "eval mode" not in caplog.text
    made = fit(OneWeight, max_length=Batch(2), prepare=lambda trial: trial.model.eval())
    assert "a model that an optimizer trains is in eval mode" in caplog.text
    assert made.weight == one_weight(2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_average_of_the_weights_that_no_checkpoint_holds_is_warned_of(
    fit: Fit, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    class Averaging(OneWeight):
        def at_init(self) -> None:
            average = torch.optim.swa_utils.AveragedModel(self.model)
            self.average = self.context.wrap_model(average) if wrapped else average
            self.teacher, self.same = nn.Linear(1, 1), self.model

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            self.average.update_parameters(self.model)
            return metrics

    fit(Averaging, max_length=Batch(3), validation_period=Batch(1))
    warned = [message for message in caplog.messages if "is not wrapped" in message]
    assert [message.split(",")[0] for message in warned] == ([] if wrapped else ["training changes self.average"])


def test_parts_in_eval_mode_that_are_meant_are_not_warned_of(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    class Finetuning(OneWeight):
        def at_init(self) -> None:
            backbone = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval().requires_grad_(False)
            self.net = self.context.wrap_model(nn.Sequential(backbone, nn.Linear(1, 1)))
            self.context.wrap_optimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))

    fit(Finetuning, max_length=Batch(1))
    fit(
        trial(at_batch=lambda self, _: self.model.train()),
        max_length=Batch(1),
        prepare=lambda trial: trial.model.eval(),
    )
    assert "eval mode" not in caplog.text
    fit(Finetuning, max_length=Batch(1), prepare=lambda trial: trial.net[0].requires_grad_(True))
    assert "a part of it with dropout is" in caplog.text


class Stepless(OneWeight):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        return loss


class StepsBesideTheContext(OneWeight):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss


class Replaced(OneWeight):
    def at_init(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))


class Alternating(OneWeight):
    """As a GAN's: two optimizers, one a batch, and gradients that stay."""

    def at_init(self) -> None:
        self.other = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer([self.optimizer, self.other][batch_idx % 2], auto_zero_grads=False)
        return loss


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        (Stepless, "no context.step_optimizer(optimizer) was called"),
        (StepsBesideTheContext, "no context.step_optimizer(optimizer) was called"),
        (Replaced, "the optimizers' parameters are in no wrapped model, or had no gradients"),
        (Alternating, ""),
    ],
)
def test_training_that_does_nothing_is_warned_of_once(
    fit: Fit, caplog: pytest.LogCaptureFixture, kind: Any, warning: str
) -> None:
    fit(kind, max_length=Batch(20), reporting_period=Batch(2))
    told = [record.message for record in caplog.records if "have trained no wrapped model" in record.message]
    assert len(told) == (1 if warning else 0)
    assert all(warning in message for message in told)


def test_an_aggregation_longer_than_a_report_is_not_warned_of(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fit(OneWeight, init={"aggregation_frequency": 7}, max_length=Batch(8), reporting_period=Batch(1))
    assert "trained no wrapped model" not in caplog.text


class OneIdle(OneWeight):
    """One of its three optimizers never steps, and another one steps rarely."""

    def at_init(self) -> None:
        self.rare, self.idle = (
            self.context.wrap_optimizer(kind(self.model.parameters(), lr=0.0))
            for kind in (torch.optim.SGD, torch.optim.Adam)
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx % 90 == 89:
            self.context.step_optimizer(self.rare)
        return metrics


@pytest.mark.parametrize("aggregation", [1, 3])
def test_a_wrapped_optimizer_that_never_steps_is_warned_of_once(
    fit: Fit, caplog: pytest.LogCaptureFixture, aggregation: int
) -> None:
    init = {"aggregation_frequency": aggregation}
    fit(OneIdle, init=init, max_length=Batch(99), reporting_period=Batch(10))
    assert "has not called context.step_optimizer() for it" not in caplog.text, "it may still come"
    fit(OneIdle, init=init, max_length=Batch(220), reporting_period=Batch(10))
    told = [each.message for each in caplog.records if "has not called context.step_optimizer()" in each.message]
    assert [message[:34] for message in told] == ["optimizer 2 (Adam) is wrapped, but"]


def test_metrics_that_are_text_or_vectors_are_warned_of_once_by_name(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    class Wordy(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"]
            return {"loss": loss, "none": None, "each": torch.ones(2), "phase": "warm", "flag": True, "nan": math.nan}

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"validation_loss": 1.0, "matrix": [[1, 0], [0, 1]], "absent": None, "best_class": "cat"}

    full = trial(Wordy, evaluate_batch=pytorch.PyTorchTrial.evaluate_batch)
    fit(full, max_length=Batch(6), validation_period=Batch(2), reporting_period=Batch(1))
    told = [each.message.split(" is not one number")[0] for each in caplog.records if "one number" in each.message]
    assert sorted(told) == [
        "train_batch(): the metric 'each'",
        "train_batch(): the metric 'phase'",
        "validation: the metric 'best_class'",
        "validation: the metric 'matrix'",
    ]
    assert host.reports[0].training == {
        "loss": 1.0,
        "each": None,
        "phase": None,
        "flag": 1.0,
        "nan": pytest.approx(math.nan, nan_ok=True),
    }


@pytest.mark.api("1.7")
def test_batch_idx_of_a_validation_starts_at_zero_each_time(fit: Fit) -> None:
    seen: list[int] = []
    indexed = trial(at_validation=lambda self, batch_idx: seen.append(batch_idx))
    fit(indexed, max_length=Batch(2), validation_period=Batch(1))
    assert seen == [0, 1, 2, 0, 1, 2]


@pytest.mark.api("1.9")
def test_metrics_are_reduced_as_the_trial_says(fit: Fit, host: FakeHost) -> None:
    class Reducing(OneWeight):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {name: torch.tensor(float(batch_idx)) for name in ("avg", "sum", "max", "min", "avg_over_records")}

        def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
            return {name: pytorch.Reducer[name.upper()] for name in ("avg", "sum", "max", "min", "avg_over_records")}

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(9, 1)), batch_size=4)

    fit(Reducing, max_length=Batch(1))
    weighted = (4 * 0 + 4 * 1 + 1 * 2) / 9
    expected = {"avg": 1.0, "sum": 3.0, "max": 2.0, "min": 0.0, "avg_over_records": pytest.approx(weighted)}
    assert host.reports[-1].validation == expected


@pytest.mark.api("1.8")
def test_evaluate_full_dataset_gets_a_torch_loader_over_everything(fit: Fit, host: FakeHost) -> None:
    def evaluate(self: OneWeight, data_loader: Any) -> dict[str, Any]:
        assert isinstance(data_loader, torch.utils.data.DataLoader)
        assert not self.model.training
        return {"validation_loss": sum(len(batch) for batch in data_loader), "matrix": torch.eye(2)}

    fit(trial(**FULL, evaluate_full_dataset=evaluate), max_length=Batch(1))
    assert host.reports[-1].validation == {"validation_loss": 6, "matrix": [[1.0, 0.0], [0.0, 1.0]]}


@pytest.mark.api("6.5")
def test_custom_reducers_add_to_both_kinds_of_metrics(fit: Fit, host: FakeHost) -> None:
    class Custom(OneWeight):
        def at_init(self) -> None:
            self.count = self.context.wrap_reducer(len, name="count")

        def at_batch(self, batch_idx: int) -> None:
            self.count.update(1)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.count.update(1)
            return {}

    fit(Custom, max_length=Batch(5), reporting_period=Batch(3))
    assert [(r.training or {})["count"] for r in host.reports] == [3, 2]
    assert host.reports[-1].validation == {"count": 3}


@pytest.mark.api("2.29")
def test_a_loader_without_a_length_is_one_endless_epoch(fit: Fit, host: FakeHost) -> None:
    class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            while True:
                yield torch.ones(2, 1)

    streaming = trial(
        at_init=lambda self: self.context.experimental.disable_dataset_reproducibility_checks(),
        build_training_data_loader=lambda self: torch.utils.data.DataLoader(Endless(), batch_size=None),
    )
    made = fit(streaming, max_length=Batch(12))
    assert made.weight == one_weight(12)
    assert {epoch for epoch, _ in made.seen} == {0}
    assert host.reports[-1].epochs is None
    with pytest.raises(ValueError, match=r"max_length=Epoch\(1\) needs a sized training loader"):
        fit(streaming, max_length=Epoch(1))


@pytest.mark.api("2.30")
def test_data_that_ends_too_early_is_an_error_after_saving(fit: Fit, host: FakeHost) -> None:
    short = trial(
        at_init=lambda self: self.context.experimental.disable_dataset_reproducibility_checks(),
        build_training_data_loader=lambda self: torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=2),  # type: ignore
    )
    with pytest.raises(pytorch.DataExhausted, match=r"ended after 3 batches.*RepeatBatchSampler"):
        fit(short, max_length=Batch(9))
    assert [(r.batches, r.checkpoint is not None) for r in host.reports] == [(3, True)]


@pytest.mark.api("1.10")
def test_batches_of_a_type_of_your_own(fit: Fit) -> None:
    class Bag:
        def __init__(self, rows: list[torch.Tensor]) -> None:
            self.rows = torch.stack(rows)

    lengths: list[int] = []

    class Bags(OneWeight):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(torch.ones(4, 1), batch_size=2, collate_fn=Bag)

        build_validation_data_loader = build_training_data_loader

        def get_batch_length(self, batch: Any) -> int:
            lengths.append(len(batch.rows))
            return len(batch.rows)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch.rows)

    assert fit(Bags, max_length=Batch(3)).weight == one_weight(3)
    assert lengths == [2] * 5


class Neither(OneWeight):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch


class NoTokens(OneWeight):
    def get_batch_tokens(self, batch: Any) -> Any:
        batch.numel()


class OtherOrder(OneWeight):
    def train_batch(self, batch: Any, batch_idx: int, epoch: int) -> Any:  # type: ignore[override]
        return {}


class OtherNames(OneWeight):
    """As one writes it who does not look the names up."""

    def train_batch(self, data: Any, e: int, i: int) -> Any:  # type: ignore[override]
        return super().train_batch(data, e, i)

    def evaluate_batch(self, data: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().evaluate_batch(data, 0)


class OtherNameOfLoader(Neither):
    def evaluate_full_dataset(self, loader: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"batches": len(loader)}


def reduces(name: str, **where: bool) -> type[OneWeight]:
    """A trial with a reducer that gives a metric of this name."""

    class Reduces(OneWeight):
        def at_init(self) -> None:
            self.context.wrap_reducer(len, name=name, **where)

    return Reduces


@pytest.mark.parametrize(
    ("trial", "kind", "says"),
    [
        (NoTokens, TypeError, r"get_batch_tokens\(\) must return a number, .* got None"),
        (OtherOrder, TypeError, r"must take the arguments \(batch, epoch_idx, batch_idx\), in this order"),
        (reduces("validation_loss", for_training=False), ValueError, "a reducer and evaluate_batch.* both give"),
        (reduces("loss", for_validation=False), ValueError, "a reducer and train_batch.* both give .*'loss'"),
    ],
)
def test_the_error_of_a_faulty_trial_has_the_cure(fit: Fit, trial: type, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        fit(trial, max_length=Batch(2))


@pytest.mark.api("8.16")
def test_a_trial_may_name_the_arguments_of_its_methods(fit: Fit) -> None:
    assert fit(OtherNames, max_length=Batch(3)).weight == one_weight(3)
    fit(OtherNameOfLoader, max_length=Batch(1))


def test_a_trainer_takes_a_trial(host: FakeHost) -> None:
    with pytorch.init() as context, pytest.raises(TypeError, match=r"an instance of a pytorch\.PyTorchTrial"):
        pytorch.Trainer(OneWeight, context)  # type: ignore[arg-type]


class CompiledBefore(OneWeight):
    """Wrapped as `torch.compile` returns it."""

    def at_init(self) -> None:
        self.context.models.clear()
        # The compiler's own backend takes seconds; what surrounds the model is the same.
        self.model = self.context.wrap_model(torch.compile(self.model, backend="eager"))  # type: ignore[assignment]


class CompiledAfter(OneWeight):
    """Compiled as `wrap_model` returns it."""

    def at_init(self) -> None:
        self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.api("2.16")
@pytest.mark.parametrize("trial_class", [CompiledBefore, CompiledAfter])
def test_a_compiled_model_trains_and_its_checkpoints_are_those_of_the_model(
    fit: Fit, host: FakeHost, tmp_path: Path, trial_class: type[OneWeight]
) -> None:
    trial = fit(trial_class, max_length=Batch(6), checkpoint_period=Batch(3))
    assert isinstance(trial.model, torch._dynamo.OptimizedModule)
    assert float(trial.model.weight.detach()) == pytest.approx(one_weight(6))
    first, last = host.checkpoints()
    assert list(torch.load(Path(last) / "state-dict.pth", weights_only=True)["models_state_dict"][0]) == ["weight"]
    plain = fit(OneWeight, FakeHost(tmp_path / "plain"), max_length=Batch(8), latest_checkpoint=last)
    assert plain.weight == pytest.approx(one_weight(8))
    again = fit(trial_class, FakeHost(tmp_path / "again"), max_length=Batch(6), latest_checkpoint=first)
    assert float(again.model.weight.detach()) == pytest.approx(one_weight(6))


@pytest.mark.api("2.16")
def test_settings_of_ddp_are_checked_with_one_process_too(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        model = context.wrap_model(nn.Linear(1, 1), ddp_kwargs={"find_unused_parameters": True})
        assert type(model) is nn.Linear
        with pytest.raises(TypeError, match=r"takes no 'find_unused'; ddp_kwargs may hold .*find_unused_parameters"):
            context.wrap_model(nn.Linear(1, 1), ddp_kwargs={"find_unused": True})
        wrong: Any = [("find_unused_parameters", True)]
        with pytest.raises(TypeError, match="ddp_kwargs must be a dict, got"):
            context.wrap_model(nn.Linear(1, 1), ddp_kwargs=wrong)
        assert context.models == [model]


def test_progress_is_another_with_each_batch_that_is_trained_or_validated(fit: Fit, host: FakeHost) -> None:
    seen: list[tuple[str, tuple[int, int]]] = []

    watched = trial(
        at_batch=lambda self, _: seen.append(("train", host.progress())),
        at_validation=lambda self, _: seen.append(("validate", host.progress())),
    )
    fit(watched, max_length=Batch(3), validation_period=Batch(2))
    trained = [progress[0] for kind, progress in seen if kind == "train"]
    validated = [progress[0] for kind, progress in seen if kind == "validate"]
    assert trained == [0, 1, 2]
    assert sorted(set(validated)) == [2, 3]
    assert len(set(seen)) == len(seen), "none is seen twice"
    assert host.progress()[0] == 3


def test_a_failure_names_its_batch_and_the_executor_is_not_kept(
    fit: Fit, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors: list[weakref.ref[Executor]] = []
    init = Executor.__init__

    def remembered(self: Executor, **arguments: Any) -> None:
        init(self, **arguments)
        executors.append(weakref.ref(self))

    monkeypatch.setattr(Executor, "__init__", remembered)

    with pytest.raises(ArithmeticError) as error:
        fit(fails(ArithmeticError("it always ends so"), at=4), max_length=Batch(6))
    assert host.progress()[0] == 4
    del error
    gc.collect()
    assert [executor() for executor in executors] == [None]


NAN = math.nan


def reporting(values: Sequence[float], name: str = "loss") -> type[Any]:
    """A trial with this validation metric after each of its batches, one validation a batch."""

    def evaluate_batch(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {name: values[self.context.current_train_batch()]}

    return trial(evaluate_batch=evaluate_batch)


def length(fit: Fit, made: type[Any], host: FakeHost, stopping: pytorch.EarlyStopping, **arguments: Any) -> int:
    arguments = {"max_length": Batch(20), "validation_period": Batch(1), **arguments}
    fit(made, host, callbacks={"early": stopping}, **arguments)
    return host.reports[-1].batches if host.reports else 0


@pytest.mark.parametrize(
    ("values", "arguments", "ends"),
    [
        ([3, 2, 2, 2, 1, 1, 1, 1], {"patience": 3}, 8),
        ([3, 2, 1.96875, 1.875, 1.9, 1], {"patience": 2, "min_delta": 0.125}, 4),
        ([3, 2, 1.9375, 1.875, 1.8, 1.8], {"patience": 3, "min_delta": 0.125}, 8),  # 1.8 is better than 2 by more
        ([0.5, 0.6, 0.6, 0.7, 0.1, 0.2], {"patience": 2, "smaller_is_better": False}, 6),
        ([NAN, NAN, NAN], {"patience": 2}, 2),
        ([NAN, 1, NAN, 0, NAN, NAN], {"patience": 2}, 6),
        ([0] * 20, {"patience": 30}, 20),
    ],
)
def test_a_trial_ends_once_it_has_not_improved_for_its_patience(
    fit: Fit,
    host: FakeHost,
    values: list[float],
    arguments: dict[str, Any],
    ends: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    values = values + values[-1:] * (20 - len(values))
    assert length(fit, reporting(values), host, pytorch.EarlyStopping("loss", **arguments)) == ends
    assert host.reports[-1].checkpoint is not None
    assert caplog.text.count("early stopping: loss has not improved by more than") == (ends < 20)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_trial_that_is_cut_anywhere_ends_where_the_whole_one_does(fit: Fit, tmp_path: Path, cut: int) -> None:
    made = reporting([3, 2, 2, 1, 1, 1, 1, 0, 0, 0])
    first, second = FakeHost(tmp_path / "first", stop_at=cut), FakeHost(tmp_path / "second")
    assert length(fit, made, first, pytorch.EarlyStopping("loss", 3)) == cut
    resumed = first.checkpoints()[-1]
    assert length(fit, made, second, pytorch.EarlyStopping("loss", 3), latest_checkpoint=resumed) == 7


def test_a_trial_that_has_ended_does_not_train_on_and_a_fork_of_it_does(fit: Fit, tmp_path: Path) -> None:
    made = reporting([1] * 10)
    ended, again, fork = (FakeHost(tmp_path / name) for name in ("ended", "again", "fork"))
    assert length(fit, made, ended, pytorch.EarlyStopping("loss", 2)) == 3
    at = {"latest_checkpoint": ended.checkpoints()[-1]}
    assert length(fit, made, again, pytorch.EarlyStopping("loss", 2), **at) == 0
    fork.is_changed_fork = True
    assert length(fit, made, fork, pytorch.EarlyStopping("loss", 2), **at) == 6


def test_arguments_and_metrics_that_can_not_be_are_errors(fit: Fit, host: FakeHost) -> None:
    for wrong in ({"patience": 0}, {"min_delta": -1.0}, {"min_delta": NAN}):
        with pytest.raises(ValueError, match="patience must be >= 1, and min_delta >= 0"):
            pytorch.EarlyStopping("loss", **wrong)
    with pytest.raises(ValueError, match=r"'los' must be a number in the validation metrics, got .*validation_loss"):
        fit(OneWeight, callbacks={"early": pytorch.EarlyStopping("los", 1)}, max_length=Batch(2))
