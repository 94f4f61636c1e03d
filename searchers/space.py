"""Hyperparameter spaces in Determined's YAML: what may be drawn, and drawing it.

    hyperparameters:
      global_batch_size: 64                                   # a scalar or a list is a constant
      lr: {type: log, base: 10, minval: -4, maxval: -1}       # 10 ** U(-4, -1): the bounds are exponents
      hidden: {type: int, minval: 16, maxval: 256}            # both ends included
      dropout: {type: double, minval: 0.0, maxval: 0.5}
      optimizer: {type: categorical, vals: [sgd, adam]}
      model:                                                  # a mapping without "type" is nested
        layers: {type: const, val: 3}

Keys are visited in sorted order at every level, so one seed gives one sample, whatever the order in the file.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Union

from searchers.errors import SpaceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Const:
    """Always `val`."""

    val: object

    def sample(self, rng: Random) -> object:
        return copy.deepcopy(self.val)  # else trials would share a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Categorical:
    """One of `vals`, all equally likely."""

    vals: tuple[object, ...]

    def sample(self, rng: Random) -> object:
        return copy.deepcopy(self.vals[rng.randrange(len(self.vals))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Int:
    """An integer, uniform from minval to maxval, both included. `count`: points on a grid."""

    minval: int
    maxval: int
    count: int | None = None

    def sample(self, rng: Random) -> object:
        return rng.randint(self.minval, self.maxval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Double:
    """A float, uniform from minval to maxval. `count`: points on a grid."""

    minval: float
    maxval: float
    count: int | None = None

    def sample(self, rng: Random) -> object:
        return rng.uniform(self.minval, self.maxval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """base ** e, the exponent e uniform from minval to maxval. `count`: points on a grid."""

    base: float
    minval: float
    maxval: float
    count: int | None = None

    def sample(self, rng: Random) -> object:
        return float(self.base ** rng.uniform(self.minval, self.maxval))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """A mapping of domains, its keys in sorted order."""

    domains: tuple[tuple[str, Domain], ...]

    def sample(self, rng: Random) -> dict[str, object]:
        return {name: domain.sample(rng) for name, domain in self.domains}


Domain = Union["Const", "Categorical", "Int", "Double", "Log", "Nested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A parsed space. `parse` makes one."""

    root: Nested

    def sample(self, rng: Random) -> dict[str, object]:
        """One point: a new dict of JSON values with sorted keys, also where nested. Constants draw nothing from `rng`.

        >>> space = parse({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}, "batch": 64})
        >>> sorted(space.sample(Random(7)))
        ['batch', 'lr']
        """
        return self.root.sample(rng)

    def names(self) -> list[str]:
        """Dotted names of all hyperparameters, sorted: "model.layers"."""
        return sorted(_names(self.root, prefix=""))


def parse(hyperparameters: Mapping[str, object], *, path: str = "hyperparameters") -> Space:
    """The space that a configuration's `hyperparameters` describe.

    Args:
        hyperparameters: Names to domains, as in the example at the top of this file.
        path: What to call it in errors.

    Raises:
        SpaceError: Something is invalid. `faults` names all of it, by path: "hyperparameters.lr.minval".
    """
    faults: list[tuple[str, str]] = []
    root = _nested(hyperparameters, path, faults)
    if faults:
        raise SpaceError(faults)
    return Space(root=root)


_REQUIRED = {
    "const": ("val",),
    "categorical": ("vals",),
    "int": ("minval", "maxval"),
    "double": ("minval", "maxval"),
    "log": ("base", "minval", "maxval"),
}
_GRIDDED = ("int", "double", "log")

Faults = list[tuple[str, str]]


def _nested(spec: object, path: str, faults: Faults) -> Nested:
    if not isinstance(spec, Mapping):
        faults.append((path, f"must be a mapping of names to hyperparameters, got {spec!r}"))
        return Nested(domains=())
    names = [name for name in spec if isinstance(name, str)]
    faults.extend((path, f"names must be strings, got {name!r}") for name in spec if not isinstance(name, str))
    return Nested(domains=tuple((name, _domain(spec[name], f"{path}.{name}", faults)) for name in sorted(names)))


def _domain(spec: object, path: str, faults: Faults) -> Domain:
    if not isinstance(spec, Mapping):
        return Const(val=_json(spec, path, faults))
    if "type" not in spec:
        return _nested(spec, path, faults)
    before = len(faults)
    fields = _fields(spec, path, faults)
    if len(faults) > before:
        return Const(val=None)  # never used: parse raises
    match spec["type"]:
        case "const":
            return Const(val=_json(fields["val"], f"{path}.val", faults))
        case "categorical":
            return _categorical(fields["vals"], f"{path}.vals", faults)
    return _numeric(str(spec["type"]), fields, path, faults)


def _fields(spec: Mapping[str, object], path: str, faults: Faults) -> dict[str, object]:
    """The fields of a typed domain: all the required ones are there, and no unknown one."""
    kind = spec["type"]
    if not isinstance(kind, str) or kind not in _REQUIRED:
        known = ", ".join(_REQUIRED)
        faults.append((f"{path}.type", f"must be one of {known}, got {kind!r}{_nearest(kind, list(_REQUIRED))}"))
        return {}
    allowed = ["type", *_REQUIRED[kind], *(["count"] if kind in _GRIDDED else [])]
    for name in spec:
        if name not in allowed:
            faults.append((f"{path}.{name}", f"is not a field of type {kind}{_nearest(name, allowed)}"))
    for name in _REQUIRED[kind]:
        if name not in spec:
            faults.append((f"{path}.{name}", f"is required for type {kind}"))
    return {name: value for name, value in spec.items() if name != "type"}


def _categorical(vals: object, path: str, faults: Faults) -> Categorical:
    if not isinstance(vals, list | tuple) or not vals:
        faults.append((path, f"must be a list of at least one value, got {vals!r}"))
        return Categorical(vals=())
    return Categorical(vals=tuple(_json(val, f"{path}[{i}]", faults) for i, val in enumerate(vals)))


def _numeric(kind: str, fields: dict[str, object], path: str, faults: Faults) -> Domain:
    before = len(faults)
    bound = _whole if kind == "int" else _number
    low, high = (bound(fields[name], f"{path}.{name}", faults) for name in ("minval", "maxval"))
    base = _number(fields["base"], f"{path}.base", faults) if kind == "log" else 1
    count = fields.get("count")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        faults.append((f"{path}.count", f"must be an integer >= 1, got {count!r}"))
    if len(faults) == before:
        if low >= high:
            faults.append((f"{path}.minval", f"must be < maxval, got minval {low!r} and maxval {high!r}"))
        if base <= 0:
            faults.append((f"{path}.base", f"must be > 0, got {base!r}"))
        elif kind == "log" and not _is_finite_power(base, low, high):
            faults.append((path, f"values must be finite, got {base!r} ** {low!r} to {base!r} ** {high!r}"))
        elif kind == "double" and not math.isfinite(high - low):
            faults.append((path, f"maxval - minval must be finite, got minval {low!r} and maxval {high!r}"))
    if len(faults) > before:
        return Const(val=None)
    grid = count if isinstance(count, int) else None
    match kind:
        case "int":
            return Int(minval=int(low), maxval=int(high), count=grid)
        case "double":
            return Double(minval=float(low), maxval=float(high), count=grid)
    return Log(base=float(base), minval=float(low), maxval=float(high), count=grid)


def _is_finite_power(base: float, *exponents: float) -> bool:
    try:
        return all(math.isfinite(float(base) ** exponent) for exponent in exponents)
    except OverflowError:
        return False


def _number(value: object, path: str, faults: Faults) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    faults.append((path, f"must be a finite number, got {value!r}{_yaml_float(value)}"))
    return 0


def _whole(value: object, path: str, faults: Faults) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    faults.append((path, f"must be an integer, got {value!r}{_yaml_float(value)}"))
    return 0


def _yaml_float(value: object) -> str:
    """YAML 1.1 reads 1e-4 as a string, for want of a point; say so."""
    try:
        return f" (a string; write {float(value)!r})" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _json(value: object, path: str, faults: Faults) -> object:
    """The value as JSON holds it (tuples become lists), so that a journal gives back what was drawn."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_json(item, f"{path}[{i}]", faults) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _json(item, f"{path}.{name}", faults) for name, item in value.items()}
    faults.append(
        (path, f"must be a number, a string, a bool, null, or lists and mappings of them, got {type(value).__name__}")
    )
    return None


def _nearest(name: object, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _names(nested: Nested, *, prefix: str) -> Iterator[str]:
    for name, domain in nested.domains:
        if isinstance(domain, Nested):
            yield from _names(domain, prefix=f"{prefix}{name}.")
        else:
            yield prefix + name
