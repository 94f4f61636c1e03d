"""LR schedules of a run that is resumed with another length: those that the trial made for it follow the new length."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from dray.pytorch.lr_scheduler import LRScheduler

log = logging.getLogger(__name__)

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
    asked: bool,
) -> None:
    """Replace, in a checkpoint's state, schedules that were made for `before` batches by those made for `now`.

    The trial's constructor has made them at step 0, and here they are stepped to the saved position: most can't be
    moved to it otherwise, as each rate follows from the one before. A schedule that was made with the same arguments as
    the saved one was not made for the length, and continues as saved, with a warning if it may have an end.

    Args:
        state: what `Optimisation.load_state_dict` loads next.
        schedules, optimizers: as the trial's constructor has made them.
        asked: the trial has called `get_total_batches`: schedules with functions (LambdaLR), which can't be compared,
            are then taken to depend on it.
    """
    saved, groups = state.get("lr_schedulers_state_dict", []), state.get("optimizers_state_dict", [])
    if len(saved) != len(schedules) or len(groups) != len(optimizers):
        return  # an error when it is loaded
    made = [copy.deepcopy([_without_parameters(group) for group in each.param_groups]) for each in optimizers]
    replayed = _replay([each._scheduler for each in schedules], [part.get("last_epoch", 0) for part in saved])
    for index, schedule in enumerate(schedules):
        scheduler, name = schedule._scheduler, type(schedule._scheduler).__name__
        if replayed and (_differ(schedule.state_dict(), saved[index]) or (asked and _has_functions(scheduler))):
            saved[index] = schedule.state_dict()
            number = next(n for n, each in enumerate(optimizers) if each is schedule.optimizer)
            rows = zip(groups[number]["param_groups"], optimizers[number].param_groups, made[number], strict=False)
            for target, group, first in rows:
                # The rate, and what else the schedule sets (momentum). The rest is the checkpoint's.
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


def _replay(schedulers: Sequence[Any], positions: Sequence[int]) -> bool:
    """Step schedulers to positions, in turns, as several may change one optimizer; returns whether all took them."""
    steps = [
        position
        if isinstance(each, lr_scheduler.LRScheduler) and not isinstance(each, lr_scheduler.ReduceLROnPlateau)
        else 0
        for each, position in zip(schedulers, positions, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules that step before the optimizer
        try:
            for number in range(max(steps, default=0)):
                for each, position in zip(schedulers, steps, strict=True):
                    if number < position:
                        each.step()
        except (ValueError, TypeError):  # it ends before; or its step() needs an argument
            return False
    return True


def _has_functions(scheduler: Any) -> bool:
    inner = getattr(scheduler, "_schedulers", ())
    return isinstance(scheduler, (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)) or any(
        map(_has_functions, inner)
    )


def _differ(made: Any, saved: Any) -> bool:
    """Whether two states at one position are those of schedules with different arguments."""
    if isinstance(made, dict) and isinstance(saved, dict):
        # Not the rates, which the trial's own code may have changed; nor what another version of torch does not save.
        return any(_differ(made[key], saved[key]) for key in (made.keys() & saved.keys()) - {"_last_lr", "base_lrs"})
    if isinstance(made, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(made) != len(saved) or any(map(_differ, made, saved))
    return bool(made != saved)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
