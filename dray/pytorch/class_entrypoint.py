"""A trial that is a class: what a program says for itself, the experiment's config says for it."""

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
    """One ``fit()``, where the host of a search is in use.

    Args:
        trial_class: of the trial.
        config: of the experiment, with all its defaults.
        max_length: where the search itself does not say when to end.
        latest_checkpoint: what to go on from.
    """
    optimizations = config["optimizations"]
    with init(aggregation_frequency=optimizations["aggregation_frequency"]) as context:
        trial = trial_class(context)
        if optimizations["mixed_precision"] != "O0":
            if context.experimental._auto_amp or context._optimisation.scaler is not None:
                log.info("optimizations.mixed_precision is left to %s, which sees to it", trial_class.__name__)
            else:
                context.experimental.use_amp()
        Trainer(trial, context).fit(
            max_length=max_length,
            reporting_period=Batch(config["scheduling_unit"]),
            checkpoint_policy=config["checkpoint_policy"],
            latest_checkpoint=latest_checkpoint,
            step_zero_validation=config["perform_initial_validation"],
        )
