"""An experiment's config: read a file or a mapping, tell every fault at once, or give a frozen, checked object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import assert_never

from dray.experiment.command import parse_entrypoint
from dray.experiment.errors import ConfigError, EntrypointError, Fault
from dray.experiment.faults import faults_of
from dray.experiment.length import Length, LengthUnit
from dray.experiment.rules import broken_rules
from dray.experiment.schema import CheckpointStorage, ExperimentConfig, Reproducibility, Resources, Searcher
from dray.experiment.yaml_file import read_mapping
from searchers.asha import ASHA
from searchers.method import Method
from searchers.random_search import RandomSearch
from searchers.single import Single
from searchers.space import Space, parse

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
    "build_space",
    "load_config",
]


def load_config(source: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig) -> ExperimentConfig:
    """Read and check an experiment config.

    Args:
        source: The path of a YAML file, or a mapping of the same shape. A field that is null has its default.
            Without a ``name``, the experiment has that of the file, or of the entrypoint's class. Without an
            ``experiment_seed``, one is drawn; it stands in the result.

    Raises:
        ConfigError: the file cannot be read, or the config has faults: all of them are listed, each with its path.

    >>> config = load_config({"searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}})
    >>> str(config.searcher.max_length), config.max_restarts
    ('2 epochs', 5)
    """
    if isinstance(source, ExperimentConfig):
        return source
    if isinstance(source, Mapping):
        raw, told, name = _plain(source), "The experiment config", None
    else:
        path = Path(source)
        raw, told, name = _plain(read_mapping(path)), str(source), path.stem
    raw = _without_nulls(raw)
    raw.setdefault("name", name or _name_of(raw.get("entrypoint")) or "experiment")
    faults = [*_schema_faults(raw), *broken_rules(raw)]
    if faults:
        raise ConfigError(_each_once(faults), told)
    return ExperimentConfig.model_validate(raw)


def build_space(config: ExperimentConfig) -> Space:
    """The hyperparameter space of a checked config."""
    return parse(config.hyperparameters)


def build_method(config: ExperimentConfig) -> Method:
    """The search method of a checked config, at its start. Lengths and rungs are in ``searcher.max_length.unit``."""
    searcher = config.searcher
    max_length = None if searcher.max_length is None else searcher.max_length.value
    match searcher.name:
        case "single":
            return Single(max_length=max_length)
        case "random":
            assert searcher.max_trials is not None
            return RandomSearch(
                max_trials=searcher.max_trials,
                max_concurrent_trials=searcher.max_concurrent_trials,
                max_length=max_length,
            )
        case "asha" | "async_halving":
            assert searcher.max_trials is not None
            assert searcher.num_rungs is not None
            assert max_length is not None
            return ASHA(
                max_trials=searcher.max_trials,
                max_concurrent_trials=searcher.max_concurrent_trials,
                max_length=max_length,
                num_rungs=searcher.num_rungs,
                divisor=searcher.divisor,
            )
        case unreachable:
            assert_never(unreachable)


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
    """``raw`` without the fields that are null, except inside what is free for the user."""
    return {
        str(key): value
        if key in ("hyperparameters", "data") or not isinstance(value, Mapping)
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
