"""Conversion of Optuna distributions and `ray.tune` domains to the hyperparameters that `parse` takes.

Objects are recognized by the names of their classes and attributes, so neither library is imported. The result is plain
JSON, as in a configuration: `parse(from_optuna({...}))`. NumPy's numbers and arrays become Python's numbers and lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from searchers.errors import Faults, SpaceError
from searchers.space import plain

Spec = dict[str, object]


def from_optuna(distributions: Mapping[str, object]) -> Spec:
    """Convert Optuna's distributions, such as `{"lr": FloatDistribution(1e-5, 1e-1, log=True)}`.

    Nested mappings are converted too; everything else (constants, domains in Determined's YAML) is returned unchanged.

    Raises:
        SpaceError: At least one distribution has no counterpart, or a tuple as a choice; the message names each.
    """
    return _converted(distributions, _convert_optuna)


def from_ray_tune(domains: Mapping[str, object]) -> Spec:
    """Convert Ray Tune's domains, such as `{"lr": tune.loguniform(1e-5, 1e-1), "n": tune.randint(1, 9)}`.

    Upper bounds that Ray excludes stay excluded: `randint(1, 9)` has a `maxval` of 8. `grid_search` becomes a
    categorical. Nested mappings are converted too; everything else (constants, domains in Determined's YAML) is
    returned unchanged.

    Raises:
        SpaceError: At least one domain has no counterpart (`randn` has no bounds, `sample_from` is a function), or a
            tuple as a choice; the message names each.
    """
    return _converted(domains, _convert_ray_tune)


def _converted(spec: Mapping[str, object], leaf: Callable[[object], object]) -> Spec:
    faults: Faults = []
    converted = _nested(spec, "hyperparameters", leaf, faults)
    if faults:
        raise SpaceError(faults)
    return cast("Spec", plain(converted))


def _nested(spec: Mapping[str, object], path: str, leaf: Callable[[object], object], faults: Faults) -> Spec:
    return {name: _value(value, f"{path}.{name}", leaf, faults) for name, value in spec.items()}


def _value(value: object, path: str, leaf: Callable[[object], object], faults: Faults) -> object:
    if isinstance(value, Mapping) and set(value) == {"grid_search"}:
        return {"type": "categorical", "vals": _branches(value["grid_search"], path, leaf, faults)}
    if isinstance(value, Mapping):
        return _nested(value, path, leaf, faults)
    try:
        converted = leaf(value)
    except ValueError as error:
        faults.append((path, str(error)))
        return None
    if isinstance(converted, dict) and converted.get("type") == "categorical":
        converted["vals"] = _branches(converted["vals"], path, leaf, faults)
    return converted


def _branches(vals: object, path: str, leaf: Callable[[object], object], faults: Faults) -> object:
    if not isinstance(vals, list | tuple):
        return vals
    for i, val in enumerate(vals):
        if isinstance(val, tuple):
            message = f"is the tuple {val!r}, which a trial would get as a list, since hyperparameters are JSON"
            faults.append((f"{path}.vals[{i}]", f"{message}; write {list(val)!r}"))
    return [_value(val, f"{path}.vals[{i}]", leaf, faults) for i, val in enumerate(vals)]


def _convert_optuna(value: Any) -> object:
    match type(value).__name__:
        case "CategoricalDistribution":
            return {"type": "categorical", "vals": list(value.choices)}
        case "IntDistribution":
            return _int(value.low, value.high, step=value.step, log=value.log)
        case "FloatDistribution":
            return _float(value.low, value.high, step=value.step, log=value.log)
        case name if name.endswith("Distribution"):
            raise ValueError(
                f"{value!r} can't be converted; use an IntDistribution, a FloatDistribution or a "
                "CategoricalDistribution"
            )
    return value


def _convert_ray_tune(value: Any) -> object:
    kind = type(value).__name__
    if not type(value).__module__.startswith("ray.tune."):
        return value
    if kind == "Categorical":
        return {"type": "categorical", "vals": list(value.categories)}
    sampler: Any = getattr(value, "sampler", None)
    step = None
    if type(sampler).__name__ == "Quantized":
        step, sampler = sampler.q, sampler.sampler
    distribution = type(sampler).__name__
    if kind not in ("Integer", "Float") or distribution == "_Normal" or not math.isfinite(value.upper - value.lower):
        raise ValueError(
            f"{kind}{getattr(value, 'domain_str', '')} of ray.tune is a function or has no bounds, so "
            "it can't be searched; use uniform, loguniform, randint, lograndint, their q variants, or choice"
        )
    log = distribution == "_LogUniform"
    if kind == "Float":
        return _float(value.lower, value.upper, step=step, log=log)
    low, high = int(value.lower), int(value.upper)
    if step in (None, 1):
        return _int(low, high - 1, step=1, log=log)  # Ray excludes the upper bound, unless the domain is quantized
    return _int(-(-low // step) * step, high // step * step, step=step, log=log)


def _int(low: int, high: int, *, step: int, log: bool) -> object:
    if low == high:
        return low
    return (
        {"type": "int", "minval": low, "maxval": high}
        | ({"step": step} if step != 1 else {})
        | ({"log": True} if log else {})
    )


def _float(low: float, high: float, *, step: object, log: bool) -> object:
    if low == high:
        return float(low)
    quantized = {} if step is None else {"step": step}
    if log:
        return {"type": "log", "base": 10, "minval": math.log10(low), "maxval": math.log10(high)} | quantized
    return {"type": "double", "minval": float(low), "maxval": float(high)} | quantized
