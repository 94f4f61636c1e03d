"""A user's own search method and sampler: classes in the model's directory that the config names, or objects.

searcher:
  name: median_stopping:MedianStopping        # module:Class, imported as the entrypoint is
  options: {max_trials: 20, rungs: [1, 2, 4]} # arguments of the class
  sampler: {name: my_sampler:MySampler, options: {...}}   # MySampler(space, seed=..., rungs=..., **options)
  metric: validation_loss
  max_length: {epochs: 4}
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dray.config.entrypoint import is_class
from dray.config.schema import ExperimentConfig
from dray.config.searcher import CUSTOM, SamplerChoice, Searcher
from dray.errors import ConfigError, EntrypointError
from dray.imports import import_model
from searchers.errors import FieldError
from searchers.method import Method
from searchers.samplers import Sampler
from searchers.space import Constraint, Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What a search is made of, besides its config.

    Attributes:
        directory: Where classes that the config names are imported from.
        method: Instead of one that the config names, which then has ``name: custom``. Each search gets a copy.
        sampler: Instead of one that the config names. Each search gets a copy.
        constraint: Says whether a point may be tried; others are drawn again.
    """

    directory: Path | None = None
    method: Method | None = None
    sampler: Sampler | None = None
    constraint: Constraint | None = None

    def names(self) -> dict[str, str | None]:
        """The names of objects given from Python, by argument: an experiment's directory can't store the objects."""
        given = {"constraint": self.constraint, "method": self.method, "sampler": self.sampler}
        return {argument: None if value is None else _name(value) for argument, value in given.items()}

    def check(self, config: ExperimentConfig) -> None:
        """Check that the objects fit the config.

        Raises:
            ConfigError: The config names another method or sampler than the given one.
        """
        name, chosen = config.searcher.name, config.searcher.sampler.name
        faults = []
        if self.method is not None and name != CUSTOM:
            faults.append(("searcher.name", f"must be {CUSTOM} if the method is given from Python, got {name!r}"))
        if self.sampler is not None and config.searcher.sampler != SamplerChoice():
            told = f"must be left out if the sampler is given from Python, got {chosen!r}"
            faults.append(("searcher.sampler", told))
        if faults:
            raise ConfigError(faults)


NOTHING = Own()


def own_method(config: ExperimentConfig, own: Own) -> Method:
    """A new method of the class that ``searcher.name`` names, or a copy of the given one.

    Raises:
        ConfigError: There is no such module or class, it refuses its options, or the object is no ``Method``, or has
            other lengths than the config; with the field's path.
    """
    searcher = config.searcher
    if searcher.name != CUSTOM:
        made: Method = _made("searcher", searcher.name, searcher.options, own.directory)
        field = "searcher.name"
    elif own.method is None:
        told = f"{CUSTOM} needs a method from Python: dray.Experiment(config, method=MyMethod(...)), and "
        told += "resume(path, method=MyMethod(...)); or give its class, with its arguments as options: "
        raise ConfigError([("searcher.name", told + "name: my_module:MyMethod")])
    else:
        made, field = copy.deepcopy(own.method), "method"
    _check_protocol(field, made, Method)
    _check_rungs(field, made, searcher)
    return made


def own_sampler(config: ExperimentConfig, own: Own, space: Space, *, rungs: Sequence[float]) -> Sampler:
    """A new sampler of the class that ``searcher.sampler.name`` names, or a copy of the given one.

    Raises:
        ConfigError: as ``own_method``.
    """
    if own.sampler is not None:
        made: Sampler = copy.deepcopy(own.sampler)
        field = "sampler"
    else:
        choice, field = config.searcher.sampler, "searcher.sampler.name"
        seed = config.reproducibility.experiment_seed
        made = _made("searcher.sampler", choice.name, choice.options, own.directory, space, seed=seed, rungs=rungs)
    _check_protocol(field, made, Sampler)
    return made


def _made(
    section: str, name: str, options: Mapping[str, Any], directory: Path | None, *arguments: Any, **named: Any
) -> Any:
    kind = _class(f"{section}.name", name, directory)
    try:
        yaml.safe_dump(dict(options))
    except yaml.YAMLError:
        told = "must be numbers, strings, lists and mappings, which can be stored in the experiment's directory, got "
        raise ConfigError([(f"{section}.options", f"{told}{dict(options)}; give the object itself instead")]) from None
    try:
        return kind(*arguments, **named, **copy.deepcopy(dict(options)))
    except FieldError as error:
        raise ConfigError([(_below_options(section, path), what) for path, what in error.faults]) from error
    except Exception as error:
        told = f"{name} does not accept {dict(options)}: {type(error).__name__}: {error}"
        raise ConfigError([(f"{section}.options", told)]) from error


def _below_options(section: str, path: str) -> str:
    """The path, below ``options``, of an argument that its class calls ``searcher.max_trials``."""
    inside = path.startswith("searcher.") and not path.startswith(f"{section}.options")
    return f"{section}.options.{path.removeprefix('searcher.')}" if inside else path


def _class(field: str, name: str, directory: Path | None) -> Any:
    assert is_class(name), f"the schema lets {name!r} pass, which is no module:Class"
    if directory is None:
        told = f"{name} is imported from the model's directory, but there is none; give model_dir="
        raise ConfigError([(field, told)])
    module_name, _, class_name = name.partition(":")
    try:
        module = import_model(module_name, directory.resolve())
    except EntrypointError as error:
        raise ConfigError([(field, fault.what) for fault in error.faults]) from error
    found: object = module
    for part in class_name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    classes = [
        key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(class_name, classes, n=1)
    hint = f"did you mean {module_name}:{near[0]}?" if near else f"its classes are {', '.join(classes) or 'none'}"
    raise ConfigError([(field, f"{module_name} has no class {class_name}; {hint}")])


def _check_protocol(field: str, made: object, protocol: type) -> None:
    # In a protocol, only the names that it requires have no leading underscore.
    lacks = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(made, name)]
    if lacks:
        kind, what = type(made).__name__, protocol.__name__
        told = f"{kind} is not a {what.lower()}: it has no {', '.join(sorted(lacks))}; see searchers.{what}"
        raise ConfigError([(field, told)])


def _check_rungs(field: str, method: Method, searcher: Searcher) -> None:
    """Check that the method's last rung, which is its trials' length, is that of the config."""
    rungs, length = method.rungs, searcher.length
    try:
        valid = all(0 < rung < math.inf for rung in rungs) and list(rungs) == sorted(rungs)
    except TypeError:
        valid = False
    if not valid:
        raise ConfigError([(field, f"its rungs must be ascending lengths > 0, got {rungs!r}")])
    told = f"must be the last of the method's rungs {tuple(rungs)!r}, got {length or 'nothing'}"
    if rungs and rungs[-1] != length:
        raise ConfigError([("searcher.max_length" if searcher.max_time is None else "searcher.max_time", told)])
    if searcher.counted_by is None and any(rung != int(rung) for rung in rungs):
        raise ConfigError([(field, f"its rungs must be integers, in the unit of max_length, got {rungs!r}")])


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))
