"""An experiment's config: read from a file or a mapping into a frozen, checked object, or all faults at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dray.config.determined_fields import ignored_fields, without_ignored, without_steps
from dray.config.faults import faults_of, missing_field
from dray.config.length import Length, LengthUnit
from dray.config.limits import beyond_limits
from dray.config.resources import Resources
from dray.config.rules import broken_rules
from dray.config.schema import ExperimentConfig, Reproducibility
from dray.config.search import build_method, build_sampler, build_search, build_space
from dray.config.searcher import ClassSearcher, CustomSearcher, Searcher
from dray.config.storage import CheckpointStorage
from dray.config.yaml_file import read_mapping, with_changes
from dray.errors import ConfigError, EntrypointError, Fault
from dray.storage import Location
from searchers.convert import from_optuna, from_ray_tune
from searchers.errors import FieldError

__all__ = [
    "CheckpointStorage",
    "ConfigError",
    "EntrypointError",
    "ExperimentConfig",
    "Fault",
    "Length",
    "LengthUnit",
    "Reproducibility",
    "Resources",
    "Searcher",
    "build_method",
    "build_sampler",
    "build_search",
    "build_space",
    "load_config",
]

log = logging.getLogger(__name__)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig, changes: Sequence[str] = ()
) -> ExperimentConfig:
    """Read and check an experiment config.

    Args:
        source: The path of a YAML file, or a mapping of the same shape. A field that is null gets its default.
            In a mapping, ``hyperparameters`` may also be Optuna's distributions, or domains of ``ray.tune``.
            Without a ``name``, the experiment is named after the file, or the entrypoint's class. Without an
            ``experiment_seed``, one is drawn; the result has it. Determined's fields that have no meaning here are
            ignored; one warning in the log names them.
        changes: Fields of a file to set to other values: ``searcher.max_trials=8``.

    Raises:
        ConfigError: the file cannot be read, or the config has faults; all are listed, each with its path.

    >>> config = load_config({"searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}})
    >>> str(config.searcher.max_length), config.max_restarts
    ('2 epochs', 5)
    """
    if isinstance(source, ExperimentConfig):
        return source
    if isinstance(source, Mapping):
        origin = "The experiment config"
        content = source
    else:
        origin = str(source)
        content = with_changes(read_mapping(Path(source)), changes)
        if content.get("name") is None:
            content["name"] = Path(source).stem
    if too_large := list(beyond_limits(content)):
        raise ConfigError(too_large, origin)
    try:
        raw = _plain(_with_domains(content))
        config = _parsed(without_ignored(raw))
    except FieldError as error:
        raise ConfigError(error.faults, origin) from None
    if ignored := ignored_fields(raw):
        lines = (f"\n  {field}: {why}" for field, why in ignored)
        log.warning("%s has fields of Determined that are ignored here:%s", origin, "".join(lines))
    return config


def load_storage(section: Mapping[str, Any]) -> Location:
    """The location that a ``checkpoint_storage`` section gives.

    Raises:
        ConfigError: it gives none, or has faults.
    """
    origin = "core.init(checkpoint_storage=...)"
    alone = {"entrypoint": "python3 program.py", "searcher": {"name": "single", "metric": "any"}}
    try:
        where = load_config({**alone, "checkpoint_storage": section}).checkpoint_storage.location
    except ConfigError as error:
        raise ConfigError(error.faults, origin) from None
    if where is None:
        raise ConfigError([missing_field("checkpoint_storage.type")], origin)
    return where


def _parsed(raw: Mapping[Any, Any]) -> ExperimentConfig:
    """The config of a plain mapping.

    Raises:
        FieldError: it has faults.
    """
    raw, faults = without_steps(raw)
    given: dict[str, Any] = {}
    config = None
    try:
        config = ExperimentConfig.model_validate(raw, context=given)
    except ValidationError as error:
        faults += faults_of(error, given)
    faults += broken_rules(given, {fault.path for fault in faults})
    if faults or config is None:
        # Only the first fault of each field: that of its value, if a rule found one too.
        first = dict(reversed(faults))
        raise FieldError([(path, first[path]) for path in dict.fromkeys(fault.path for fault in faults)])
    if not isinstance(config.searcher, CustomSearcher | ClassSearcher):  # these are checked where the method is known
        build_method(config)
    return config


def _with_domains(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with hyperparameters that are objects of Optuna or Ray Tune converted to YAML's form."""
    hyperparameters = source.get("hyperparameters")
    if not isinstance(hyperparameters, Mapping):
        return source
    return {**source, "hyperparameters": from_ray_tune(from_optuna(hyperparameters))}


def _plain(value: Any) -> Any:
    """A copy of plain lists, mappings and scalars, as YAML would give it: configs are stored and compared."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # A numpy scalar has an empty shape; this does not import numpy.
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
