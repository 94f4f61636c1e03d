"""LR schedulers that the trainer steps."""

from __future__ import annotations

import copy
import enum
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from dray.training.units import is_int

log = logging.getLogger(__name__)


class LRScheduler:
    """A scheduler of `torch.optim.lr_scheduler` that the trainer steps.

    Args:
        scheduler: the scheduler.
        step_mode: when to step it.
        frequency: step only after every so many batches, epochs or optimizer steps, depending on step_mode. Default: 1.

    Raises:
        TypeError: step_mode is not a StepMode.
        ValueError: frequency is below 1.

    `context.wrap_lr_scheduler` makes one. Here one is made by hand, for a scheduler that the trial steps itself:

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    >>> schedule = LRScheduler(halving, LRScheduler.StepMode.MANUAL_STEP)
    >>> optimizer.step()
    >>> schedule.step()
    >>> schedule.get_last_lr()
    [0.5]
    """

    class StepMode(enum.Enum):
        """The time at which the trainer calls `scheduler.step()`.

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
        if not isinstance(step_mode, LRScheduler.StepMode):
            raise TypeError(f"step_mode must be a pytorch.LRScheduler.StepMode, got {step_mode!r}")
        if not is_int(frequency) or frequency < 1:
            raise ValueError(f"frequency must be an int >= 1, got {frequency!r}")
        self._scheduler, self._step_mode, self._frequency = scheduler, step_mode, frequency

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The scheduler's optimizer; None if the scheduler has no such attribute."""
        return getattr(self._scheduler, "optimizer", None)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler by hand."""
        self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates, one per parameter group of the optimizer."""
        return self._scheduler.get_last_lr()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, as saved in checkpoints."""
        return self._scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self._scheduler.load_state_dict(state_dict)

    def after_batch(self, batch_idx: int, *, epoch_length: int | None, aggregation_frequency: int) -> None:
        """Perform the steps that are due after a batch. Called by the trainer."""
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
        frequency, trained = self._frequency, batch_idx + 1
        match self._step_mode:
            case LRScheduler.StepMode.STEP_EVERY_BATCH:
                return trained // frequency - (trained - aggregation_frequency) // frequency
            case LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
                return int((trained // aggregation_frequency) % frequency == 0)
            case LRScheduler.StepMode.STEP_EVERY_EPOCH if epoch_length is not None:
                # Count the epochs that end after this step and no later than the optimizer's next one.
                before, after = batch_idx // epoch_length, (batch_idx + aggregation_frequency) // epoch_length
                return after // frequency - before // frequency
        return 0


_ENDLESS = (
    lr_scheduler.StepLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.ReduceLROnPlateau,
)


def follow_length(
    state: dict[str, Any],
    schedules: Sequence[LRScheduler],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    before: int,
    now: int,
    uses_total: bool,
) -> None:
    """In a checkpoint's state, replace schedules that were made for `before` batches with new ones for `now` batches.

    The trial's constructor made the new ones at step 0. Here they are stepped to the saved position, since each rate
    follows from the one before. A schedule with the same arguments as the saved one does not depend on the length, and
    continues as saved, with a warning if it may have an end. Schedules with functions (LambdaLR) can't be compared, and
    are assumed to depend on the length if the trial `uses_total` batches.
    """
    saved, groups = state.get("lr_schedulers_state_dict", []), state.get("optimizers_state_dict", [])
    if len(saved) != len(schedules) or len(groups) != len(optimizers):
        return  # loading the state raises an error
    initial = [
        copy.deepcopy([{key: group[key] for key in group if key != "params"} for group in each.param_groups])
        for each in optimizers
    ]
    replayed = _replay([each._scheduler for each in schedules], [part.get("last_epoch", 0) for part in saved])
    for index, schedule in enumerate(schedules):
        scheduler, name = schedule._scheduler, type(schedule._scheduler).__name__
        if replayed and (_differ(schedule.state_dict(), saved[index]) or (uses_total and _has_functions(scheduler))):
            saved[index] = schedule.state_dict()
            number = next(n for n, each in enumerate(optimizers) if each is schedule.optimizer)
            rows = zip(groups[number]["param_groups"], optimizers[number].param_groups, initial[number], strict=False)
            for target, group, first in rows:
                # Take the rate, and others that the schedule sets (momentum), from here; the rest from the checkpoint.
                target.update({key: group[key] for key in first if key == "lr" or group[key] != first[key]})
            log.info("%s follows the new length, %d batches instead of %d", name, now, before)
        elif not isinstance(scheduler, _ENDLESS):
            log.warning(
                "this run trains %d batches, the checkpoint's was to train %d, but %s continues as saved, at the "
                "learning rate %s: if it is to end with the training, make it for context.get_total_batches(...)",
                now,
                before,
                name,
                ", ".join(f"{float(rate):.4g}" for rate in saved[index].get("_last_lr", ["unknown"])),
            )


def keep_own(
    state: dict[str, Any], schedules: Sequence[LRScheduler], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """In the state of another trial's checkpoint, replace the schedules and the optimizers' hyperparameters with those
    that this trial's constructor made, at the saved positions of the schedules. Of a `ReduceLROnPlateau` the state is
    kept; its rate is this trial's own."""
    saved, groups = state.get("lr_schedulers_state_dict", []), state.get("optimizers_state_dict", [])
    if len(saved) != len(schedules) or len(groups) != len(optimizers):
        return  # loading the state raises an error
    schedulers = [each._scheduler for each in schedules]
    if _replay(schedulers, [part.get("last_epoch", 0) for part in saved]):
        for index, schedule in enumerate(schedules):
            if not isinstance(schedule._scheduler, lr_scheduler.ReduceLROnPlateau):
                saved[index] = schedule.state_dict()
    for optimizer, target in zip(optimizers, groups, strict=True):
        for own, group in zip(optimizer.param_groups, target["param_groups"], strict=False):
            group.update(copy.deepcopy({name: value for name, value in own.items() if name != "params"}))


def _replay(schedulers: Sequence[Any], positions: Sequence[int]) -> bool:
    """Step schedulers to positions, in turns since several may change one optimizer; return whether all got there."""
    steps = [
        position
        if isinstance(each, lr_scheduler.LRScheduler) and not isinstance(each, lr_scheduler.ReduceLROnPlateau)
        else 0
        for each, position in zip(schedulers, positions, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about schedulers that step before the optimizer
        try:
            for number in range(max(steps, default=0)):
                for each, position in zip(schedulers, steps, strict=True):
                    if number < position:
                        each.step()
        except (ValueError, TypeError):  # a scheduler ends before, or its step() needs an argument
            return False
    return True


def _has_functions(scheduler: Any) -> bool:
    inner = getattr(scheduler, "_schedulers", ())
    return isinstance(scheduler, (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)) or any(
        map(_has_functions, inner)
    )


def _differ(fresh: Any, saved: Any) -> bool:
    """Whether two states at the same position belong to schedules with different arguments."""
    if isinstance(fresh, dict) and isinstance(saved, dict):
        # Leaves out rates, which the trial's code may have changed, and keys that only one version of torch saves.
        return any(_differ(fresh[key], saved[key]) for key in (fresh.keys() & saved.keys()) - {"_last_lr", "base_lrs"})
    if isinstance(fresh, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(fresh) != len(saved) or any(map(_differ, fresh, saved))
    return bool(fresh != saved)
