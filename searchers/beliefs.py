"""A person's beliefs about good hyperparameters, for a sampler with a model.

A belief is a density over the rows of a space (see `unit_cube`), relative to the uniform density:

    p(x) = (1 - _UNIFORM) * b_1(x_1) * b_2(x_2) * ... + _UNIFORM

with one factor for each hyperparameter that has a belief. For a number, b is a normal density around the believed
value, cut off at the ends of the range. Its standard deviation is `within`: a factor on a logarithmic range, else a
distance. For a categorical, the believed value has the probability `_CATEGORY`, and the others share the rest. The
uniform part excludes nothing, however wrong the belief.

The first trial has the believed values. After that, a belief has a weight, which decreases with the number of results,
and to 0 if the trials of the believed region do worse than others at the same rungs. This share of the random trials is
drawn from the belief, and the model's proposals are weighted by p to this power.

Sources: Mallik et al., "PriorBand: Practical Hyperparameter Optimization in the Age of Deep Learning" (arXiv
2306.12370), for random trials; Hvarfner et al., "piBO: Augmenting Acquisition Functions with User Beliefs for Bayesian
Optimization" (arXiv 2204.11051), for proposals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy.special import expit, ndtr, ndtri

from searchers.domains import Categorical, Const, Nested, same
from searchers.errors import Faults, FieldError, did_you_mean
from searchers.numeric_domains import Int, Log, is_number
from searchers.rung_process import Array, Results
from searchers.samplers import Prior
from searchers.space import Space
from searchers.unit_cube import Axis, UnitCube, distance, place

_UNIFORM, _CATEGORY = 0.1, 0.75

_FADE = 8
"""The number of results after which a belief has half of its weight."""

_BETTER, _WEIGHT = 0.65, 6
"""The prior probability that a trial from the belief is better than another one, and its weight in trials."""


class Belief:
    """The density, and how much it is trusted.

    Args:
        space: The space of the hyperparameters.
        prior: May be empty.

    Raises:
        FieldError: A name, a value or a deviation is invalid; every fault is listed, e.g. `searcher.prior.lr.within`.
    """

    def __init__(self, space: Space, prior: Prior) -> None:
        self._cube = UnitCube(space)
        self._numbers: list[tuple[Axis, float, float]] = []  # with mean and standard deviation in the unit cube
        self._categories: list[tuple[Axis, Array]] = []  # with the probability of each category
        known, faults = self._cube.by_name, Faults()
        for name, belief in prior.items():
            path = f"searcher.prior.{name}"
            if name in known:
                self._add(known[name], belief, path, faults)
            else:
                hint = did_you_mean(name, known, f"; there are: {', '.join(known) or 'none'}")
                faults.append((path, f"is not a hyperparameter that is searched{hint}"))
        if faults:
            raise FieldError(faults)

    def _add(self, axis: Axis, belief: Mapping[str, object], path: str, faults: Faults) -> None:
        domain, before = axis.domain, len(faults)
        kind, fields = "number", ["around", "within"]
        if isinstance(domain, Categorical):
            kind, fields = "categorical", ["around"]
        faults += [(f"{path}.{name}", "is required") for name in fields if name not in belief]
        unknown = f"unknown field; a belief about a {kind} has {' and '.join(fields)}"
        faults += [(f"{path}.{name}", unknown) for name in belief if name not in fields]
        if len(faults) > before:
            return
        around, within = belief["around"], belief.get("within")
        if isinstance(domain, Categorical):
            named = np.array([_is_named(val, around) for val in domain.vals])
            if named.sum() == 1:
                chances = np.where(named, _CATEGORY, (1 - _CATEGORY) / max(len(named) - 1, 1))
                self._categories.append((axis, chances / chances.sum()))  # a single category has all
            else:
                domain.check(around, f"{path}.around", faults)
                if len(faults) == before:  # a valid value, but it is listed twice or has hyperparameters of its own
                    what = f"must name 1 category, but {around!r} names {named.sum()}; name a mapping by its constants"
                    faults.append((f"{path}.around", what))
            return
        domain.check(around, f"{path}.around", faults)
        is_log = isinstance(domain, Log) or (isinstance(domain, Int) and domain.log)
        if not is_number(within) or within <= is_log:
            least = "a factor > 1" if is_log else "a distance > 0"
            faults.append((f"{path}.within", f"must be {least}, got {within!r}"))
        elif len(faults) == before and is_number(around):
            # Within these bounds, no density is 0 or infinite.
            deviation = min(max(distance(domain, within), 1e-3), 10.0)
            self._numbers.append((axis, place(domain, around), deviation))

    def random(self, rng: np.random.Generator, count: int) -> Array:
        """Draw rows from the density, shape (count, width), ignoring the space's constraint."""
        rows = self._cube.random(rng, count)
        believed = rng.random(count) >= _UNIFORM
        for axis, mean, deviation in self._numbers:
            low, high = ndtr(-mean / deviation), ndtr((1 - mean) / deviation)
            drawn = mean + deviation * ndtri(rng.uniform(low, high, count))
            rows[believed, axis.columns.start] = np.clip(drawn, 0, 1)[believed]
        for axis, chances in self._categories:
            drawn = np.eye(len(chances))[rng.choice(len(chances), count, p=chances)]
            rows[believed, axis.columns] = drawn[believed]
        return self._cube.without_absent(rows)

    def around(self, rng: np.random.Generator, count: int) -> Array:
        """Draw rows with the believed values, shape (count, width); the other hyperparameters are random."""
        rows = self._cube.random(rng, count)
        for axis, mean, _ in self._numbers:
            rows[:, axis.columns] = mean
        for axis, chances in self._categories:
            rows[:, axis.columns] = chances == chances.max()
        return self._cube.without_absent(rows)

    def log_density(self, rows: Array) -> Array:
        """Return the logarithm of the density at these rows, shape (n,)."""
        density: Array = np.logaddexp(self._log_believed(rows), math.log(_UNIFORM))
        return density

    def _log_believed(self, rows: Array) -> Array:
        """Return the logarithm of the density without its uniform part."""
        total = np.full(len(rows), math.log(1 - _UNIFORM))
        for axis, mean, deviation in self._numbers:
            mass = ndtr((1 - mean) / deviation) - ndtr(-mean / deviation)
            z = (rows[:, axis.columns.start] - mean) / deviation
            total += axis.where_present(rows, -(z**2) / 2 - math.log(math.sqrt(2 * math.pi) * deviation * mass))
        for axis, chances in self._categories:
            relative = np.log(len(chances) * chances)
            total += axis.where_present(rows, relative[rows[:, axis.columns].argmax(axis=1)])
        return total

    def weight(self, results: Results, count: int) -> float:
        """Return the weight of the belief after this number of results, of which some are given.

        It is the product of two numbers from 0 to 1. The trust grows if the trials of the believed region are better
        than the others at the same rungs; a trial counts for the region in proportion to the probability that it was
        drawn from the belief, if it was drawn from either the belief or the whole space. The other one decreases with
        the number of results, because a wrong belief may look right at the first rungs.
        """
        inside = np.clip(expit(self._log_believed(results.rows)), 1e-9, 1 - 1e-9)  # otherwise there could be no pair
        better, weight = _BETTER * _WEIGHT, float(_WEIGHT)
        for rung in np.unique(results.rungs):
            here = results.rungs == rung
            share, values = inside[here], results.values[here]
            pairs = share[:, None] * (1 - share)
            number = min(share.sum(), (1 - share).sum())
            wins = (values[:, None] < values) + (values[:, None] == values) / 2
            better += number * float((pairs * wins).sum() / pairs.sum())
            weight += number
        return max(2 * better / weight - 1, 0.0) * _FADE / (_FADE + count)

    def __bool__(self) -> bool:
        return bool(self._numbers or self._categories)


def _is_named(val: object, around: object) -> bool:
    """Whether `around` is this category or, for one with hyperparameters of its own, consists of constants of it."""
    if not isinstance(val, Nested):
        return same(val, around)
    constants = {name: domain.val for name, domain in val.domains if isinstance(domain, Const)}
    return isinstance(around, Mapping) and all(
        name in constants and same(constants[name], value) for name, value in around.items()
    )
