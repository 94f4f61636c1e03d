"""Where training is right now: shared by the executor, which moves it, and the trial's context, which is asked."""

from __future__ import annotations


class Cursor:
    """The batch in hand. Unlike `Progress` it is mutable, and means nothing once training has ended.

    Attributes:
        batch_idx: the batch being trained, from 0, None before training.
        epoch_length: batches an epoch, None for one endless epoch.
        initial_batch: the batch that this run starts at, 0 for a fresh trial.
        stop_requested: the trial asks to end at the next boundary.
        drawn: seeds of epochs' orders, where they are drawn (see `pytorch.DataLoader`); None where they are not.
    """

    __slots__ = ("batch_idx", "drawn", "epoch_length", "initial_batch", "stop_requested")

    def __init__(self) -> None:
        self.batch_idx: int | None = None
        self.epoch_length: int | None = None
        self.initial_batch = 0
        self.stop_requested = False
        self.drawn: dict[int, int] | None = None

    def epoch_of(self, batch_idx: int) -> int:
        return 0 if self.epoch_length is None else batch_idx // self.epoch_length

    def drawn_from(self, batches: int) -> dict[int, int] | None:
        """What is drawn of the epochs that are not over after so many batches."""
        if self.drawn is None:
            return None
        return {epoch: seed for epoch, seed in self.drawn.items() if epoch >= self.epoch_of(batches)}

    def starts_epoch(self, batch_idx: int) -> bool:
        return batch_idx % self.epoch_length == 0 if self.epoch_length else batch_idx == 0

    def ends_epoch(self, batch_idx: int) -> bool:
        return bool(self.epoch_length) and (batch_idx + 1) % self.epoch_length == 0  # type: ignore[operator]
