"""Resolves a config's checkpoint locations: its storage, and the checkpoint that all its trials start from
(``source_trial_id`` or ``source_checkpoint_uuid``)."""

from __future__ import annotations

import os

from dray.config.schema import ExperimentConfig
from dray.errors import ConfigError
from dray.storage import Location, opened, store_at
from dray.storage.disk import scratch


def with_storage(config: ExperimentConfig, where: str | os.PathLike[str] | None) -> ExperimentConfig:
    """The config with its checkpoints stored at `where`. None: at the config's own location, or, if it has none, at
    ``DRAY_STORAGE`` from the environment, which can be set for a whole cluster."""
    field = "storage_path"
    if where is None and config.checkpoint_storage.location is None:
        field, where = "DRAY_STORAGE", os.environ.get("DRAY_STORAGE") or None
    if where is None:
        return config
    try:
        return config.model_copy(update={"checkpoint_storage": config.checkpoint_storage.at(where)})
    except ValueError as error:
        raise ConfigError([(field, str(error))], "The experiment") from None


def with_source(config: ExperimentConfig) -> ExperimentConfig:
    """The config with the full path of the source checkpoint in ``source_checkpoint_uuid``.

    The source is resolved when the experiment is created, so that all trials start from the same checkpoint even if the
    source trial continues.
    """
    searcher = config.searcher
    trial, checkpoint = searcher.source_trial_id, searcher.source_checkpoint_uuid
    try:
        if trial is not None:
            with scratch("source") as copies:
                latest = store_at(_place(trial, config), copies).latest()
            if latest is None:
                raise ValueError(
                    f"no checkpoint in {trial}; give the directory of a trial that has one, such as RESULTS/trial_7"
                )
            found = Location.of(latest)
        elif checkpoint is not None:
            found = _checkpoint(checkpoint, config)
            with opened(found, without_manifest="/" in checkpoint):
                pass
        else:
            return config
    except (OSError, ValueError) as error:
        field = "source_trial_id" if trial is not None else "source_checkpoint_uuid"
        raise ConfigError([(f"searcher.{field}", str(error))]) from None
    whole = str(found.path.resolve()) if found.is_local else found.uri
    source = {"source_trial_id": None, "source_checkpoint_uuid": whole}
    return config.model_copy(update={"searcher": searcher.model_copy(update=source)})


def _checkpoint(named: str, config: ExperimentConfig) -> Location:
    """A checkpoint, given by path or URI; a bare name, such as a Determined UUID, may be in ``checkpoint_storage``."""
    place, own = _place(named, config), config.checkpoint_storage.location
    if "/" in named or not place.is_local or place.path.exists():
        return place
    if own is None:
        raise FileNotFoundError(
            f"no directory {named!r} here, and no checkpoint_storage to look it up in; give the checkpoint's path or "
            "URI"
        )
    return own.child(named)


def _place(where: str, config: ExperimentConfig) -> Location:
    """A location, with the config's credentials if it is in the config's own store."""
    place, own = Location.of(where), config.checkpoint_storage.location
    if place.secrets:
        raise ValueError("must not contain credentials, as it is stored; set them in the environment")
    return place if own is None else place.with_secrets_of(own)
