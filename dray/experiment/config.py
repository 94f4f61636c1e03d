"""An experiment's config: read a file or a mapping, tell every fault at once, or give a frozen, checked object."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dray.experiment.command import is_class, parse_entrypoint
from dray.experiment.determined_fields import not_used, without_not_used
from dray.experiment.errors import ConfigError, EntrypointError, Fault
from dray.experiment.faults import faults_of
from dray.experiment.length import Length, LengthUnit
from dray.experiment.rules import broken_rules
from dray.experiment.schema import (
    CUSTOM,
    CheckpointStorage,
    ExperimentConfig,
    Reproducibility,
    Resources,
    Searcher,
    variant_of,
)
from dray.experiment.search import build_method, build_sampler, build_search, build_space
from dray.experiment.yaml_file import read_mapping, with_changes
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
        source: The path of a YAML file, or a mapping of the same shape. A field that is null has its default.
            In a mapping, ``hyperparameters`` may also be Optuna's distributions, or domains of ``ray.tune``.
            Without a ``name``, the experiment has that of the file, or of the entrypoint's class. Without an
            ``experiment_seed``, one is drawn; it stands in the result. Fields of Determined's that have no meaning here
            are left out; one warning, in the log, names them.
        changes: Of a file: fields to set to other values, as ``searcher.max_trials=8``.

    Raises:
        ConfigError: the file cannot be read, or the config has faults: all of them are listed, each with its path.

    >>> config = load_config({"searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}})
    >>> str(config.searcher.max_length), config.max_restarts
    ('2 epochs', 5)
    """
    if isinstance(source, ExperimentConfig):
        return source
    if isinstance(source, Mapping):
        told, name = "The experiment config", None
        try:
            raw = _plain(_with_our_domains(source))
        except SpaceError as error:
            raise ConfigError(error.faults, told) from None
    else:
        path = Path(source)
        raw, told, name = with_changes(_plain(read_mapping(path)), changes), str(source), path.stem
    passed_over = not_used(raw)
    raw = _without_nulls(without_not_used(raw))
    raw.setdefault("name", name or _name_of(raw.get("entrypoint")) or "experiment")
    faults = [*_schema_faults(raw), *broken_rules(raw)]
    if faults:
        raise ConfigError(_each_once(faults), told)
    stop_once = raw["searcher"].pop("stop_once", None)
    if stop_once is not None:
        raw["searcher"]["variant"] = variant_of(stop_once)
    config = ExperimentConfig.model_validate(raw)
    if config.searcher.name != CUSTOM and not is_class(config.searcher.name):  # else told where the method is known
        try:
            build_method(config)
        except MethodError as error:
            raise ConfigError(error.faults, told) from None
    if passed_over:
        lines = (f"\n  {field}: {why}" for field, why in passed_over)
        log.warning("%s has fields of Determined's that are not used here:%s", told, "".join(lines))
    return config


def _with_our_domains(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Hyperparameters that are objects of Optuna's or Ray Tune's, as YAML has them."""
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
    """One fault a field: the first, which is the schema's, where a rule found the same field wrong."""
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.path, fault)
    return list(first.values())


def _plain(value: Any) -> Any:
    """A copy made of plain lists, mappings and scalars, as YAML would give it: a config is stored, and compared."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # A numpy scalar, without importing numpy: it has a shape, and it is empty.
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _without_nulls(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """``raw`` without the fields that are null, except inside what is free for the user, and loggers (``mlflow:``)."""
    return {
        str(key): value
        if key in ("hyperparameters", "data", "loggers") or not isinstance(value, Mapping)
        else {str(inner): item for inner, item in value.items() if item is not None}
        for key, value in raw.items()
        if value is not None
    }


def _name_of(entrypoint: object) -> str | None:
    """Of the class, or of the program's file."""
    try:
        program = parse_entrypoint(entrypoint)
    except ValueError:  # told elsewhere
        return None
    if isinstance(program, str):
        return program.rpartition(":")[2]
    return program.module or Path(str(program.file)).stem
