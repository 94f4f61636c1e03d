"""An experiment's config: read from a file or a mapping into a frozen, checked object, or all faults at once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dray.config.determined_fields import misspelt, not_used, without_not_used
from dray.config.entrypoint import is_class, parse_entrypoint
from dray.config.faults import faults_of, missing_field
from dray.config.length import Length, LengthUnit
from dray.config.limits import beyond_limits
from dray.config.resources import Resources
from dray.config.rules import broken_rules, counted_steps
from dray.config.schema import ExperimentConfig, Reproducibility
from dray.config.search import build_method, build_sampler, build_search, build_space
from dray.config.searcher import CUSTOM, Searcher, variant_of
from dray.config.storage import CheckpointStorage
from dray.config.yaml_file import read_mapping, with_changes
from dray.errors import ConfigError, EntrypointError, Fault
from dray.storage import Location
from searchers.convert import from_optuna, from_ray_tune
from searchers.errors import MethodError, SpaceError

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
        told, name = "The experiment config", None
        if faults := list(beyond_limits(source)):
            raise ConfigError(faults, told)
        try:
            raw = _plain(_with_our_domains(source))
        except SpaceError as error:
            raise ConfigError(error.faults, told) from None
    else:
        path = Path(source)
        told, name = str(source), path.stem
        content = with_changes(read_mapping(path), changes)
        if faults := list(beyond_limits(content)):
            raise ConfigError(faults, told)
        raw = _plain(content)
    passed_over, inside = not_used(raw), [Fault(path, what) for path, what in misspelt(raw)]
    raw = _without_nulls(without_not_used(raw))
    raw |= {section: _with_text_names(raw[section]) for section in ("data", "hyperparameters") if section in raw}
    raw.setdefault("name", name or _name_of(raw.get("entrypoint")) or "experiment")
    faults = [*counted_steps(raw), *_schema_faults(raw), *broken_rules(raw), *inside]
    if faults:
        raise ConfigError(_each_once(faults), told)
    stop_once = raw["searcher"].pop("stop_once", None)
    if stop_once is not None:
        raw["searcher"]["variant"] = variant_of(stop_once)
    config = ExperimentConfig.model_validate(raw)
    if config.searcher.name != CUSTOM and not is_class(config.searcher.name):  # else checked where the method is known
        try:
            build_method(config)
        except MethodError as error:
            raise ConfigError(error.faults, told) from None
    if passed_over:
        lines = (f"\n  {field}: {why}" for field, why in passed_over)
        log.warning("%s has fields of Determined that are ignored here:%s", told, "".join(lines))
    return config


def load_storage(section: Mapping[str, Any]) -> Location:
    """The location that a ``checkpoint_storage`` section gives.

    Raises:
        ConfigError: it gives none, or has faults.
    """
    told = "core.init(checkpoint_storage=...)"
    alone = {"entrypoint": "python3 program.py", "searcher": {"name": "single", "metric": "any"}}
    try:
        where = load_config({**alone, "checkpoint_storage": section}).checkpoint_storage.location
    except ConfigError as error:
        raise ConfigError(error.faults, told) from None
    if where is None:
        raise ConfigError([missing_field(("checkpoint_storage",), "type")], told)
    return where


def _with_our_domains(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with hyperparameters that are objects of Optuna or Ray Tune converted to YAML's form."""
    hyperparameters = source.get("hyperparameters")
    if not isinstance(hyperparameters, Mapping):
        return source
    return {**source, "hyperparameters": from_ray_tune(from_optuna(hyperparameters))}


def _schema_faults(raw: Mapping[str, Any]) -> list[Fault]:
    try:
        ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        return faults_of(error)
    return []


def _each_once(faults: list[Fault]) -> list[Fault]:
    """Only the first fault of each field: the schema's, if a rule found one too."""
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.path, fault)
    return list(first.values())


def _plain(value: Any) -> Any:
    """A copy of plain lists, mappings and scalars, as YAML would give it: configs are stored and compared."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # A numpy scalar has an empty shape; this does not import numpy.
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _with_text_names(value: Any) -> Any:
    """A copy in which all names are text, as in JSON, through which a config comes to the code of a trial."""
    if isinstance(value, Mapping):
        return {
            name if isinstance(name, str) else json.dumps(name): _with_text_names(item) for name, item in value.items()
        }
    return [_with_text_names(item) for item in value] if isinstance(value, list) else value


def _without_nulls(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """``raw`` without null fields, except in the user's own sections and in loggers (``mlflow:``)."""
    return {
        str(key): value
        if key in ("hyperparameters", "data", "loggers") or not isinstance(value, Mapping)
        else {str(inner): item for inner, item in value.items() if item is not None}
        for key, value in raw.items()
        if value is not None
    }


def _name_of(entrypoint: object) -> str | None:
    """The name of the class, or of the program's file."""
    try:
        program = parse_entrypoint(entrypoint)
    except ValueError:  # reported elsewhere
        return None
    if isinstance(program, str):
        return program.rpartition(":")[2]
    return program.module or Path(str(program.file)).stem
