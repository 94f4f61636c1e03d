"""What workers need to know about an experiment, from its config and its search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dray.config.load import ExperimentConfig
from dray.environment import Device
from dray.training.units import Batch, TrainUnit
from dray.worker.host import Experiment


def trial_settings(config: ExperimentConfig, rungs: Sequence[float], device: Device) -> Experiment:
    """The same for all trials of an experiment.

    Args:
        rungs: absolute lengths at which the search decides, as its method counts them.
        device: what trials train on.
    """
    searcher = config.searcher
    length = _unit(searcher.counted_length)
    unit = type(length) if length is not None else Batch
    by_time = searcher.counted_by is not None
    return Experiment(
        experiment_id=1,
        config=config.for_code(),
        data=config.data,
        environment=config.environment.variables(device),
        secrets=config.secrets,
        metric=searcher.metric,
        smaller_is_better=searcher.smaller_is_better,
        max_length=length,
        rungs=() if by_time else tuple(unit(int(rung)) for rung in rungs),
        source_checkpoint=searcher.source_checkpoint_uuid,
        time_metric=searcher.counted_by,
        time_rungs=rungs if by_time else (),
        validation_period=_unit(config.min_validation_period),
        checkpoint_period=_unit(config.min_checkpoint_period),
        checkpoint_policy=config.checkpoint_policy,
    )


def _unit(length: Any) -> TrainUnit | None:
    return None if length is None else length.to_unit()
