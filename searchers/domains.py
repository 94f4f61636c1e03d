"""Domains of hyperparameters: sampling, grids, and validation of given values.

The kinds are Determined's: const, categorical, int, double, log, nested. dray adds a `step` for numbers, `log` for
integers, and categories that are domains themselves (a conditional space: only the drawn branch has hyperparameters).

Every domain has `sample(rng)`, `grid_size(path, faults)`, `grid()` and `check(value, path, faults)`. Those with
`faults` append one entry per fault, with its path; `check` returns the value as `sample` would have. `grid_size` is the
number of points, found without making any, or slightly more; `grid` is only for a space whose size has no faults.
Number domains are in `numeric`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from searchers.errors import SHOWN, Faults, did_you_mean
from searchers.grids import Points, chained, crossed
from searchers.numeric_domains import Double, Int, Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Const:
    """Always `val`."""

    val: object

    def sample(self, rng: Random) -> object:
        return copy.deepcopy(self.val)  # otherwise trials would share a list

    def grid_size(self, path: str, faults: Faults) -> int:
        return 1

    def grid(self) -> Points:
        return Points.of([self.val])

    def check(self, value: object, path: str, faults: Faults) -> object:
        if not same(value, self.val):
            faults.append((path, f"must be the constant {self.val!r}, got {value!r}"))
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Categorical:
    """One of `vals`, all equally likely; a value that is itself a domain is then sampled."""

    vals: tuple[object, ...]

    def sample(self, rng: Random) -> object:
        val = self.vals[rng.randrange(len(self.vals))]
        return val.sample(rng) if isinstance(val, DOMAINS) else copy.deepcopy(val)

    def grid_size(self, path: str, faults: Faults) -> int:
        return sum(
            val.grid_size(f"{path}.vals[{i}]", faults) if isinstance(val, DOMAINS) else 1
            for i, val in enumerate(self.vals)
        )

    def grid(self) -> Points:
        return chained([val.grid() if isinstance(val, DOMAINS) else Points.of([val]) for val in self.vals])

    def check(self, value: object, path: str, faults: Faults) -> object:
        choice, checked = self.find(value)
        if choice is not None:
            return checked
        shown = ", ".join(repr(val) for val in self.vals if not isinstance(val, DOMAINS))
        branches = [val for val in self.vals if isinstance(val, DOMAINS)]
        if branches and isinstance(value, Mapping):
            # Report the most likely branch: one with the same constants (such as a name), else with the fewest faults.
            candidates: list[tuple[bool, int, Faults]] = []
            for branch in branches:
                found: Faults = []
                branch.check(value, path, found)
                candidates.append((_contradicts(branch, value), len(found), found))
            faults.extend(min(candidates)[2])
        else:
            also = f"{shown and ', or one of '}{len(branches)} mappings" if branches else ""
            faults.append((path, f"must be one of {shown}{also}, got {value!r}"))
        return value

    def find(self, value: object) -> tuple[int | None, object]:
        """Return the index in `vals` of this value or its domain, and the value as sampled; else (None, None)."""
        for choice, val in enumerate(self.vals):
            if isinstance(val, DOMAINS):
                faults: Faults = []
                checked = val.check(value, "", faults)
                if not faults:
                    return choice, checked
            elif same(value, val):
                return choice, copy.deepcopy(val)
        return None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """A mapping of names to domains, sorted by name."""

    domains: tuple[tuple[str, Domain], ...]

    def sample(self, rng: Random) -> dict[str, object]:
        return {name: domain.sample(rng) for name, domain in self.domains}

    def grid_size(self, path: str, faults: Faults) -> int:
        return math.prod(domain.grid_size(f"{path}.{name}", faults) for name, domain in self.domains)

    def grid(self) -> Points:
        return crossed([name for name, _ in self.domains], [domain.grid() for _, domain in self.domains])

    def check(self, value: object, path: str, faults: Faults) -> object:
        if not isinstance(value, Mapping):
            faults.append((path, f"must be a mapping of hyperparameters, got {value!r}"))
            return value
        known = [name for name, _ in self.domains]
        for name in value:
            if name not in known:
                hint = did_you_mean(name, known) if len(faults) < SHOWN else ""
                faults.append((f"{path}.{name}", f"is not a hyperparameter of the space{hint}"))
        return {name: self._check_one(value, name, domain, f"{path}.{name}", faults) for name, domain in self.domains}

    @staticmethod
    def _check_one(value: Mapping[object, object], name: str, domain: Domain, path: str, faults: Faults) -> object:
        if name in value:
            return domain.check(value[name], path, faults)
        if isinstance(domain, Const):  # a constant may be omitted
            return copy.deepcopy(domain.val)
        if isinstance(domain, Nested):
            return domain.check({}, path, faults)
        faults.append((path, "is missing"))
        return None


Domain = Const | Categorical | Int | Double | Log | Nested
DOMAINS = (Const, Categorical, Int, Double, Log, Nested)


def every_point(domain: object) -> Points | None:
    """Return all points of a domain, also of a number with a `count`, which is only for grids; None if there is no end
    to them, as with every number but integers and those with a step."""
    match domain:
        case Nested(domains=domains):
            axes = [every_point(inner) for _, inner in domains]
            known = [axis for axis in axes if axis is not None]
            return crossed([name for name, _ in domains], known) if len(known) == len(axes) else None
        case Categorical(vals=vals):
            parts = [every_point(val) for val in vals]
            known = [part for part in parts if part is not None]
            return chained(known) if len(known) == len(parts) else None
        case Int() | Double(step=float()):
            return replace(domain, count=None).grid()
        case Double() | Log():
            return None
        case Const(val=val):
            return Points.of([val])
    return Points.of([domain])  # a plain category


@dataclass(frozen=True, slots=True)
class Parameter:
    """A hyperparameter that is searched, i.e. not constant."""

    name: str  # dotted, as in "model.layers"; "optimizer[0].momentum" belongs to the space of the first category
    domain: Categorical | Int | Double | Log
    parent: tuple[str, int] | None  # the categorical's name and the index of the category; None if unconditional


def parameters(domain: object, name: str = "", parent: tuple[str, int] | None = None) -> Iterator[Parameter]:
    """Yield the searched hyperparameters of a space; those of a category's own space follow the categorical."""
    match domain:
        case Nested(domains=domains):
            for key, inner in domains:
                yield from parameters(inner, f"{name}.{key}" if name else key, parent)
        case Categorical(vals=vals):
            yield Parameter(name, domain, parent)
            for choice, val in enumerate(vals):
                yield from parameters(val, f"{name}[{choice}]", (name, choice))
        case Int() | Double() | Log():
            yield Parameter(name, domain, parent)


def numbers_of(domain: object, value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield a point's values by name; a category is represented by its index.

    Values outside the space are skipped, because a user may have changed the point.
    """
    match domain:
        case Nested(domains=domains) if isinstance(value, Mapping):
            for key, inner in domains:
                if key in value:
                    yield from numbers_of(inner, value[key], f"{name}.{key}" if name else key)
        case Categorical(vals=vals):
            choice, _ = domain.find(value)
            if choice is None and isinstance(value, Mapping):  # a branch with other ranges or hyperparameters
                branches = (i for i, val in enumerate(vals) if isinstance(val, Nested) and not _contradicts(val, value))
                choice = next(branches, None)
            if choice is not None:
                yield name, choice
                yield from numbers_of(vals[choice], value, f"{name}[{choice}]")
        case Int() | Double() | Log() if isinstance(value, int | float):
            yield name, value


def build(domain: object, value_of: Callable[[str, Any], Any], name: str = "") -> object:
    """Build a point, the inverse of `numbers_of`; `value_of(name, domain)` is called for each of its parameters."""
    match domain:
        case Nested(domains=domains):
            return {key: build(inner, value_of, f"{name}.{key}" if name else key) for key, inner in domains}
        case Categorical(vals=vals):
            choice = value_of(name, domain)
            return build(vals[choice], value_of, f"{name}[{choice}]")
        case Int() | Double() | Log():
            return value_of(name, domain)
        case Const(val=val):
            return copy.deepcopy(val)
    return copy.deepcopy(domain)  # a plain category


def _contradicts(branch: object, value: Mapping[str, object]) -> bool:
    domains = branch.domains if isinstance(branch, Nested) else ()
    return any(
        isinstance(domain, Const) and name in value and not same(value[name], domain.val) for name, domain in domains
    )


def searched(space: Nested, point: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the searched hyperparameters of a point, by dotted name."""
    for name, domain in space.domains:
        value = point.get(name)
        if isinstance(domain, Nested) and isinstance(value, Mapping):
            yield from searched(domain, value, prefix=f"{prefix}{name}.")
        elif not isinstance(domain, Const) and name in point:
            yield prefix + name, value


_VALUES_SHOWN = 8  # longer categoricals are abbreviated


def ranges(space: Nested, *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each searched hyperparameter's dotted name and range, in the same words for all ways to configure it.

    >>> from searchers.space import parse
    >>> dict(ranges(parse({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}, "batch": 64}).root))
    {'lr': '0.0001 to 0.1, log'}
    >>> sgd = {"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}}
    >>> dict(ranges(parse({"optimizer": {"type": "categorical", "vals": ["adam", sgd]}}).root))
    {'optimizer': 'one of adam, {momentum: 0 to 0.9, name: sgd}'}
    """
    for name, domain in space.domains:
        match domain:
            case Const():
                pass
            case Nested():
                yield from ranges(domain, prefix=f"{prefix}{name}.")
            case Categorical(vals=vals):
                more = f", ... ({len(vals)} values)" if len(vals) > _VALUES_SHOWN else ""
                yield prefix + name, f"one of {', '.join(map(_describe_category, vals[:_VALUES_SHOWN]))}{more}"
            case _:
                yield prefix + name, _describe_range(domain)


def _describe_range(domain: Int | Double | Log) -> str:
    low, high = domain.bounds if isinstance(domain, Log) else (domain.minval, domain.maxval)
    step = "" if domain.step in (None, 1) else f", in steps of {domain.step:g}"
    kind = ", log" if isinstance(domain, Log) or (isinstance(domain, Int) and domain.log) else ""
    return f"{low:g} to {high:g}{', integer' if isinstance(domain, Int) else ''}{step}{kind}"


def _describe_category(value: object) -> str:
    match value:
        case Nested(domains=domains):
            return "{" + ", ".join(f"{name}: {_describe_category(each)}" for name, each in domains) + "}"
        case Categorical(vals=vals):
            return " | ".join(map(_describe_category, vals))
        case Int() | Double() | Log():
            return _describe_range(value)
        case Const(val=val):
            return _describe_category(val)
        case str():
            return value
    return json.dumps(value)


def same(value: object, other: object) -> bool:
    """Compare JSON values: 1.0 equals 1 but True does not, a tuple equals a list, NaN equals itself."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    return value == other or (value != value and other != other)
