"""Where training is: advanced by the executor, batch by batch, and read by the trial's context and the host."""

from __future__ import annotations

import enum


class Stop(enum.Enum):
    """Whether the trial's own code has asked to stop. A request counts for one run of the loop."""

    NO = 0
    REQUESTED = 1
    #: Training has ended since the request.
    OBEYED = 2


class Position:
    """The position in a training run. `Progress` is made of it, once per command of the loop.

    Attributes:
        batch_idx: the batch being trained, from 0, None before training.
        trained: batches trained in total. One that is interrupted does not count.
        epoch_length: batches per epoch, None for one endless epoch.
        initial_batch: the batch that this run starts at, 0 for a fresh trial.
        stop: whether the trial has asked to stop at the next boundary.
    """

    __slots__ = ("batch_idx", "epoch_length", "initial_batch", "stop", "trained")

    def __init__(self) -> None:
        self.epoch_length: int | None = None
        self.stop = Stop.NO
        self.start(0)

    def start(self, batches: int) -> None:
        """Set the batch that a run starts at."""
        self.batch_idx: int | None = None
        self.initial_batch = self.trained = batches
        if self.stop is Stop.OBEYED:
            self.stop = Stop.NO

    def end(self) -> None:
        """Training has ended: a request to stop has been obeyed."""
        if self.stop is Stop.REQUESTED:
            self.stop = Stop.OBEYED

    @property
    def epochs(self) -> float | None:
        """Epochs trained, with fractions; None if they have no length."""
        return None if self.epoch_length is None else self.trained / self.epoch_length

    def epoch_of(self, batch_idx: int) -> int:
        return 0 if self.epoch_length is None else batch_idx // self.epoch_length

    def starts_epoch(self, batch_idx: int) -> bool:
        return batch_idx % self.epoch_length == 0 if self.epoch_length else batch_idx == 0

    def ends_epoch(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.epoch_length == 0 if self.epoch_length else False
