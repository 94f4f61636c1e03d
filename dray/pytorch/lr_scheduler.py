"""LR schedulers, stepped by the trainer."""

from __future__ import annotations

import enum
from typing import Any

import torch

from dray.training.units import is_int


class LRScheduler:
    """A PyTorch LR scheduler, and when to step it.

    Args:
        scheduler: a scheduler of `torch.optim.lr_scheduler`.
        step_mode: when the trainer calls `scheduler.step()`.
        frequency: batches, epochs or optimizer steps (by step_mode) between its steps.

    Raises:
        TypeError: scheduler is None, or step_mode is not a StepMode.
        ValueError: frequency is below 1.

    `context.wrap_lr_scheduler` makes it. Made by hand, for a scheduler that the trial steps itself:

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    >>> schedule = LRScheduler(halving, LRScheduler.StepMode.MANUAL_STEP)
    >>> optimizer.step()
    >>> schedule.step()
    >>> schedule.get_last_lr()
    [0.5]
    """

    class StepMode(enum.Enum):
        """When `scheduler.step()` is called.

        Attributes:
            STEP_EVERY_EPOCH: after the last batch of an epoch; with gradient aggregation, after the last optimizer step
                before the end of the epoch.
            STEP_EVERY_BATCH: after every batch; with gradient aggregation, for all batches of an aggregation when the
                optimizer steps.
            MANUAL_STEP: never; the trial steps it.
            STEP_EVERY_OPTIMIZER_STEP: after every step of the optimizer.
        """

        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4

    def __init__(self, scheduler: Any, step_mode: StepMode, frequency: int = 1) -> None:
        if scheduler is None:
            raise TypeError("LRScheduler needs a scheduler of torch.optim.lr_scheduler, got None")
        if not isinstance(step_mode, LRScheduler.StepMode):
            raise TypeError(f"step_mode must be a pytorch.LRScheduler.StepMode, got {step_mode!r}")
        if not is_int(frequency) or frequency < 1:
            raise ValueError(f"frequency must be an int >= 1, got {frequency!r}")
        self._scheduler = scheduler
        self._step_mode = step_mode
        self._frequency = frequency

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The scheduler's optimizer; None if it has no such attribute."""
        return getattr(self._scheduler, "optimizer", None)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler by hand."""
        self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rates, one per parameter group of the optimizer."""
        return self._scheduler.get_last_lr()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, as saved in checkpoints."""
        return self._scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._scheduler.load_state_dict(state_dict)

    def after_batch(self, batch_idx: int, *, epoch_length: int | None, aggregation_frequency: int) -> None:
        """Step as often as is due after a batch. Called by the trainer."""
        if (batch_idx + 1) % aggregation_frequency == 0:
            for _ in range(self._steps_due(batch_idx, epoch_length, aggregation_frequency)):
                try:
                    self._scheduler.step()
                except ValueError:
                    total = getattr(self._scheduler, "total_steps", None)
                    if total is None or self._scheduler.last_epoch <= total:
                        raise
                    name = type(self._scheduler).__name__
                    raise ValueError(
                        f"the learning rate schedule {name} has ended: it was made for total_steps={total}, and has no "
                        f"step after batch {batch_idx}; make it as long as the training, with "
                        "total_steps=context.get_total_batches(...), which an extension of the search enlarges"
                    ) from None  # torch's own error says less

    def _steps_due(self, batch_idx: int, epoch_length: int | None, aggregation_frequency: int) -> int:
        """How many steps are due after a batch at which the optimizer stepped."""
        frequency, trained = self._frequency, batch_idx + 1
        match self._step_mode:
            case LRScheduler.StepMode.STEP_EVERY_BATCH:
                return trained // frequency - (trained - aggregation_frequency) // frequency
            case LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
                return int((trained // aggregation_frequency) % frequency == 0)
            case LRScheduler.StepMode.STEP_EVERY_EPOCH if epoch_length is not None:
                # Epochs that end after this step and no later than the optimizer's next one.
                before, after = batch_idx // epoch_length, (batch_idx + aggregation_frequency) // epoch_length
                return after // frequency - before // frequency
        return 0
