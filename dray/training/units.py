"""Lengths, periods and schedules of training in the user's units: `Batch(100)`, `Epoch([1, 5])`."""

from __future__ import annotations

from collections.abc import Container
from typing import TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int, and not a bool.

    >>> is_int(3), is_int(True), is_int(3.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


class TrainUnit:
    """A period, a schedule or a length in the unit of the subclass. Use `Batch` or `Epoch`.

    Args:
        value: an int for a length or a period (`Batch(100)`: every 100 batches; zero or less: every batch); or a
            container, anything that supports `in`, for a schedule counted from 1 (`Batch([1, 5, 10])`: after batches
            1, 5 and 10).

    Raises:
        TypeError: the value is neither.
    """

    def __init__(self, value: int | Container[int]) -> None:
        if not is_int(value) and (not isinstance(value, Container) or isinstance(value, (str, bytes))):
            raise TypeError(
                f"{type(self).__name__} takes an int (a period or a length) or a container of ints (a schedule), "
                f"got {value!r} of type {type(value).__name__}"
            )
        self.value: int | Container[int] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainUnit) and type(self) is type(other) and self.value == other.value

    def __hash__(self) -> int:
        return hash((type(self), repr(self.value)))


class Batch(TrainUnit):
    """Batches, each of which is one call of `train_batch` on every slot.

    >>> Batch(100)
    Batch(100)
    """


ENDLESS = Batch(2**53)  # the length of a trial whose end does not depend on a number of batches


class Epoch(TrainUnit):
    """Epochs, whole passes over the training data, each with as many batches as the chief's shard.

    >>> Epoch([1, 5])
    Epoch([1, 5])
    """


class Records(TrainUnit):
    """Records: `Records(n)` is the number of batches, rounded up, that contain n records at the global batch size.

    For lengths in an experiment's config only; `Trainer.fit()` takes `Batch` and `Epoch`.
    """


def amount(number: str, unit: str) -> str:
    """A length in words. Units other than batches, epochs and records have no plural.

    >>> amount("1", "epochs"), amount("2", "batches"), amount("1", "wall_clock")
    ('1 epoch', '2 batches', '1 wall_clock')
    """
    singular = {"batches": "batch", "epochs": "epoch", "records": "record"}
    return f"{number} {singular.get(unit, unit) if number == '1' else unit}"


def in_batches(period: TrainUnit | None, global_batch_size: int) -> TrainUnit | None:
    """Convert a period in records, which `fit()` does not take, to batches; return others unchanged.

    >>> in_batches(Records(100), 64)
    Batch(2)
    """
    if isinstance(period, Records) and isinstance(period.value, int):
        return Batch(-(-period.value // global_batch_size))
    return period
