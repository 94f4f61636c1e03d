"""Lengths, periods and schedules resolved to batches."""

from __future__ import annotations

import pytest

from dray.training.plan import Schedule, batches_of, schedule_of
from dray.training.units import Batch, Epoch, Records, TrainUnit


class Odd:
    """A container that can't be iterated."""

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number % 2 == 1


def due(schedule: Schedule | None, limit: int = 12) -> list[int]:
    assert schedule is not None
    return [batches for batches in range(limit + 1) if schedule.due(batches)]


@pytest.mark.api("8.4")
@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (Batch(5), [5, 10]),
        (Batch(0), list(range(1, 13))),
        (Batch(-3), list(range(1, 13))),
        (Batch([1, 5, 99]), [1, 5]),
        (Batch(range(2, 5)), [2, 3, 4]),
        (Batch(Odd()), [1, 3, 5, 7, 9, 11]),
        (Epoch(1), [4, 8, 12]),
        (Epoch(2), [8]),
        (Epoch(0), [4, 8, 12]),
        (Epoch((1, 3)), [4, 12]),
        (Epoch(Odd()), [4, 12]),
    ],
)
def test_a_period_or_a_schedule_is_due_at(unit: TrainUnit, expected: list[int]) -> None:
    schedule = schedule_of(unit, name="validation_period", epoch_length=4)
    assert due(schedule) == expected
    assert schedule is not None
    at, walked = 0, []
    while (at := schedule.next(at, 13)) < 13:
        walked.append(at)
    assert walked == expected


def test_lengths_are_counted_in_batches() -> None:
    assert batches_of(Batch(7), name="max_length", epoch_length=None) == 7
    assert batches_of(Epoch(3), name="max_length", epoch_length=4) == 12
    assert batches_of(Records(100), name="max_length", epoch_length=4, global_batch_size=32) == 4


@pytest.mark.parametrize(
    ("length", "says"),
    [
        (Batch(0), "at least 1"),
        (Batch([1, 2]), "a schedule"),
        (Epoch(1), "needs a sized training loader"),
        (Records(9), "global_batch_size"),
    ],
)
def test_a_length_that_can_not_be_counted_says_why(length: TrainUnit, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        batches_of(length, name="max_length", epoch_length=None)


def test_an_epoch_period_without_epochs_says_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"validation_period=Epoch\(1\) needs a sized training loader.*Batch\(n\)"):
        schedule_of(Epoch(1), name="validation_period", epoch_length=None)


@pytest.mark.api("8.3")
@pytest.mark.parametrize("value", [None, 1.5, "3", True, object()])
def test_a_unit_takes_an_int_or_a_container(value: object) -> None:
    with pytest.raises(TypeError, match="Batch takes an int"):
        Batch(value)  # type: ignore[arg-type]


def test_units_are_equal_by_value_and_kind() -> None:
    assert Batch(3) == Batch(3)
    assert Batch(3) != Epoch(3)
    assert len({Batch(3), Batch(3), Epoch(3)}) == 2
