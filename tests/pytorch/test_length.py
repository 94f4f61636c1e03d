"""How long a trial trains, as its constructor can ask: in an experiment, locally, extended, and loaded again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from dray import pytorch
from dray.pytorch import Batch, Epoch, loaders
from dray.training.units import ENDLESS, Records, TrainUnit
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight
from tests.pytorch.test_context import make, ranks


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
