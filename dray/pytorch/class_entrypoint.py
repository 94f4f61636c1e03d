"""Trains a trial whose experiment's entrypoint is a class: the config has what a program would pass to `fit()`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dray.pytorch.init import init
from dray.pytorch.trainer import Trainer
from dray.pytorch.trial import PyTorchTrial
from dray.training.units import Batch, TrainUnit

log = logging.getLogger(__name__)


def train(
    trial_class: type[PyTorchTrial],
    config: Mapping[str, Any],
    *,
    max_length: TrainUnit | None = None,
    latest_checkpoint: str | None = None,
) -> None:
    """Train a trial, in a worker of an experiment.

    Args:
        trial_class: the trial's class.
        config: the experiment's config, with all defaults.
        max_length: the length, if the search sets none.
        latest_checkpoint: the checkpoint to resume from.
    """
    optimizations = config["optimizations"]
    with init(aggregation_frequency=optimizations["aggregation_frequency"]) as context:
        trial = trial_class(context)
        if optimizations["mixed_precision"] != "O0":
            if context._run.uses_amp or context._run.optimisation.scaler is not None:
                log.info(
                    "optimizations.mixed_precision has no effect: %s sets up mixed precision itself",
                    trial_class.__name__,
                )
            else:
                context.experimental.use_amp()
        Trainer(trial, context).fit(
            max_length=max_length,
            reporting_period=Batch(config["scheduling_unit"]),
            checkpoint_policy=config["checkpoint_policy"],
            latest_checkpoint=latest_checkpoint,
            step_zero_validation=config["perform_initial_validation"],
        )
