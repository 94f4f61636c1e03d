"""A user's own search method and sampler: classes in the model directory that the config names, or objects.

searcher:
  name: median_stopping:MedianStopping        # module:Class, imported like the entrypoint
  options: {max_trials: 20, rungs: [1, 2, 4]} # arguments of the class
  sampler: {name: my_sampler:MySampler, options: {...}}   # MySampler(space, seed=..., rungs=..., **options)
  metric: validation_loss
  max_length: {epochs: 4}
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dray.config.searcher import ClassSearcher, CustomSearcher, SamplerChoice, Searcher
from dray.errors import ConfigError, EntrypointError
from dray.imports import import_model
from searchers.errors import FieldError, did_you_mean
from searchers.method import Method
from searchers.samplers import Sampler
from searchers.space import Constraint, Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """The user's own parts of a search, in place of those that its config names. Each search uses copies of them."""

    directory: Path | None = None  # the model directory, for classes that the config names
    method: Method | None = None  # the config then has ``name: custom``
    sampler: Sampler | None = None
    constraint: Constraint | None = None  # whether a point may be tried; rejected points are drawn again

    def names(self) -> dict[str, str | None]:
        """The names of objects given from Python, by argument, for its directory, which can't store objects."""
        given = {"constraint": self.constraint, "method": self.method, "sampler": self.sampler}
        return {
            argument: None if value is None else str(getattr(value, "__qualname__", type(value).__qualname__))
            for argument, value in given.items()
        }

    def check(self, searcher: Searcher) -> None:
        faults = []
        if self.method is not None and not isinstance(searcher, CustomSearcher):
            what = f"must be custom if the method is given from Python, got {searcher.name!r}"
            faults.append(("searcher.name", what))
        chosen = getattr(searcher, "sampler", SamplerChoice())
        if self.sampler is not None and chosen != SamplerChoice():
            what = f"must be left out if the sampler is given from Python, got {chosen.name!r}"
            faults.append(("searcher.sampler", what))
        if faults:
            raise ConfigError(faults)

    def new_method(self, searcher: Searcher) -> Method:
        """A new method of the class that ``searcher.name`` names, or a copy of the given one."""
        if isinstance(searcher, ClassSearcher):
            make = self._found("searcher.name", searcher.name)
            made: Method = _made("searcher", make, searcher.name, searcher.options)
            field = "searcher.name"
        elif self.method is not None:
            made, field = copy.deepcopy(self.method), "method"
        else:
            what = (
                "custom needs a method from Python: dray.Experiment(config, method=MyMethod(...)), and resume(path, "
                "method=MyMethod(...)); or give its class, with its arguments as options: name: my_module:MyMethod"
            )
            raise ConfigError([("searcher.name", what)])
        _check_protocol(field, made, Method)
        _check_rungs(field, made, searcher)
        return made

    def new_sampler(self, choice: SamplerChoice, space: Space, *, seed: int, rungs: Sequence[float]) -> Sampler:
        """A new sampler of the class that ``searcher.sampler.name`` names, or a copy of the given one."""
        if self.sampler is not None:
            made: Sampler = copy.deepcopy(self.sampler)
            field = "sampler"
        else:
            field = "searcher.sampler.name"
            make = partial(self._found(field, choice.name), space, seed=seed, rungs=rungs)
            made = _made("searcher.sampler", make, choice.name, choice.options)
        _check_protocol(field, made, Sampler)
        return made

    def _found(self, field: str, name: str) -> type:
        """The class that a field names as ``module:Class``."""
        if self.directory is None:
            what = f"{name} is imported from the model directory, but there is none; give model_dir="
            raise ConfigError([(field, what)])
        module_name, _, class_name = name.partition(":")
        try:
            module = import_model(module_name, self.directory.resolve())
        except EntrypointError as error:
            raise ConfigError([(field, fault.what) for fault in error.faults]) from error
        found: object = module
        for part in class_name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        hint = did_you_mean(class_name, classes, f"; its classes are {', '.join(classes) or 'none'}")
        raise ConfigError([(field, f"{module_name} has no class {class_name}{hint}")])


def _made(section: str, make: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    try:
        yaml.safe_dump(dict(options))
    except yaml.YAMLError:
        what = "must be numbers, strings, lists and mappings, which can be stored in the experiment's directory, got "
        raise ConfigError([(f"{section}.options", f"{what}{dict(options)}; give the object itself instead")]) from None
    try:
        return make(**copy.deepcopy(dict(options)))
    except FieldError as error:
        raise ConfigError([(_below_options(section, path), what) for path, what in error.faults]) from error
    except Exception as error:
        what = f"{name} does not accept {dict(options)}: {type(error).__name__}: {error}"
        raise ConfigError([(f"{section}.options", what)]) from error


def _below_options(section: str, path: str) -> str:
    """The path below ``options`` of an argument that its class calls, for example, ``searcher.max_trials``."""
    inside = path.startswith("searcher.") and not path.startswith(f"{section}.options")
    return f"{section}.options.{path.removeprefix('searcher.')}" if inside else path


def _check_protocol(field: str, made: object, protocol: type) -> None:
    # The names that a protocol requires are those without a leading underscore.
    lacks = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(made, name)]
    if lacks:
        kind, noun = type(made).__name__, protocol.__name__
        what = f"{kind} is not a {noun.lower()}: it has no {', '.join(sorted(lacks))}; see searchers.{noun}"
        raise ConfigError([(field, what)])


def _check_rungs(field: str, method: Method, searcher: Searcher) -> None:
    """Check that the method's last rung equals the length of trials in the config."""
    rungs, length = method.rungs, searcher.length
    try:
        valid = all(0 < rung < math.inf for rung in rungs) and list(rungs) == sorted(rungs)
    except TypeError:
        valid = False
    if not valid:
        raise ConfigError([(field, f"its rungs must be ascending lengths > 0, got {rungs!r}")])
    if rungs and rungs[-1] != length:
        field = "max_length" if getattr(searcher, "max_time", None) is None else "max_time"
        got = "but it is missing" if length is None else f"got {length}"
        raise ConfigError([(f"searcher.{field}", f"must be the last of the method's rungs {tuple(rungs)!r}, {got}")])
    if searcher.counted_by is None and any(rung != int(rung) for rung in rungs):
        raise ConfigError([(field, f"its rungs must be integers, in the unit of max_length, got {rungs!r}")])
