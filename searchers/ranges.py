"""What a space searches over, in words: the values themselves, whatever way the config gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from searchers.domains import Categorical, Const, Nested
from searchers.numeric import Double, Int, Log

SHOWN = 8
"""Most values of a categorical that are shown."""


def ranges(space: Nested, *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each hyperparameter that is not constant, by dotted name, with its values.

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
                more = f", ... ({len(vals)} values)" if len(vals) > SHOWN else ""
                yield prefix + name, f"one of {', '.join(map(_value, vals[:SHOWN]))}{more}"
            case _:
                yield prefix + name, _number(domain)


def _number(domain: Int | Double | Log) -> str:
    low, high = domain.bounds if isinstance(domain, Log) else (domain.minval, domain.maxval)
    step = "" if domain.step in (None, 1) else f", in steps of {domain.step:g}"
    kind = ", log" if isinstance(domain, Log) or (isinstance(domain, Int) and domain.log) else ""
    return f"{low:g} to {high:g}{', integer' if isinstance(domain, Int) else ''}{step}{kind}"


def _value(value: object) -> str:
    """A category; a mapping that is a space by its constants and ranges."""
    match value:
        case Nested(domains=domains):
            return "{" + ", ".join(f"{name}: {_value(each)}" for name, each in domains) + "}"
        case Categorical(vals=vals):
            return " | ".join(map(_value, vals))
        case Int() | Double() | Log():
            return _number(value)
        case Const(val=val):
            return _value(val)
        case str():
            return value
    return json.dumps(value)
