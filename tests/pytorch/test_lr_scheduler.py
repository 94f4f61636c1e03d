"""When schedules step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dray.pytorch import LRScheduler

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


def steps_after(
    mode: Mode, batches: int, *, frequency: int = 1, epoch: int | None = 5, aggregation: int = 1
) -> list[int]:
    """How many steps have been made after each batch."""
    schedule = Counting()
    wrapped = LRScheduler(schedule, mode, frequency)
    counts = []
    for batch_idx in range(batches):
        wrapped.after_batch(batch_idx, epoch_length=epoch, aggregation_frequency=aggregation)
        counts.append(schedule.steps)
    return counts


@pytest.mark.api("5.2")
def test_every_batch() -> None:
    assert steps_after(Mode.STEP_EVERY_BATCH, 4) == [1, 2, 3, 4]
    assert steps_after(Mode.STEP_EVERY_BATCH, 7, frequency=3) == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.api("5.3")
def test_every_batch_comes_in_bursts_with_aggregation_and_as_often_in_all() -> None:
    assert steps_after(Mode.STEP_EVERY_BATCH, 7, aggregation=3) == [0, 0, 3, 3, 3, 6, 6]
    assert steps_after(Mode.STEP_EVERY_BATCH, 8, aggregation=4, frequency=3) == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.api("5.4")
def test_every_optimizer_step() -> None:
    assert steps_after(Mode.STEP_EVERY_OPTIMIZER_STEP, 6, aggregation=2) == [0, 1, 1, 2, 2, 3]
    assert steps_after(Mode.STEP_EVERY_OPTIMIZER_STEP, 9, aggregation=2, frequency=2) == [0, 0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.api("5.2")
def test_every_epoch_after_its_last_batch() -> None:
    assert steps_after(Mode.STEP_EVERY_EPOCH, 11) == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert steps_after(Mode.STEP_EVERY_EPOCH, 10, frequency=2) == [0] * 9 + [1]


@pytest.mark.api("5.5")
def test_every_epoch_with_aggregation_at_the_last_step_that_precedes_the_boundary() -> None:
    assert steps_after(Mode.STEP_EVERY_EPOCH, 10, aggregation=2) == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert steps_after(Mode.STEP_EVERY_EPOCH, 6, aggregation=6, epoch=2) == [0, 0, 0, 0, 0, 3]


def test_an_endless_epoch_never_ends() -> None:
    assert steps_after(Mode.STEP_EVERY_EPOCH, 20, epoch=None)[-1] == 0


def test_manual_is_left_to_the_trial() -> None:
    assert steps_after(Mode.MANUAL_STEP, 5) == [0] * 5


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


def test_a_schedule_and_a_frequency_are_needed() -> None:
    with pytest.raises(TypeError, match="needs a scheduler"):
        LRScheduler(None, Mode.MANUAL_STEP)
    with pytest.raises(ValueError, match="frequency must be"):
        LRScheduler(Counting(), Mode.MANUAL_STEP, frequency=0)


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


def test_torchs_schedules_are_stepped_for_real() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    wrapped = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), Mode.STEP_EVERY_BATCH)
    optimizer.step()
    wrapped.after_batch(0, epoch_length=None, aggregation_frequency=1)
    assert wrapped.get_last_lr() == [0.5]
