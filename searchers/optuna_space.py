"""A space in Optuna's terms: its distributions, and points translated from and into parameters of Optuna's.

Parameters are flat: "model.layers", and "optimizer[0].momentum" for a hyperparameter of the first category's own space.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from searchers.domains import DOMAINS, Categorical, Const, Nested
from searchers.numeric import Double, Int, Log
from searchers.space import Space

_WIDE = 16
"""With more steps than this a number is continuous for TPE."""


def to_optuna(space: Space, *, wide_as_float: bool = False) -> dict[str, BaseDistribution]:
    """The space as Optuna's distributions, by parameter name. Constants are left out.

    A category is represented by its index, since Optuna's choices cannot be mappings.

    Args:
        space: Any.
        wide_as_float: A number with more than 16 steps becomes a continuous range, whose draws are rounded: TPE takes
            several times as long over its discrete distributions.
    """
    found: dict[str, BaseDistribution] = {}
    _collect(space.root, "", wide_as_float, found)
    return found


def _collect(domain: object, name: str, wide_as_float: bool, found: dict[str, BaseDistribution]) -> None:
    match domain:
        case Nested(domains=domains):
            for key, inner in domains:
                _collect(inner, _below(name, key), wide_as_float, found)
        case Categorical(vals=vals):
            found[name] = CategoricalDistribution(tuple(range(len(vals))))
            for i, val in enumerate(vals):
                _collect(val, f"{name}[{i}]", wide_as_float, found)
        case Int(minval=low, maxval=high, step=step, log=log):
            if wide_as_float and (high - low) / step > _WIDE:
                found[name] = FloatDistribution(low - step / 2, high + step / 2, log=log)
            else:
                # Optuna has no logarithmic steps; draws are rounded to ours.
                found[name] = IntDistribution(
                    low, high if log else domain.nearest(high), step=1 if log else step, log=log
                )
        case Double(minval=low, maxval=high, step=step):
            if step is not None and wide_as_float and (high - low) / step > _WIDE:
                found[name] = FloatDistribution(low - step / 2, high + step / 2)
            else:
                found[name] = FloatDistribution(low, domain.nearest(high), step=step)
        case Log(bounds=(low, high)):
            found[name] = FloatDistribution(low, high, log=True)


def from_optuna_trial(
    root: Nested, trial: optuna.Trial, distributions: Mapping[str, BaseDistribution]
) -> dict[str, object]:
    """A point of the space, whose parameters the trial suggests.

    Args:
        root: Of the space.
        trial: Asked for the parameters that the point needs; of a conditional space not for all.
        distributions: `to_optuna` of the space.
    """
    point = _suggested(root, "", lambda name: _suggest(trial, name, distributions[name]))
    assert isinstance(point, dict)
    return point


def _suggested(domain: object, name: str, draw: Callable[[str], Any]) -> object:
    match domain:
        case Nested(domains=domains):
            return {key: _suggested(inner, _below(name, key), draw) for key, inner in domains}
        case Categorical(vals=vals):
            choice = draw(name)
            return _suggested(vals[choice], f"{name}[{choice}]", draw)
        case Int() | Double():
            return domain.nearest(draw(name))
        case Log(bounds=(low, high)):
            return domain.nearest(min(max(draw(name), low), high))
        case Const(val=val):
            return copy.deepcopy(val)
    return copy.deepcopy(domain)  # a plain category


def encoded(root: Nested, point: Mapping[str, object], distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """A point's parameters, by name; the inverse of `from_optuna_trial`.

    Values that are not of the space (a user may have changed the point) are left out.

    Args:
        root: Of the space.
        point: Hyperparameters.
        distributions: `to_optuna` of the space.
    """
    params: dict[str, Any] = {}
    _encode(root, "", point, params)
    for name, value in params.items():
        match distributions[name]:
            case FloatDistribution(low=low, high=high):
                params[name] = min(max(float(value), low), high)
    return params


def _encode(domain: object, name: str, value: object, params: dict[str, Any]) -> None:
    match domain:
        case Nested(domains=domains) if isinstance(value, Mapping):
            for key, inner in domains:
                if key in value:
                    _encode(inner, _below(name, key), value[key], params)
        case Categorical(vals=vals):
            choice, _ = domain.find(value)
            if choice is not None:
                params[name] = choice
                _encode(vals[choice], f"{name}[{choice}]", value, params)
        case Int() | Double() | Log() if isinstance(value, int | float):
            params[name] = value


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def is_conditional(domain: object) -> bool:
    """Whether a category has hyperparameters of its own."""
    match domain:
        case Nested(domains=domains):
            return any(is_conditional(inner) for _, inner in domains)
        case Categorical(vals=vals):
            return any(isinstance(val, DOMAINS) for val in vals)
    return False


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    match distribution:
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(name, choices)
        case IntDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_int(name, low, high, step=step, log=log)
        case FloatDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_float(name, low, high, step=step, log=log)
    raise AssertionError(f"unexpected {distribution!r}")
