"""The progress of training: the single source of truth for skipping, epochs, schedules and checkpoints."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A point in a training run.

    `batches` are counted per slot, which is also the number of global batches. `validated` and `saved` are the batches
    at the last validation and the last checkpoint, None before the first.
    """

    batches: int = 0
    validated: int | None = None
    saved: int | None = None

    def trained(self, batches: int) -> Progress:
        assert batches >= self.batches, (batches, self)
        return replace(self, batches=batches)

    def just_validated(self) -> Progress:
        return replace(self, validated=self.batches)

    def just_saved(self) -> Progress:
        return replace(self, saved=self.batches)

    @property
    def is_saved(self) -> bool:
        """Whether nothing would be lost by leaving now; true if nothing was trained."""
        return self.saved == self.batches or self.batches == 0

    @classmethod
    def from_dict(cls, data: Mapping[str, int | None]) -> Progress:
        return cls(batches=data["batches"] or 0, validated=data.get("validated"), saved=data.get("saved"))


class StopRequest(enum.Enum):
    """A request of the trial's own code to stop, which applies to one run of the loop."""

    NO = 0
    REQUESTED = 1
    OBEYED = 2  # training has ended since the request


class Position:
    """The position in a training run, from which a `Progress` is made once per command of the loop."""

    __slots__ = ("batch_idx", "epoch_length", "initial_batch", "stop", "trained")

    def __init__(self) -> None:
        self.epoch_length: int | None = None  # batches per epoch, None for one endless epoch
        self.stop = StopRequest.NO  # whether the trial has asked to stop at the next boundary
        self.start(0)

    def start(self, batches: int) -> None:
        self.batch_idx: int | None = None  # the batch being trained, from 0; None before training
        self.initial_batch = self.trained = batches  # in total; an interrupted batch does not count
        if self.stop is StopRequest.OBEYED:
            self.stop = StopRequest.NO

    def end(self) -> None:
        if self.stop is StopRequest.REQUESTED:
            self.stop = StopRequest.OBEYED

    @property
    def epochs(self) -> float | None:
        """Epochs trained, with fractions; None if an epoch has no length."""
        return None if self.epoch_length is None else self.trained / self.epoch_length

    def epoch_of(self, batch_idx: int) -> int:
        return 0 if self.epoch_length is None else batch_idx // self.epoch_length

    def starts_epoch(self, batch_idx: int) -> bool:
        return batch_idx % self.epoch_length == 0 if self.epoch_length else batch_idx == 0

    def ends_epoch(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.epoch_length == 0 if self.epoch_length else False
