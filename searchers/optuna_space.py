"""Translation of spaces to Optuna distributions, and of points to and from Optuna parameters.

Parameters are flat: "model.layers", and "optimizer[0].momentum" for a hyperparameter of the first category's own space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from searchers.domains import Categorical, Nested, build, numbers_of, parameters
from searchers.numeric_domains import Double, Int, Log
from searchers.space import Space

_MAX_DISCRETE_STEPS = 16  # a number with more steps is continuous for TPE


def to_optuna(space: Space, *, wide_as_float: bool = False) -> dict[str, BaseDistribution]:
    """Return Optuna's distributions for the space, by parameter name, without constants.

    A category is represented by its index, since Optuna's choices cannot be mappings. With `wide_as_float`, a number
    with more than 16 steps becomes a continuous range whose draws are rounded, because TPE is several times slower on
    discrete distributions.
    """
    return {each.name: _distribution(each.domain, wide_as_float) for each in parameters(space.root)}


def _distribution(domain: Categorical | Int | Double | Log, wide_as_float: bool) -> BaseDistribution:
    match domain:
        case Categorical(vals=vals):
            return CategoricalDistribution(tuple(range(len(vals))))
        case Int(minval=low, maxval=high, step=step, log=log):
            if wide_as_float and (high - low) / step > _MAX_DISCRETE_STEPS:
                return FloatDistribution(low - step / 2, high + step / 2, log=log)
            # Optuna has no steps in logarithmic ranges, so draws are rounded.
            return IntDistribution(low, high if log else domain.nearest(high), step=1 if log else step, log=log)
        case Double(minval=low, maxval=high, step=step):
            if step is not None and wide_as_float and (high - low) / step > _MAX_DISCRETE_STEPS:
                return FloatDistribution(low - step / 2, high + step / 2)
            return FloatDistribution(low, domain.nearest(high), step=step)
    low, high = domain.bounds
    return FloatDistribution(low, high, log=True)


def from_optuna_trial(
    root: Nested, trial: optuna.Trial, distributions: Mapping[str, BaseDistribution]
) -> dict[str, object]:
    """Build a point from the trial's suggestions; in a conditional space only for the drawn branches."""

    def value_of(name: str, domain: Categorical | Int | Double | Log) -> Any:
        value = _suggest(trial, name, distributions[name])
        match domain:
            case Categorical():
                return value
            case Log(bounds=(low, high)):
                return domain.nearest(min(max(value, low), high))
        return domain.nearest(value)

    point = build(root, value_of)
    assert isinstance(point, dict)
    return point


def encode(root: Nested, point: Mapping[str, object], distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return a point's Optuna parameters by name, the inverse of `from_optuna_trial`.

    Values outside the space are left out, because a user may have changed the point.
    """
    params: dict[str, Any] = dict(numbers_of(root, point))
    for name, value in params.items():
        match distributions[name]:
            case FloatDistribution(low=low, high=high):
                params[name] = min(max(float(value), low), high)
    return params


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    match distribution:
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(name, choices)
        case IntDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_int(name, low, high, step=step, log=log)
        case FloatDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_float(name, low, high, step=step, log=log)
    raise AssertionError(f"unexpected {distribution!r}")
