"""Loads an experiment config from a file or a mapping into a frozen, checked object, or reports all faults at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dray.config.doubts import direction_doubts, doubts
from dray.config.faults import faults_of, missing_field
from dray.config.rules import broken_rules
from dray.config.schema import ExperimentConfig
from dray.config.search import CHANGEABLE, build_method
from dray.config.searcher import ClassSearcher, CustomSearcher
from dray.config.section import ConfigNotes
from dray.config.yaml_file import check_limits, read_mapping, with_changes
from dray.errors import ConfigError, Fault
from dray.storage import Location
from dray.text import one_line
from searchers.convert import from_optuna, from_ray_tune
from searchers.errors import FieldError
from searchers.rows import unreadable
from searchers.space import plain

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed config."""

    config: ExperimentConfig | None  # None: it has faults
    faults: list[Fault]  # the first fault of each field
    ignored: dict[str, str]  # Determined's fields without effect, by path, with their replacements


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig, changes: Sequence[str] = ()
) -> ExperimentConfig:
    """Read and check an experiment config.

    Args:
        source: the path of a YAML file, or a mapping of the same form. A field that is null gets its default.
            In a mapping, ``hyperparameters`` may also be Optuna's distributions, or domains of ``ray.tune``.
            Without a ``name``, the experiment is named after the file, or the entrypoint's class. Without an
            ``experiment_seed``, a random one is set. Determined's fields that have no meaning here are ignored, with
            one warning in the log; another warning names likely mistakes (`doubts`).
        changes: values for fields of a file, such as ``searcher.max_trials=8``.

    Raises:
        ConfigError: the file can't be read, or the config has faults; all are listed, each with its path.

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
    parsed = parse_config(content)
    if parsed.config is None:
        raise ConfigError(parsed.faults, origin)
    if parsed.ignored:
        lines = (f"\n  {field}: {why}" for field, why in sorted(parsed.ignored.items()))
        log.warning("%s has fields of Determined that are ignored here:%s", origin, "".join(lines))
    if found := [*doubts(parsed.config), *direction_doubts(content.get("searcher"))]:
        lines = (f"\n  {field}: {what}" for field, what in found)
        log.warning("%s may not mean what you want:%s", origin, "".join(lines))
    return parsed.config


def stored_config(path: Path) -> ExperimentConfig:
    """The config in an experiment's directory, without warnings: they were given when it was created. If it can't be
    read, `DamagedFile`."""
    try:
        parsed = parse_config(read_mapping(path))
    except ConfigError as error:
        raise unreadable(path, error.faults[0].what) from None
    if parsed.config is None:
        raise unreadable(path, one_line(parsed.faults[0]))
    return parsed.config


def parse_config(content: Mapping[Any, Any]) -> Parsed:
    """Parse the mapping of a config."""
    notes, faults = ConfigNotes(), []
    config: ExperimentConfig | None = None
    try:
        check_limits(content)
        given = plain(_with_domains(content))
        try:
            config = ExperimentConfig.model_validate(given, context=notes)
        except ValidationError as error:
            faults = faults_of(error)
        faults += broken_rules(notes.given, {fault.path for fault in faults})
        # The user's own methods are checked once their classes can be imported.
        if config is not None and not faults and not isinstance(config.searcher, CustomSearcher | ClassSearcher):
            build_method(config)
    except FieldError as error:
        faults = [Fault(path, what) for path, what in error.faults]
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.path, fault)
    return Parsed(config=None if faults else config, faults=list(first.values()), ignored=notes.ignored)


def with_limits(config: ExperimentConfig, changes: Mapping[str, Any]) -> ExperimentConfig:
    """A config with other values of some of ``CHANGEABLE``; of a budget and of prices, those that are given.

    Raises:
        ConfigError: the new values have faults.
    """
    if not changes:
        return config
    now = config.to_dict()
    for name in ("budget", "prices"):
        if isinstance(changes.get(name), Mapping):
            changes = {**changes, name: {**now.get(name, {}), **changes[name]}}
    parsed = parse_config({**now, **changes})
    if parsed.config is None:
        raise ConfigError(parsed.faults, "The extension")
    return config.model_copy(update={name: getattr(parsed.config, name) for name in CHANGEABLE})


def load_storage(section: Mapping[str, Any]) -> Location:
    origin = "core.init(checkpoint_storage=...)"
    # Only the section is checked: the other fields are required in every config.
    alone = {"entrypoint": "python3 program.py", "searcher": {"name": "single", "metric": "any"}}
    try:
        where = load_config({**alone, "checkpoint_storage": section}).checkpoint_storage.location
    except ConfigError as error:
        raise ConfigError(error.faults, origin) from None
    if where is None:
        raise ConfigError([missing_field("checkpoint_storage.type")], origin)
    return where


def _with_domains(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with hyperparameters converted from objects of Optuna or Ray Tune to YAML's form."""
    hyperparameters = source.get("hyperparameters")
    if not isinstance(hyperparameters, Mapping):
        return source
    return {**source, "hyperparameters": from_ray_tune(from_optuna(hyperparameters))}
