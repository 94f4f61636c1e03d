"""Spaces from Optuna's distributions and ray.tune's domains have the same values and bounds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from ray import tune

from searchers import SpaceError, parse_space
from searchers.convert import from_optuna, from_ray_tune

DRAWS = 2000


def drawn(spec: Mapping[str, object]) -> list[object]:
    space, rng = parse_space(json.loads(json.dumps(spec))), Random(0)  # a configuration can contain the result
    return [space.sample(rng)["x"] for _ in range(DRAWS)]


@pytest.mark.parametrize(
    ("distribution", "spec"),
    [
        (IntDistribution(2, 9), {"type": "int", "minval": 2, "maxval": 9}),
        (IntDistribution(2, 10, step=4), {"type": "int", "minval": 2, "maxval": 10, "step": 4}),
        (IntDistribution(1, 100, log=True), {"type": "int", "minval": 1, "maxval": 100, "log": True}),
        (IntDistribution(3, 3), 3),
        (FloatDistribution(0, 2), {"type": "double", "minval": 0.0, "maxval": 2.0}),
        (FloatDistribution(0, 2, step=0.5), {"type": "double", "minval": 0.0, "maxval": 2.0, "step": 0.5}),
        (FloatDistribution(1e-4, 1e-1, log=True), {"type": "log", "base": 10, "minval": -4.0, "maxval": -1.0}),
        (FloatDistribution(0.5, 0.5), 0.5),
        (CategoricalDistribution(("a", 2, None)), {"type": "categorical", "vals": ["a", 2, None]}),
        (64, 64),
        ({"type": "int", "minval": 1, "maxval": 2}, {"type": "int", "minval": 1, "maxval": 2}),
        ({"deep": IntDistribution(0, 1)}, {"deep": {"type": "int", "minval": 0, "maxval": 1}}),
    ],
    ids=str,
)
def test_optuna(distribution: object, spec: object) -> None:
    converted = from_optuna({"x": distribution})
    assert converted == {"x": spec}
    drawn(converted)


@pytest.mark.parametrize(
    ("domain", "spec"),
    [
        (tune.uniform(0, 2), {"type": "double", "minval": 0.0, "maxval": 2.0}),
        (tune.quniform(0, 2, 0.5), {"type": "double", "minval": 0.0, "maxval": 2.0, "step": 0.5}),
        (tune.loguniform(1e-4, 1e-1), {"type": "log", "base": 10, "minval": -4.0, "maxval": -1.0}),
        (tune.qloguniform(0.01, 1, 0.01), {"type": "log", "base": 10, "minval": -2.0, "maxval": 0.0, "step": 0.01}),
        (tune.randint(1, 9), {"type": "int", "minval": 1, "maxval": 8}),
        (tune.lograndint(1, 9), {"type": "int", "minval": 1, "maxval": 8, "log": True}),
        (tune.qrandint(1, 9, 3), {"type": "int", "minval": 3, "maxval": 9, "step": 3}),
        (tune.qrandint(1, 9, 1), {"type": "int", "minval": 1, "maxval": 8}),
        (tune.qlograndint(4, 16, 4), {"type": "int", "minval": 4, "maxval": 16, "step": 4, "log": True}),
        (tune.choice(["a", [1, 2]]), {"type": "categorical", "vals": ["a", [1, 2]]}),
        (tune.grid_search([1, 2]), {"type": "categorical", "vals": [1, 2]}),
        (
            tune.choice([{"name": "sgd", "momentum": tune.uniform(0, 1)}, {"name": "adam"}]),
            {
                "type": "categorical",
                "vals": [
                    {"name": "sgd", "momentum": {"type": "double", "minval": 0.0, "maxval": 1.0}},
                    {"name": "adam"},
                ],
            },
        ),
        ({"deep": {"er": tune.randint(0, 2)}}, {"deep": {"er": {"type": "int", "minval": 0, "maxval": 1}}}),
        ([1, 2], [1, 2]),
    ],
    # No `ids=str`, since a domain's repr has its address, which differs between pytest's processes.
)
def test_ray_tune(domain: object, spec: object) -> None:
    converted = from_ray_tune({"x": domain})
    assert converted == {"x": spec}
    drawn(converted)


@pytest.mark.parametrize(
    "domain",
    [tune.randint(1, 9), tune.qrandint(1, 9, 3), tune.qlograndint(4, 16, 4), tune.quniform(0, 2, 0.5)],
    ids=lambda domain: domain.domain_str,
)
def test_values_are_those_that_ray_draws(domain: tune.search.sample.Domain) -> None:  # type: ignore[name-defined]
    theirs = {round(float(value), 9) for value in domain.sample(size=DRAWS)}
    ours = {round(float(value), 9) for value in drawn(from_ray_tune({"x": domain}))}  # type: ignore[arg-type]
    assert ours == theirs


def test_medians_are_those_that_ray_draws() -> None:
    # The median of a log-uniform is the geometric mean of its ends.
    values = sorted(drawn(from_ray_tune({"x": tune.loguniform(1e-4, 1e-2)})))  # type: ignore[type-var]
    assert math.isclose(values[DRAWS // 2], 1e-3, rel_tol=0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("domain", "spec"),
    [
        (tune.uniform(np.float32(0), 1), {"type": "double", "minval": 0.0, "maxval": 1.0}),
        (tune.quniform(0, 2, np.float32(0.5)), {"type": "double", "minval": 0.0, "maxval": 2.0, "step": 0.5}),
        (tune.randint(np.int64(1), 4), {"type": "int", "minval": 1, "maxval": 3}),
        (tune.qrandint(np.int64(1), 9, np.int64(3)), {"type": "int", "minval": 3, "maxval": 9, "step": 3}),
        (tune.choice(np.arange(3)), {"type": "categorical", "vals": [0, 1, 2]}),
        (tune.grid_search(np.arange(2)), {"type": "categorical", "vals": [0, 1]}),
        (CategoricalDistribution(np.array([0.5, 1])), {"type": "categorical", "vals": [0.5, 1.0]}),
        (FloatDistribution(0, 2, step=np.float32(0.5)), {"type": "double", "minval": 0.0, "maxval": 2.0, "step": 0.5}),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({"type": "int", "minval": np.int64(1), "maxval": 2}, {"type": "int", "minval": 1, "maxval": 2}),
        ({"type": "categorical", "vals": np.arange(2)}, {"type": "categorical", "vals": [0, 1]}),
    ],
)
def test_numbers_and_arrays_of_numpy(domain: object, spec: object) -> None:
    converted = from_ray_tune(from_optuna({"x": domain}))
    assert json.dumps(converted) == json.dumps({"x": spec})


def test_numbers_and_arrays_of_numpy_in_the_form_of_yaml() -> None:
    space = parse_space({"a": {"type": "categorical", "vals": np.arange(2)}, "b": np.float32(0.5), "c": (1, 2)})
    assert space == parse_space({"a": {"type": "categorical", "vals": [0, 1]}, "b": 0.5, "c": [1, 2]})


@pytest.mark.parametrize("domain", [tune.choice([(64, 64), 3]), tune.grid_search([(64, 64), 3])])
def test_tuples_as_choices_are_rejected_because_trials_would_get_lists(domain: object) -> None:
    with pytest.raises(SpaceError, match=r"hyperparameters\.x\.vals\[0\]: is the tuple \(64, 64\).*write \[64, 64\]"):
        from_ray_tune({"x": domain})


def test_domains_without_a_counterpart_are_all_named_by_path() -> None:
    with pytest.raises(SpaceError) as caught:
        from_ray_tune(
            {
                "a": tune.randn(0, 1),
                "b": {"c": tune.sample_from(lambda spec: 1)},
                "d": tune.choice([1, tune.qrandn(0, 1, 0.1)]),
                "e": tune.uniform(0, 1),
            }
        )
    assert [path for path, _ in caught.value.faults] == [
        "hyperparameters.a",
        "hyperparameters.b.c",
        "hyperparameters.d.vals[1]",
    ]
    assert "is a function or has no bounds" in caught.value.faults[0][1]
