"""The methods of a trial's context; how long a trial trains, and when schedules step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch, LRScheduler, loaders
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trial_run import TrialRun
from dray.training.units import ENDLESS, Records, TrainUnit
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight, trial


class Still:
    """A transport that answers for all ranks with one's own words."""

    def __init__(self, size: int) -> None:
        self.size = size

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        return [stuff] * self.size

    def close(self) -> None: ...


def ranks(size: int) -> DistributedContext:
    return DistributedContext(
        rank=0, size=size, local_rank=0, local_size=size, cross_rank=0, cross_size=1, transport=Still(size)
    )


def make(host: FakeHost, *, peers: DistributedContext | None = None, **arguments: Any) -> PyTorchTrialContext:
    peers = peers or DistributedContext()
    return PyTorchTrialContext(TrialRun(host=host, peers=peers, device=torch.device("cpu"), **arguments))


@pytest.fixture
def context(host: FakeHost) -> Iterator[PyTorchTrialContext]:
    with use_host(host), pytorch.init(hparams={"lr": 0.1, "global_batch_size": 9}) as context:
        yield context


@pytest.mark.api("2.1")
def test_hyperparameters_are_found_by_name(context: PyTorchTrialContext) -> None:
    assert context.get_hparams() == {"lr": 0.1, "global_batch_size": 9}
    assert context.get_hparam("lr") == 0.1


@pytest.mark.api("2.1")
def test_the_global_batch_size_as_a_hyperparameter_warns(
    context: PyTorchTrialContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert context.get_hparam("global_batch_size") == 9
    assert "get_per_slot_batch_size" in caplog.text


@pytest.mark.api("2.2")
def test_the_batch_is_split_over_the_slots(host: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    two = make(host, hparams={"global_batch_size": 9}, peers=ranks(2))
    assert (two.get_per_slot_batch_size(), two.get_global_batch_size()) == (4, 8)
    assert "from 9 to 8" in caplog.text


@pytest.mark.api("2.4")
def test_the_experiments_config_and_its_data_section(host: FakeHost) -> None:
    assert make(host, config={"name": "x", "data": {"url": "u"}}).get_data_config() == {"url": "u"}
    assert make(host, config={"name": "x"}).get_data_config() == {}


@pytest.mark.api("2.5", "2.7", "2.8")
def test_what_the_host_knows_is_passed_on(context: PyTorchTrialContext, host: FakeHost) -> None:
    assert (context.get_experiment_id(), context.get_trial_id(), context.get_trial_seed()) == (4, 9, 1)
    assert isinstance(context.get_tensorboard_path(), Path)
    assert context.get_initial_batch() == 0
    assert context.distributed.get_size() == 1
    assert context.device.type in ("cpu", "cuda")


@pytest.mark.api("2.10", "2.12")
def test_tensorboard_logging_is_switched(host: FakeHost) -> None:
    context = make(host, enable_tensorboard_logging=False)
    assert not context.get_enable_tensorboard_logging()
    context.set_enable_tensorboard_logging(True)
    assert context.get_enable_tensorboard_logging()


@pytest.mark.api("2.13")
def test_where_training_is(fit: Fit) -> None:
    seen: list[tuple[Any, ...]] = []

    def at_batch(self: OneWeight, batch_idx: int) -> None:
        context = self.context
        where = context.current_train_epoch(), context.current_train_batch()
        seen.append((*where, context.is_epoch_start(), context.is_epoch_end()))

    fit(trial(at_batch=at_batch), max_length=Batch(6))
    assert seen == [(i // 5, i, i % 5 == 0, i % 5 == 4) for i in range(6)]


def test_the_private_names_that_determineds_examples_ask_for(fit: Fit) -> None:
    seen: list[tuple[Any, ...]] = []

    class Asking(OneWeight):
        def build_training_data_loader(self) -> Any:
            seen.append((self.context._epoch_len, self.context._current_batch_idx))  # noqa: SLF001
            return super().build_training_data_loader()

        def at_batch(self, batch_idx: int) -> None:
            seen.append((self.context._epoch_len, self.context._current_batch_idx))  # noqa: SLF001

    fit(Asking, max_length=Batch(2))
    assert seen == [(None, None), (5, 0), (5, 1)]


@pytest.mark.api("2.15", "2.17", "2.22")
def test_wrapping_returns_and_lists_what_was_wrapped(context: PyTorchTrialContext) -> None:
    model = nn.Linear(1, 1)
    assert context.wrap_model(model) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert context.wrap_optimizer(optimizer) is optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH) is schedule
    assert (context.models, context.optimizers) == ([model], [optimizer])
    assert context.lr_schedulers[0].get_last_lr() == [0.1]


@pytest.mark.api("2.18")
@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_takes_what_tensor_backward_takes(context: PyTorchTrialContext) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x**2
    context.backward(y, gradient=torch.tensor([1.0, 10.0]), retain_graph=True)
    context.backward(y.sum(), create_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 44.0]
    assert x.grad.requires_grad


@pytest.mark.api("3.7")
def test_the_flag_for_torch_distributed_needs_a_process_group(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_TORCH_DISTRIBUTED", "true")
    with use_host(host), pytest.raises(RuntimeError, match="init_process_group"), pytorch.init():
        pass


class Planned(OneWeight):
    """Asks in its constructor, as for a schedule."""

    def at_init(self) -> None:
        self.total = self.context.get_total_batches(self.build_training_data_loader)


@pytest.mark.parametrize(("length", "batches"), [(Batch(7), 7), (Epoch(3), 15), (Records(9), 5)])
def test_a_trial_of_an_experiment_knows_how_long_it_trains(
    fit: Fit, tmp_path: Path, length: TrainUnit, batches: int
) -> None:
    host = FakeHost(tmp_path, max_length=length)
    trial = fit(Planned, host, init={"hparams": {"global_batch_size": 2}})
    assert trial.total == batches == host.reports[-1].batches
    assert trial.context.get_total_batches() == batches
    assert trial.context.get_epoch_length() == 5


def test_a_local_trial_knows_it_from_init(fit: Fit) -> None:
    trial = fit(Planned, init={"max_length": Epoch(2)})
    assert trial.total == 10
    assert trial.weight == one_weight(10)
    assert fit(Planned, init={"max_length": Batch(3)}, max_length=Batch(3)).weight == one_weight(3)
    with pytest.raises(
        ValueError, match=r"fit\(max_length=Epoch\(3\)\) differs from pytorch\.init\(max_length=Epoch\(2"
    ):
        fit(Planned, init={"max_length": Epoch(2)}, max_length=Epoch(3))
    with pytest.raises(TypeError, match=r"max_length must be a pytorch\.Batch or a pytorch\.Epoch, got 3"):
        fit(Planned, init={"max_length": 3})


@pytest.mark.api("8.3b")
def test_the_searchers_length_goes_before_both(fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = fit(Planned, FakeHost(tmp_path, max_length=Batch(4)), init={"max_length": Batch(9)}, max_length=Batch(9))
    assert (trial.total, trial.weight) == (4, one_weight(4))
    told = "(max_length=Batch(9)) is not used: the searcher's max_length is Batch(4)"
    assert [message for message in caplog.messages if told in message] == [f"init{told}", f"fit{told}"]


def test_an_unknown_length_is_an_error_with_the_cure(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"pass max_length to pytorch\.init\(\), not only to fit\(\)"):
        fit(Planned, max_length=Batch(3))
    with pytest.raises(RuntimeError, match=r"set searcher\.max_length"):
        make(FakeHost(tmp_path, max_length=ENDLESS)).get_total_batches()
    epochs = make(FakeHost(tmp_path, max_length=Epoch(3)))
    with pytest.raises(RuntimeError, match=r"get_epoch_length\(self\.build_training_data_loader\)"):
        epochs.get_total_batches()
    with pytest.raises(ValueError, match="generator has no __len__"):
        epochs.get_total_batches(torch.ones(1) for _ in range(3))


def test_an_epoch_of_a_loader_without_a_length_is_as_long_as_the_config_says(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"hparams": {"global_batch_size": 4}, "config": {"records_per_epoch": 21}}
    context = make(FakeHost(tmp_path, max_length=Epoch(3)), **arguments)
    assert context.get_total_batches(torch.ones(1) for _ in range(3)) == 15


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"drop_last": True}, {"batch_sampler": [[0, 1], [2]]}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_counted_as_the_trainer_counts(
    host: FakeHost, size: int, arguments: dict[str, Any], elastic: bool
) -> None:
    config = {"resources": {"slots_per_trial": {"min": 1, "max": 4}}} if elastic else {}
    context = make(host, peers=ranks(size), config=config)
    batch_size = {} if "batch_sampler" in arguments else {"batch_size": 3}

    class Sized(OneWeight):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(torch.arange(20.0), **batch_size, **arguments)

    trial, before = Sized.__new__(Sized), torch.get_rng_state()
    asked = context.get_epoch_length(trial.build_training_data_loader)
    assert torch.equal(torch.get_rng_state(), before)
    run = context._run  # noqa: SLF001 - as the trainer does
    data = loaders.training_data(trial.build_training_data_loader(), run, None)
    assert asked == loaders.batches_per_epoch(data.batches, run)


def test_a_loaded_trial_gets_what_it_trained_and_needs_no_data(fit: Fit, tmp_path: Path) -> None:
    host = FakeHost(tmp_path, max_length=Epoch(1))
    fit(Planned, host)

    class Elsewhere(Planned):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            raise FileNotFoundError("the data are on another machine")

    trial: Any = pytorch.load_trial_from_checkpoint_path(host.checkpoints()[-1], trial_class=Elsewhere)
    assert (trial.total, trial.weight) == (5, one_weight(5))
    assert trial.context.get_epoch_length() == 5
    assert pytorch.CheckpointLoadContext().get_total_batches() == 1


class Decay:
    """A function of a schedule that has state, which is saved."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return 1 - step / self.total


class HalfCosine(lr_scheduler.LRScheduler):
    """A user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int) -> None:
        self.total = total
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * math.cos(self.last_epoch / self.total * math.pi / 2) for base in self.base_lrs]


def warmed_up(optimizer: torch.optim.Optimizer, total: int) -> lr_scheduler.LRScheduler:
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, total - 2)
    return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), cosine], [2])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]] = {
    "cosine": lambda optimizer, total: lr_scheduler.CosineAnnealingLR(optimizer, T_max=total),
    "warm-up and cosine": warmed_up,
    "linear": lambda optimizer, total: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total),
    "polynomial": lambda optimizer, total: lr_scheduler.PolynomialLR(optimizer, total_iters=total, power=2),
    "one cycle": lambda optimizer, total: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
    "function": lambda optimizer, total: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total),
    "partial, as Hugging Face's": lambda optimizer, total: lr_scheduler.LambdaLR(
        optimizer, partial(lambda step, steps: 1 - step / steps, steps=total)
    ),
    "object": lambda optimizer, total: lr_scheduler.LambdaLR(optimizer, Decay(total)),
    "own": HalfCosine,
}


def scheduled(made: Callable[[torch.optim.Optimizer, int], Any], total: int | None = None) -> type[OneWeight]:
    """A trial with a schedule, for a fixed length unless `total` is None; `rates` are what it has trained with."""

    class Scheduled(OneWeight):
        def at_init(self) -> None:
            self.optimizer.param_groups[0]["momentum"] = 0.5  # one cycle sets it, too
            length = total or self.context.get_total_batches(self.build_training_data_loader)
            self.context.wrap_lr_scheduler(
                made(self.optimizer, length), pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP
            )
            self.rates: list[tuple[float, float]] = []

        def at_batch(self, batch_idx: int) -> None:
            [group] = self.optimizer.param_groups
            self.rates.append((group["lr"], group["momentum"]))

    return Scheduled


@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_extended_trial_continues_with_a_schedule_of_its_new_length(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    trial = scheduled(SCHEDULES[kind])
    short, halfway = (FakeHost(tmp_path / name, max_length=Epoch(1)) for name in ("short", "halfway"))
    whole = fit(trial, short, checkpoint_period=Batch(1))
    # Without an extension to the last bit: cosine's rates are computed from one another.
    resumed = fit(trial, halfway, latest_checkpoint=short.checkpoints()[2])
    assert resumed.rates == whole.rates[3:]
    assert resumed.weight == whole.weight
    assert not caplog.messages

    longer = FakeHost(tmp_path / "longer", max_length=Epoch(2))
    extended = fit(trial, longer, latest_checkpoint=short.checkpoints()[-1], checkpoint_period=Batch(1))
    at_once = fit(trial, FakeHost(tmp_path / "at once", max_length=Epoch(2)))
    assert extended.rates == at_once.rates[5:]
    # And resumed, that continues.
    again = fit(trial, FakeHost(tmp_path / "again", max_length=Epoch(2)), latest_checkpoint=longer.checkpoints()[1])
    assert again.rates == extended.rates[2:]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("kind", ["cosine", "linear", "function"])
def test_a_schedule_of_another_length_continues_with_a_warning(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    trial, host = scheduled(SCHEDULES[kind], total=8), FakeHost(tmp_path / "short", max_length=Epoch(1))
    whole = fit(trial, FakeHost(tmp_path / "at once", max_length=Batch(7)))
    fit(trial, host)
    longer = FakeHost(tmp_path / "long", max_length=Batch(7))
    assert fit(trial, longer, latest_checkpoint=host.checkpoints()[-1]).rates == whole.rates[5:]
    [told] = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    name = {"cosine": "CosineAnnealingLR", "linear": "LinearLR", "function": "LambdaLR"}[kind]
    rate = f"{whole.rates[5][0]:.4g}"
    assert f"{name} continues as saved, at the learning rate {rate}: if it is to end with the training" in told


def test_a_schedule_without_an_end_needs_no_warning(fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = scheduled(lambda optimizer, _: lr_scheduler.ExponentialLR(optimizer, 0.9))
    host = FakeHost(tmp_path / "short", max_length=Epoch(1))
    fit(trial, host)
    fit(trial, FakeHost(tmp_path / "long", max_length=Epoch(2)), latest_checkpoint=host.checkpoints()[-1])
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


Mode = LRScheduler.StepMode


class Counting:
    """A schedule that counts."""

    optimizer = None

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def get_last_lr(self) -> list[float]:
        return [float(self.steps)]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.api("5.2", "5.3", "5.4", "5.5")
@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        (Mode.STEP_EVERY_BATCH, {}, [1, 2, 3, 4]),
        (Mode.STEP_EVERY_BATCH, {"frequency": 3}, [0, 0, 1, 1, 1, 2, 2]),
        # In bursts with aggregation, and as often in all.
        (Mode.STEP_EVERY_BATCH, {"aggregation": 3}, [0, 0, 3, 3, 3, 6, 6]),
        (Mode.STEP_EVERY_BATCH, {"aggregation": 4, "frequency": 3}, [0, 0, 0, 1, 1, 1, 1, 2]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, {"aggregation": 2}, [0, 1, 1, 2, 2, 3]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, {"aggregation": 2, "frequency": 2}, [0, 0, 0, 1, 1, 1, 1, 2, 2]),
        (Mode.STEP_EVERY_EPOCH, {}, [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]),
        (Mode.STEP_EVERY_EPOCH, {"frequency": 2}, [0] * 9 + [1]),
        # With aggregation at the last step before the boundary.
        (Mode.STEP_EVERY_EPOCH, {"aggregation": 2}, [0, 0, 0, 1, 1, 1, 1, 1, 1, 2]),
        (Mode.STEP_EVERY_EPOCH, {"aggregation": 6, "epoch": 2}, [0, 0, 0, 0, 0, 3]),
        (Mode.STEP_EVERY_EPOCH, {"epoch": None}, [0] * 20),
        (Mode.MANUAL_STEP, {}, [0] * 5),
    ],
)
def test_steps_after_each_batch(mode: Mode, given: dict[str, Any], expected: list[int]) -> None:
    schedule = Counting()
    wrapped = LRScheduler(schedule, mode, given.get("frequency", 1))
    counts = []
    for batch_idx in range(len(expected)):
        wrapped.after_batch(
            batch_idx, epoch_length=given.get("epoch", 5), aggregation_frequency=given.get("aggregation", 1)
        )
        counts.append(schedule.steps)
    assert counts == expected


@pytest.mark.api("5.1")
def test_the_modes_have_determineds_numbers() -> None:
    assert {mode.name: mode.value for mode in Mode} == {
        "STEP_EVERY_EPOCH": 1,
        "STEP_EVERY_BATCH": 2,
        "MANUAL_STEP": 3,
        "STEP_EVERY_OPTIMIZER_STEP": 4,
    }


@pytest.mark.api("5.6")
def test_calls_are_passed_on() -> None:
    schedule = Counting()
    wrapped = LRScheduler(schedule, Mode.MANUAL_STEP)
    wrapped.step()
    assert wrapped.get_last_lr() == [1.0]
    assert wrapped.state_dict() == {"steps": 1}
    wrapped.load_state_dict({"steps": 7})
    assert schedule.steps == 7


def one_cycle(total: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total, cycle_momentum=False)
    return optimizer, LRScheduler(schedule, Mode.STEP_EVERY_BATCH)


def rates(optimizer: torch.optim.Optimizer, wrapped: LRScheduler, batches: range) -> list[float]:
    seen = []
    for batch_idx in batches:
        optimizer.step()
        wrapped.after_batch(batch_idx, epoch_length=5, aggregation_frequency=1)
        seen += wrapped.get_last_lr()
    return seen


def test_a_schedule_that_ended_is_named() -> None:
    optimizer, wrapped = one_cycle(4)
    rates(optimizer, wrapped, range(4))
    with pytest.raises(
        ValueError, match=r"schedule OneCycleLR has ended: .* total_steps=4, and has no step after batch 4;"
    ):
        rates(optimizer, wrapped, range(4, 5))
