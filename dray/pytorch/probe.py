"""`pytorch.probe()`: the batch size that fits and trains fastest."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from dray.training.batch_size import BatchSizes


def probe(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    model_dir: str | os.PathLike[str] | None = None,
    batches: int = 20,
) -> BatchSizes:
    """Find the largest per-slot batch size that trains on this machine, and measure the throughput of each size.

    Each size is trained in new processes, one per slot, for some batches, without validation or checkpoints. Sizes
    double from the config's until memory runs out or a batch is a whole epoch; bisection then finds the largest that
    fits. The hyperparameters are those of the experiment's trial 0.

    Args:
        config: an experiment config, as for `dray.Experiment`; its `entrypoint` must be a trial class.
        model_dir: the directory of the model's code; by default the config file's directory.
        batches: the number of batches over which the throughput of a size is measured, after a few others.

    Returns:
        The measured sizes, the largest that fits, and a suggestion: the fastest size that keeps the number of records
        per optimizer step, `global_batch_size * aggregation_frequency`.

    Raises:
        ConfigError: with every fault of the config; or it needs more GPUs than this machine has.
        ExperimentError: training failed otherwise than by lack of memory, or even one record per slot does not fit.
        ValueError: batches is below 1.
    """
    # By name, as in `dray`: experiments are a layer above this one, and import pydantic.
    experiment = importlib.import_module("dray.experiment.probe")
    found: BatchSizes = experiment.probe(config, model_dir=model_dir, batches=batches)
    return found
