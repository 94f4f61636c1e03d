"""The plan of a training run: the batches at which the loop reports, validates, saves and ends."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from types import NoneType
from typing import Literal

from dray.training.progress import Progress
from dray.training.units import Batch, Epoch, Records, TrainUnit, is_int

Policy = Literal["best", "all", "none"]
POLICIES: tuple[Policy, ...] = ("best", "all", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The batches at which an action is due: all multiples of `period`, or only the `numbers`-th multiples.

    `Epoch([1, 5])` with 20 batches per epoch is `Schedule(period=20, numbers=(1, 5))`: due at 20 and at 100.
    """

    period: int
    numbers: Container[int] | None = None

    def due(self, batches: int) -> bool:
        number, rest = divmod(batches, self.period)
        return rest == 0 and number > 0 and (self.numbers is None or number in self.numbers)

    def next(self, batches: int, limit: int) -> int:
        """The first batch after `batches` at which the action is due, or `limit` if that comes first."""
        number = batches // self.period + 1
        if self.numbers is None:
            return min(number * self.period, limit)
        # A container can only be tested number by number; `limit` keeps the search short.
        while number * self.period < limit and number not in self.numbers:
            number += 1
        return min(number * self.period, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training run to perform."""

    length: int  # total batches, counted from the start of the trial
    epoch_length: int | None = None  # batches per epoch; None if the data have no length (one endless epoch)
    # When to publish training metrics, validate and save; None: only at the end.
    report: Schedule | None = None
    validate: Schedule | None = None
    checkpoint: Schedule | None = None
    rungs: tuple[int, ...] = ()  # batches at which the search decides, so the trial validates, saves and publishes
    policy: Policy = "all"  # save after a validation that is the experiment's best ("best"), after all or after none
    step_zero_validation: bool = False  # validate before the first batch of a fresh run
    test_mode: bool = False  # validate on one batch; `length` then allows for one batch of training

    def next_due(self, batches: int) -> int:
        """The next number of total batches, above `batches`, at which anything is due."""
        due = min((rung for rung in self.rungs if batches < rung), default=self.length)
        due = min(due, self.length)
        for schedule in (self.report, self.validate, self.checkpoint):
            if schedule is not None:
                due = schedule.next(batches, due)
        return due

    def ends(self, at: Progress) -> bool:
        return at.batches >= self.length

    def decides(self, at: Progress) -> bool:
        """Whether the search decides on the report published here."""
        return self.ends(at) or at.batches in self.rungs

    def validates(self, at: Progress) -> bool:
        return self.decides(at) or (self.validate is not None and self.validate.due(at.batches))

    def saves(self, at: Progress) -> bool:
        return self.checkpoint is not None and self.checkpoint.due(at.batches)

    def compares(self, at: Progress) -> bool:
        """Whether a validation here leads to a checkpoint only if it is the best so far."""
        return self.policy == "best" and not self.decides(at)

    def saves_validation(self, is_best: bool) -> bool:
        return self.policy == "all" or (self.policy == "best" and is_best)


FIRST_TRACED = 10
MAX_TRACED = 1000


def window_fault(begin: int, end: object) -> str:
    """The error in `end_after_batch`, the last batch that torch's profiler traces; "" if it is valid."""
    if is_int(end) and begin <= end < begin + MAX_TRACED:
        return ""
    return f"must be {begin} (begin_on_batch) to {begin + MAX_TRACED - 1}, as traces are held in memory, got {end!r}"


def batches_of(length: TrainUnit, *, name: str, epoch_length: int | None, global_batch_size: int | None = None) -> int:
    """Convert a length to batches.

    Raises:
        ValueError: it is a schedule, is below 1, or can't be converted without an epoch length or global batch size.
    """
    if not isinstance(length.value, int):
        raise ValueError(f"{name}={length!r} is a schedule; a length needs an int, such as {type(length).__name__}(10)")
    if length.value < 1:
        raise ValueError(f"{name} must be at least 1, got {length!r}")
    if isinstance(length, Epoch):
        return length.value * _sized(length, name, epoch_length)
    if isinstance(length, Records):
        if global_batch_size is None:
            raise ValueError(f"{name}={length!r} needs hparams['global_batch_size'], to be converted to batches")
        return -(-length.value // global_batch_size)
    return length.value


def check_length(length: TrainUnit | None, name: str) -> None:
    check_unit(length, name)
    if length is not None and not isinstance(length.value, int):
        raise TypeError(f"{name} must hold an int, for example pytorch.Epoch(1), got {length!r}")


def check_unit(unit: TrainUnit | None, name: str) -> None:
    if not isinstance(unit, (Batch, Epoch, NoneType)):
        raise TypeError(
            f"{name} must be a pytorch.Batch or a pytorch.Epoch, got {unit!r} of type {type(unit).__name__}"
        )


def schedule_of(unit: TrainUnit | None, *, name: str, epoch_length: int | None) -> Schedule | None:
    """Convert a period or a schedule to batches. An int of zero or less means every batch (or epoch)."""
    if unit is None:
        return None
    stride = _sized(unit, name, epoch_length) if isinstance(unit, Epoch) else 1
    if isinstance(unit.value, int):
        return Schedule(period=max(1, unit.value) * stride)
    numbers = unit.value
    # A set, because it may be tested after every batch.
    return Schedule(period=stride, numbers=frozenset(numbers) if isinstance(numbers, (list, tuple)) else numbers)


def _sized(unit: TrainUnit, name: str, epoch_length: int | None) -> int:
    if epoch_length is None:
        raise ValueError(
            f"{name}={unit!r} needs a sized training loader, but the one that build_training_data_loader() returned "
            "has no __len__; use pytorch.Batch(n), give the loader a length, or set records_per_epoch in the config"
        )
    return epoch_length
