"""Where training is: advanced by the executor, batch by batch, and read by the trial's context and the host."""

from __future__ import annotations


class Position:
    """The position in a training run. `Progress` is made of it, once per command of the loop.

    Attributes:
        batch_idx: the batch being trained, from 0, None before training.
        trained: batches trained in total. One that is interrupted does not count.
        epoch_length: batches per epoch, None for one endless epoch.
        initial_batch: the batch that this run starts at, 0 for a fresh trial.
        stop_requested: whether the trial has asked to stop at the next boundary.
        stop_obeyed: whether training has ended since then: it does not stop the next one.
    """

    __slots__ = ("batch_idx", "epoch_length", "initial_batch", "stop_obeyed", "stop_requested", "trained")

    def __init__(self) -> None:
        self.epoch_length: int | None = None
        self.stop_requested = False
        self.stop_obeyed = False
        self.start(0)

    def start(self, batches: int) -> None:
        """Set the batch that a run starts at."""
        self.batch_idx: int | None = None
        self.initial_batch = self.trained = batches

    @property
    def epochs(self) -> float | None:
        """Epochs trained, with fractions; None if they have no length."""
        return None if self.epoch_length is None else self.trained / self.epoch_length

    def epoch_of(self, batch_idx: int) -> int:
        return 0 if self.epoch_length is None else batch_idx // self.epoch_length

    def starts_epoch(self, batch_idx: int) -> bool:
        return batch_idx % self.epoch_length == 0 if self.epoch_length else batch_idx == 0

    def ends_epoch(self, batch_idx: int) -> bool:
        return bool(self.epoch_length) and (batch_idx + 1) % self.epoch_length == 0  # type: ignore[operator]
