"""The checkpoint that all trials of an experiment begin with: ``source_trial_id`` or ``source_checkpoint_uuid``."""

from __future__ import annotations

from pathlib import Path

from dray.experiment.errors import ConfigError
from dray.experiment.schema import ExperimentConfig
from dray.storage import CheckpointStore, verify


def with_source(config: ExperimentConfig) -> ExperimentConfig:
    """The config with the checkpoint's whole path as ``source_checkpoint_uuid``, whichever way it was named.

    Looked for when an experiment is made, so that all its trials begin alike, also where the source trial goes on.

    Raises:
        ConfigError: there is no such trial, it has no checkpoint, or that is damaged.
    """
    searcher = config.searcher
    trial, checkpoint = searcher.source_trial_id, searcher.source_checkpoint_uuid
    if trial is not None:
        latest = CheckpointStore(Path(trial).expanduser()).latest()
        if latest is None:
            told = f"no checkpoint in {trial}; give the directory of a trial that has one, as RESULTS/trial_7"
            raise ConfigError([("searcher.source_trial_id", told)])
        found = Path(latest)
    elif checkpoint is not None:
        try:
            found = verify(Path(checkpoint).expanduser())
        except (OSError, ValueError) as error:
            raise ConfigError([("searcher.source_checkpoint_uuid", str(error))]) from None
    else:
        return config
    source = {"source_trial_id": None, "source_checkpoint_uuid": str(found.resolve())}
    return config.model_copy(update={"searcher": searcher.model_copy(update=source)})
