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
