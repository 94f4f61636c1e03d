"""Continuing an experiment with the call that created it, on this machine or another.

Kubernetes, Slurm and the like restart a driver by repeating its command, whose path identifies the experiment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.errors import ConfigError, NoExperiment
from dray.records.directory import ExperimentDirectory, check_storage
from dray.records.mirror import delete_trials, fetch_to
from dray.records.secrets import with_secrets, write_secrets

_RESOLVED = ("checkpoint_storage", "reproducibility.experiment_seed", "searcher.source_checkpoint_uuid")
"""Fields that are drawn or looked up when an experiment is created, and may differ."""
_NONE = "(not set)"


def config_of_existing(path: Path, config: ExperimentConfig) -> ExperimentConfig | None:
    """The config of an existing experiment in this directory, or None. An experiment of the same name in the object
    store is copied to the directory first.

    Raises:
        ConfigError: it was created with a different config, or the store can't be used.
    """
    directory, where = ExperimentDirectory(path), config.checkpoint_storage.location
    if not directory.config_file.exists():
        if where is None or where.is_local:
            return None
        check_storage(where)
        place = where.child(path.name)
        try:
            fetch_to(path, place)
        except NoExperiment:
            delete_trials(place)
            return None
        write_secrets(directory.secrets_file, config)  # the store never has them
    stored = directory.config()
    cure = f"give another path, or continue it as it is: dray experiment resume {path}"
    faults = [
        (field, f"is {now!r}, but the experiment in {path} was created with {before!r}; {cure}")
        for field, now, before in _differences(config.to_dict(), stored.to_dict())
    ]
    if faults:
        raise ConfigError(faults)
    return with_secrets(stored, directory.secrets_file)


def _differences(now: Any, before: Any, *path: str) -> Iterator[tuple[str, Any, Any]]:
    """The fields that differ, each with both values."""
    if ".".join(path) in _RESOLVED or now == before:
        return
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        for name in dict.fromkeys([*now, *before]):
            yield from _differences(now.get(name, _NONE), before.get(name, _NONE), *path, str(name))
    else:
        yield ".".join(path), now, before
