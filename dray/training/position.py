"""The current batch: set by the executor, read by the trial's context."""

from __future__ import annotations


class Cursor:
    """The current batch. Unlike `Progress` it is mutable, and means nothing once training has ended.

    Attributes:
        batch_idx: the batch being trained, from 0, None before training.
        epoch_length: batches per epoch, None for one endless epoch.
        initial_batch: the batch that this run starts at, 0 for a fresh trial.
        stop_requested: whether the trial has asked to stop at the next boundary.
        stop_obeyed: whether training has ended since then: it does not stop the next one.
    """

    __slots__ = ("batch_idx", "epoch_length", "initial_batch", "stop_obeyed", "stop_requested")

    def __init__(self) -> None:
        self.batch_idx: int | None = None
        self.epoch_length: int | None = None
        self.initial_batch = 0
        self.stop_requested = False
        self.stop_obeyed = False

    def epoch_of(self, batch_idx: int) -> int:
        return 0 if self.epoch_length is None else batch_idx // self.epoch_length

    def starts_epoch(self, batch_idx: int) -> bool:
        return batch_idx % self.epoch_length == 0 if self.epoch_length else batch_idx == 0

    def ends_epoch(self, batch_idx: int) -> bool:
        return bool(self.epoch_length) and (batch_idx + 1) % self.epoch_length == 0  # type: ignore[operator]
