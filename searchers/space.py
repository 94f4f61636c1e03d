"""Hyperparameter spaces: a parser of Determined's YAML, sampling, grids and validation.

    hyperparameters:
      global_batch_size: 64                                   # a scalar or a list is a constant
      lr: {type: log, base: 10, minval: -4, maxval: -1}       # 10 ** U(-4, -1): the bounds are exponents
      hidden: {type: int, minval: 16, maxval: 256, step: 16}  # both ends included; or `log: true`
      dropout: {type: double, minval: 0.0, maxval: 0.5}
      model:                                                  # a mapping without "type" is nested
        layers: {type: const, val: 3}
      optimizer:                                              # conditional: only sgd has a momentum
        type: categorical
        vals: [{name: sgd, momentum: {type: double, minval: 0.0, maxval: 0.99}}, {name: adam}]

Keys are visited in sorted order at every level, so that a sample does not depend on their order in the file. `step`,
`log` and conditional categories are additions to Determined's format.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from searchers.domains import Categorical, Const, Domain, Nested, every_point, parameters
from searchers.errors import SHOWN, Faults, SpaceError, did_you_mean
from searchers.grids import Points
from searchers.numeric_domains import Double, Int, Log, is_number
from searchers.records import FLOAT, hparams_from_json, hparams_to_json

_MAX_INT = 2**63


def checked(space: Nested, given: Mapping[str, object], path: str, faults: Faults) -> dict[str, object]:
    """Return the given values as nested mappings, with numbers of the types that the space draws.

    Args:
        given: Values by name; `model.layers` is the value of `layers` in the mapping `model`.

    >>> from searchers.space import parse
    >>> space = parse({"model": {"layers": {"type": "int", "minval": 1, "maxval": 4}, "name": "mlp"}})
    >>> checked(space.root, {"model.layers": 8.0}, "hyperparameters", [])
    {'model': {'layers': 8}}
    """
    known, found = dict(space.domains), dict[str, object]()
    for name, value in given.items():
        first, _, rest = name.partition(".")
        place = f"{path}.{name}"
        if name in known:
            new = {name: _checked(known[name], value, place, faults)}
        elif isinstance(inner := known.get(first), Nested) and rest:
            new = {first: checked(inner, {rest: value}, f"{path}.{first}", faults)}
        elif rest and first in known:
            faults.append((place, f"can't be set by itself; set all of {first}"))
            continue
        else:
            hint = did_you_mean(name, known, f"; there are: {', '.join(known)}")
            faults.append((place, f"is not a hyperparameter of the space{hint}"))
            continue
        found = merge(space, found, new)
    return found


def _checked(domain: Domain, value: object, path: str, faults: Faults) -> object:
    match domain:
        case Nested() if isinstance(value, Mapping):
            return checked(domain, value, path, faults)
        case Categorical() if (choice := domain.find(value))[0] is not None:
            return choice[1]
        case Categorical(vals=vals) if _kind(value) in {_kind(val) for val in vals} - {"mapping"}:
            pass
        case Nested() | Categorical():
            domain.check(value, path, faults)
        case Const(val=val):
            if val is not None and _kind(value) != _kind(val):
                faults.append((path, f"must be a {_kind(val)}, as {val!r} is, got {value!r}"))
        case Int():
            if not is_number(value) or value != value // 1:
                faults.append((path, f"must be an integer, got {value!r}"))
            else:
                value = int(value)
        case _:
            if is_number(value) or value in (math.inf, -math.inf):
                return float(value)
            faults.append((path, f"must be a number, got {value!r}"))
    if isinstance(value, int) and not -_MAX_INT <= value < _MAX_INT:
        faults.append((path, f"must be an integer of at most 64 bits, got one of {value.bit_length()}"))
    return value


def _kind(value: object) -> str:
    for kind, types in (("bool", bool), ("number", int | float), ("string", str), ("list", list), ("null", type(None))):
        if isinstance(value, cast("type", types)):
            return kind
    return "mapping"


def merge(space: Nested, point: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the point with the given values, in nested mappings too."""
    known, found = dict(space.domains), dict(point)
    for name, value in given.items():
        inner, old = known.get(name), found.get(name, {})
        if isinstance(inner, Nested) and isinstance(old, Mapping) and isinstance(value, Mapping):
            found[name] = merge(inner, old, value)
        else:
            found[name] = copy.deepcopy(value)
    return found


PATH = "hyperparameters"  # a space's name in errors
MAX_GRID = 1_000_000  # points of a grid; a constraint looks at each
MAX_TRIED = 1_000  # points of a space that a search tries only once each; a larger one counts as infinite
MAX_DRAWS = 1000  # draws per trial before the constraint counts as unsatisfiable

Constraint = Callable[[Mapping[str, object]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A parsed space, the result of `parse`."""

    root: Nested
    constraint: Constraint | None = None  # must depend only on the point, otherwise searches aren't reproducible

    def sample(self, rng: Random) -> dict[str, object]:
        """Draw a point, a new dict of JSON values with sorted keys at every level.

        A point that the constraint rejects is drawn again from the same `rng`. Constants consume no random numbers.

        Raises:
            SpaceError: The constraint rejected 1,000 points in a row.

        >>> space = parse({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}, "batch": 64})
        >>> sorted(space.sample(Random(7)))
        ['batch', 'lr']
        """
        for _ in range(MAX_DRAWS):
            point = self.root.sample(rng)
            if self.allows(point):
                return point
        message = f"the constraint rejected all {MAX_DRAWS} points drawn; loosen it, or narrow the ranges to match it"
        raise SpaceError([(PATH, message)])

    def allows(self, point: Mapping[str, object]) -> bool:
        """Whether the constraint, if any, accepts the point."""
        return self.constraint is None or bool(self.constraint(point))

    def grid(self, most: int = MAX_GRID) -> Points:
        """Return all points of the grid, as in Determined: the Cartesian product of all axes.

        The first name in sorted order changes slowest. A constant has one point, a categorical one for each value. A
        number has `count` evenly spaced points (for a log, in the exponent) including both ends, or the midpoint if
        count is 1; integers are rounded, halves away from zero, without duplicates. A conditional category has the
        points of its own grid. A space without hyperparameters has no points. Points that the constraint rejects are
        left out.

        Raises:
            SpaceError: A number has neither `count` nor `step`, or the grid has more than `most` points.

        >>> list(parse({"a": {"type": "int", "minval": 0, "maxval": 9, "count": 2}, "b": [1, 2]}).grid())
        [{'a': 0, 'b': [1, 2]}, {'a': 9, 'b': [1, 2]}]
        """
        faults: Faults = []
        size = self.root.grid_size(PATH, faults)
        if size > most:  # known before any point is made
            has = f"{size:,}" if size < 10**18 else "more than 10**18"
            raise_it = "" if most == MAX_GRID else ", or raise searcher.max_points"
            what = f"the grid has {has} points, and may have {most:,}; use fewer values, or random search{raise_it}"
            faults.append((PATH, what))
        if faults:
            raise SpaceError(faults)
        points = self.root.grid() if self.root.domains else Points.of([])
        if self.constraint is None:
            return points
        return Points.of([point for point in points if self.allows(point)])

    def every_point(self) -> Points | None:
        """Return all points. None if there are infinitely many or more than `MAX_TRIED`, if nothing is searched, or if
        the constraint allows none (`sample` then raises).

        >>> space = parse({"x": {"type": "int", "minval": 1, "maxval": 3, "count": 2}, "batch": 64})
        >>> list(space.every_point())
        [{'batch': 64, 'x': 1}, {'batch': 64, 'x': 2}, {'batch': 64, 'x': 3}]
        """
        points = every_point(self.root) if any(parameters(self.root)) else None
        if points is None or points.size > MAX_TRIED:
            return None
        if self.constraint is None:
            return points
        allowed = [point for point in points if self.allows(point)]
        return Points.of(allowed) if allowed else None

    def check(self, point: object, *, path: str) -> dict[str, object]:
        """Convert a point to the form in which it would be sampled: whole floats become integers for `int`, and
        constants are filled in.

        Args:
            point: A user's point; its numbers may have NumPy types.
            path: Name of the point in errors, e.g. `searcher.points[2]`.

        Raises:
            SpaceError: `point` is not a point of the space; every fault is listed with its path.
        """
        faults: Faults = []
        try:
            point = hparams_from_json(hparams_to_json(point))
        except ValueError as error:
            raise SpaceError([(path, str(error))]) from None
        checked = self.root.check(point, path, faults)
        if not faults and not self.allows(cast("dict[str, object]", checked)):
            faults.append((path, "is rejected by the constraint of the space"))
        if faults:
            raise SpaceError(faults)
        return cast("dict[str, object]", checked)

    def given(self, hparams: Mapping[str, object]) -> dict[str, object]:
        """Convert hyperparameters that a person gives to one trial: any values of the right types, by dotted name.

        Raises:
            SpaceError: A name is unknown, or a value has another type; every fault is listed with its path.
        """
        faults: Faults = []
        plain: dict[str, object] = {}
        for name, value in hparams.items():
            try:
                plain[name] = hparams_from_json(hparams_to_json(value))
            except ValueError as error:
                faults.append((f"{PATH}.{name}", str(error)))
        found = checked(self.root, plain, PATH, faults)
        if faults:
            raise SpaceError(faults)
        return found

    def faults(self, point: object) -> Faults:
        """List the reasons why this is not a point of the domains. The constraint is not checked."""
        faults: Faults = []
        self.root.check(point, PATH, faults)
        return faults


def parse(hyperparameters: Mapping[str, object], *, constraint: Constraint | None = None) -> Space:
    """Parse hyperparameters in the form of an experiment file.

    Raises:
        SpaceError: The space is invalid. `faults` lists every fault with its path, e.g. "hyperparameters.lr.minval".
    """
    faults: Faults = []
    root = _nested(plain(hyperparameters), PATH, faults)
    if faults:
        raise SpaceError(faults)
    return Space(root=root, constraint=constraint)


def plain(value: Any) -> Any:
    """Return a copy as from YAML: lists instead of tuples and arrays, and Python's numbers instead of NumPy's."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


_REQUIRED = {
    "const": ("val",),
    "categorical": ("vals",),
    "int": ("minval", "maxval"),
    "double": ("minval", "maxval"),
    "log": ("base", "minval", "maxval"),
}
_OPTIONAL = {"int": ("count", "step", "log"), "double": ("count", "step"), "log": ("count", "step")}
_FIELDS = frozenset(field for fields in _REQUIRED.values() for field in fields)


def _nested(spec: object, path: str, faults: Faults) -> Nested:
    if not isinstance(spec, Mapping):
        faults.append((path, f"must be a mapping of names to hyperparameters, got {spec!r}"))
        return Nested(domains=())
    names = [name for name in spec if isinstance(name, str)]
    faults.extend((path, f"names must be strings, got {name!r}") for name in spec if not isinstance(name, str))
    if FLOAT in spec:
        faults.append((path, f"a hyperparameter can't be called {FLOAT}, which marks inf and nan in the journal"))
    return Nested(domains=tuple((name, _domain(spec[name], f"{path}.{name}", faults)) for name in sorted(names)))


def _domain(spec: object, path: str, faults: Faults) -> Domain:
    if not isinstance(spec, Mapping):
        return Const(val=_json(spec, path, faults))
    if "type" not in spec:
        return _nested(spec, path, faults)
    before = len(faults)
    fields = _fields(spec, path, faults)
    if len(faults) > before:
        return Const(val=None)  # not used, because `parse` raises
    match spec["type"]:
        case "const":
            return Const(val=_json(fields["val"], f"{path}.val", faults))
        case "categorical":
            return _categorical(fields["vals"], f"{path}.vals", faults)
    return _numeric(str(spec["type"]), fields, path, faults)


def _fields(spec: Mapping[str, object], path: str, faults: Faults) -> dict[str, object]:
    """Return the fields of a typed domain; append missing and unknown ones to `faults`."""
    kind = spec["type"]
    if not isinstance(kind, str) or kind not in _REQUIRED:
        known = ", ".join(_REQUIRED)
        faults.append((f"{path}.type", f"must be one of {known}, got {kind!r}{did_you_mean(kind, _REQUIRED)}"))
        return {}
    allowed = ["type", *_REQUIRED[kind], *_OPTIONAL.get(kind, ())]
    for name in spec:
        if name not in allowed:
            hint = did_you_mean(name, allowed) if len(faults) < SHOWN else ""
            faults.append((f"{path}.{name}", f"is not a field of type {kind}{hint}"))
    for name in _REQUIRED[kind]:
        if name not in spec:
            faults.append((f"{path}.{name}", f"is required for type {kind}"))
    return {name: value for name, value in spec.items() if name != "type"}


def _categorical(vals: object, path: str, faults: Faults) -> Categorical:
    if not isinstance(vals, list) or not vals:
        faults.append((path, f"must be a list of at least one value, got {vals!r}"))
        return Categorical(vals=())
    # If one mapping contains a domain, all mappings are spaces, e.g. {name: adam} next to {name: sgd, momentum: ...}.
    conditional = any(map(_holds_domain, vals))
    return Categorical(
        vals=tuple(
            _domain(val, f"{path}[{i}]", faults)
            if _holds_domain(val) or (conditional and isinstance(val, Mapping) and "type" not in val)
            else _json(val, f"{path}[{i}]", faults)
            for i, val in enumerate(vals)
        )
    )


def _holds_domain(val: object) -> bool:
    """Whether a category is a space; a mapping like {"type": "relu"} is a plain value."""
    if not isinstance(val, Mapping):
        return False
    return ("type" in val and not _FIELDS.isdisjoint(val)) or any(map(_holds_domain, val.values()))


def spaces_in_lists(hyperparameters: object, path: str) -> list[str]:
    """Return the paths of likely spaces inside lists. A list is a single constant, so they would not be searched.

    >>> spaces_in_lists({"layers": [8, {"type": "int", "minval": 1, "maxval": 4}]}, "hyperparameters")
    ['hyperparameters.layers[1]']
    """
    if isinstance(hyperparameters, Mapping) and "type" not in hyperparameters:
        return [found for name, spec in hyperparameters.items() for found in spaces_in_lists(spec, f"{path}.{name}")]
    found: list[str] = []
    for number, item in enumerate(hyperparameters if isinstance(hyperparameters, list | tuple) else ()):
        place = f"{path}[{number}]"
        found += [place] if _holds_domain(item) else spaces_in_lists(item, place) if isinstance(item, list) else []
    return found


def _numeric(kind: str, fields: dict[str, object], path: str, faults: Faults) -> Domain:
    before = len(faults)
    bound = _whole if kind == "int" else _number
    low, high = (bound(fields[name], f"{path}.{name}", faults) for name in ("minval", "maxval"))
    base = _number(fields["base"], f"{path}.base", faults) if kind == "log" else 1
    count = fields.get("count")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        faults.append((f"{path}.count", f"must be an integer >= 1, got {count!r}"))
    step = None if fields.get("step") is None else bound(fields["step"], f"{path}.step", faults)
    log = fields.get("log", False)
    if not isinstance(log, bool):
        faults.append((f"{path}.log", f"must be true or false, got {log!r}"))
    if len(faults) == before:
        if low >= high:
            faults.append((f"{path}.minval", f"must be < maxval, got minval {low!r} and maxval {high!r}"))
        if base <= 0:
            faults.append((f"{path}.base", f"must be > 0, got {base!r}"))
        elif kind == "log" and not _is_finite_power(base, low, high):
            faults.append((path, f"values must be finite, got {base!r} ** {low!r} to {base!r} ** {high!r}"))
        elif kind == "double" and not math.isfinite(high - low):
            faults.append((path, f"maxval - minval must be finite, got minval {low!r} and maxval {high!r}"))
        if step is not None and step <= 0:
            faults.append((f"{path}.step", f"must be > 0, got {step!r}"))
        if log and low < 1:
            faults.append((f"{path}.minval", f"must be >= 1 where log is true, got {low!r}"))
    if len(faults) > before:
        return Const(val=None)
    grid = count if isinstance(count, int) else None
    match kind:
        case "int":
            return Int(minval=int(low), maxval=int(high), count=grid, step=int(step or 1), log=bool(log))
        case "double":
            return Double(minval=float(low), maxval=float(high), count=grid, step=step)
    return Log(base=float(base), minval=float(low), maxval=float(high), count=grid, step=step)


def _is_finite_power(base: float, *exponents: float) -> bool:
    try:
        return all(math.isfinite(float(base) ** exponent) for exponent in exponents)
    except OverflowError:
        return False


def _number(value: object, path: str, faults: Faults) -> float:
    if is_number(value):
        return value
    faults.append((path, f"must be a finite number, got {value!r}{_yaml_float(value)}"))
    return 0


def _whole(value: object, path: str, faults: Faults) -> float:
    if is_number(value) and value == value // 1:
        return int(value)
    faults.append((path, f"must be an integer, got {value!r}{_yaml_float(value)}"))
    return 0


def _yaml_float(value: object) -> str:
    """Return a hint for strings such as 1e-4, which YAML 1.1 does not read as a number without a decimal point."""
    try:
        return f" (a string; write {float(value)!r})" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _json(value: object, path: str, faults: Faults) -> object:
    """Check that the value is JSON, so that a replayed journal gives the same values."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        if isinstance(value, int) and not is_number(value):
            faults.append((path, "must be a number that a float can hold, got a larger one"))
        return value
    if isinstance(value, list):
        return [_json(item, f"{path}[{i}]", faults) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and FLOAT not in value and all(isinstance(name, str) for name in value):
        return {name: _json(item, f"{path}.{name}", faults) for name, item in value.items()}
    faults.append(
        (path, f"must be a number, a string, a bool, null, or lists and mappings of them, got {type(value).__name__}")
    )
    return None
