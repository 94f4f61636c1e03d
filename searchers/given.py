"""Hyperparameters that a person gives to one trial: values of the right type, whether they are in the ranges or not."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import cast

from searchers.domains import Categorical, Const, Domain, Nested
from searchers.errors import Faults, did_you_mean
from searchers.numeric import Int, is_number

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
