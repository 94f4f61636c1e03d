"""Spaces in Determined's YAML: draws, their reproducibility, and errors."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from searchers import SpaceError, parse_space

SPEC: dict[str, object] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "global_batch_size": 64,
    "optimizer": {"type": "categorical", "vals": ["sgd", "adam"]},
    "model": {"width": {"type": "int", "minval": 16, "maxval": 18}, "act": {"type": "const", "val": "relu"}},
    "dropout": {"type": "double", "minval": 0.0, "maxval": 0.5},
    "betas": [0.9, 0.999],
}


def faults(spec: object) -> dict[str, str]:
    with pytest.raises(SpaceError) as caught:
        parse_space(spec)  # type: ignore[arg-type]
    return dict(caught.value.faults)


# ------------------------------------------------------------------------------------------------------------- sampling


def test_keys_are_sorted_at_every_level() -> None:
    point = parse_space(SPEC).sample(Random(0))
    assert list(point) == ["betas", "dropout", "global_batch_size", "lr", "model", "optimizer"]
    assert list(point["model"]) == ["act", "width"]  # type: ignore[call-overload]


def test_order_in_the_file_changes_nothing() -> None:
    turned = dict(reversed(SPEC.items())) | {"model": dict(reversed(SPEC["model"].items()))}  # type: ignore[attr-defined]
    assert list(turned) != list(SPEC)
    assert parse_space(turned).sample(Random(3)) == parse_space(SPEC).sample(Random(3))


def test_constants_draw_nothing() -> None:
    lean = {key: SPEC[key] for key in ("lr", "dropout")}
    full = lean | {"a": 1, "m": {"type": "const", "val": 2}, "z": [3]}
    assert parse_space(full).sample(Random(5)).items() >= parse_space(lean).sample(Random(5)).items()


def test_ints_are_uniform_and_include_both_ends() -> None:
    space, rng = parse_space({"n": {"type": "int", "minval": -1, "maxval": 2}}), Random(0)
    seen = Counter(space.sample(rng)["n"] for _ in range(4000))
    assert set(seen) == {-1, 0, 1, 2}
    assert all(800 < count < 1200 for count in seen.values())


def test_log_sample_is_the_power_of_a_uniform_draw() -> None:
    space = parse_space({"lr": {"type": "log", "base": 2, "minval": 0, "maxval": 10}})
    assert space.sample(Random("7:3")) == {"lr": 2.0 ** Random("7:3").uniform(0, 10)}


def test_all_categories_are_drawn_and_may_have_any_type() -> None:
    vals = ["a", 1, 2.5, None, True, [1, 2], {"k": 1}]
    space, rng = parse_space({"c": {"type": "categorical", "vals": vals}}), Random(0)
    drawn = [space.sample(rng)["c"] for _ in range(300)]
    assert all(val in drawn for val in vals)


def test_samples_share_nothing() -> None:
    space = parse_space({"a": [1, 2], "c": {"type": "categorical", "vals": [[3]]}})
    first = space.sample(Random(0))
    first["a"].append(9)  # type: ignore[attr-defined]
    first["c"].append(9)  # type: ignore[attr-defined]
    assert space.sample(Random(0)) == {"a": [1, 2], "c": [3]}


def test_golden_samples_stay_as_they_are() -> None:
    """Experiments are repeated with later versions; if this test fails, seeds give other trials than before."""
    assert parse_space(SPEC).sample(Random("7:0")) == GOLDEN


@pytest.mark.parametrize(
    ("spec", "point"),
    [
        ({}, {}),
        ({"model": {}}, {"model": {}}),
        ({"betas": (0.9, 0.99)}, {"betas": [0.9, 0.99]}),
    ],
)
def test_a_space_may_be_empty_and_has_plain_constants(spec: dict[str, object], point: object) -> None:
    assert parse_space(spec).sample(Random(0)) == point


def test_whole_floats_are_accepted_as_integers() -> None:
    assert type(parse_space({"n": {"type": "int", "minval": 1.0, "maxval": 2.0}}).sample(Random(0))["n"]) is int


# --------------------------------------------------------------------------------------------------------------- errors


def test_all_faults_are_named_at_once_by_path() -> None:
    assert faults(
        {
            "lr": {"type": "log", "base": 0, "minval": -1, "maxval": -4},
            "n": {"type": "int", "minval": 1.5, "maxval": True},
            "model": {"deep": {"width": {"type": "double", "minval": 0}}},
            "c": {"type": "categorical", "vals": []},
        }
    ) == {
        "hyperparameters.lr.minval": "must be < maxval, got minval -1 and maxval -4",
        "hyperparameters.lr.base": "must be > 0, got 0",
        "hyperparameters.n.minval": "must be an integer, got 1.5",
        "hyperparameters.n.maxval": "must be an integer, got True",
        "hyperparameters.model.deep.width.maxval": "is required for type double",
        "hyperparameters.c.vals": "must be a list of at least one value, got []",
    }


@pytest.mark.parametrize(
    ("spec", "path", "says"),
    [
        ({"type": "double", "minval": "1e-4", "maxval": 1}, "x.minval", "(a string; write 0.0001)"),
        ({"type": "double", "minval": 0, "maxval": math.inf}, "x.maxval", "must be a finite number, got inf"),
        ({"type": "double", "minval": 1, "maxval": 1}, "x.minval", "must be < maxval"),
        ({"type": "double", "minval": -1.7e308, "maxval": 1.7e308}, "x", "maxval - minval must be finite"),
        ({"type": "log", "base": 10, "minval": 0, "maxval": 400}, "x", "values must be finite"),
        ({"type": "log", "minval": 0, "maxval": 4}, "x.base", "is required"),
        ({"type": "int", "minval": 0, "maxval": 4, "count": 0}, "x.count", "must be an integer >= 1, got 0"),
        ({"type": "int", "minval": None, "maxval": math.nan}, "x.minval", "must be an integer, got None"),
        ({"type": "categorical", "vals": "ab"}, "x.vals", "must be a list"),
        ({"type": "categorical", "vals": [1, {2}]}, "x.vals[1]", "got set"),
        ({"type": "const"}, "x.val", "is required for type const"),
        ({"type": 3}, "x.type", "must be one of const"),
        ({"type": "logg"}, "x.type", "const, categorical, int, double, log, got 'logg'; did you mean log?"),
        ({"type": "int", "minval": 0, "maxvl": 3}, "x.maxvl", "is not a field of type int; did you mean maxval?"),
        ([1, {1}], "x[1]", "got set"),
        ({"type": "const", "val": {"a": {3: 4}}}, "x.val.a", "got dict"),
        ({"type": "int", "minval": 0, "maxval": 8, "step": 0}, "x.step", "must be > 0, got 0"),
        ({"type": "int", "minval": 0, "maxval": 8, "step": 0.5}, "x.step", "must be an integer, got 0.5"),
        ({"type": "double", "minval": 0, "maxval": 8, "step": -1.0}, "x.step", "must be > 0, got -1.0"),
        ({"type": "int", "minval": 0, "maxval": 8, "log": True}, "x.minval", "must be >= 1 where log is true, got 0"),
        ({"type": "int", "minval": 1, "maxval": 8, "log": 10}, "x.log", "must be true or false, got 10"),
        ({"type": "double", "minval": 1, "maxval": 8, "log": True}, "x.log", "is not a field of type double"),
        ({"type": "categorical", "vals": [{"a": {"type": "int", "minval": 0}}]}, "x.vals[0].a.maxval", "is required"),
        (
            {"type": "categorical", "vals": [{"a": {"type": "float", "minval": 0}}]},
            "x.vals[0].a.type",
            "must be one of",
        ),
    ],
    ids=str,
)
def test_invalid_fields(spec: object, path: str, says: str) -> None:
    assert says in faults({"x": spec})[f"hyperparameters.{path}"]


def test_names_must_be_strings() -> None:
    assert faults({1: 2}) == {"hyperparameters": "names must be strings, got 1"}


def test_a_space_is_a_mapping() -> None:
    assert "must be a mapping" in faults([1, 2])["hyperparameters"]


GOLDEN: dict[str, object] = {
    "betas": [0.9, 0.999],
    "dropout": 0.3507008095153937,
    "global_batch_size": 64,
    "lr": 0.0001266755491783222,
    "model": {"act": "relu", "width": 17},
    "optimizer": "adam",
}


# ---------------------------------------------------------------------------------------------------------------- grids


def axis(spec: object) -> list[object]:
    return [point["x"] for point in parse_space({"x": spec}).grid()]


@pytest.mark.parametrize(
    ("spec", "points"),
    [
        (5, [5]),
        ({"type": "const", "val": [1, 2]}, [[1, 2]]),
        ({"type": "categorical", "vals": ["b", "a", 3]}, ["b", "a", 3]),
        ({"type": "int", "minval": 1, "maxval": 5, "count": 3}, [1, 3, 5]),
        ({"type": "int", "minval": 0, "maxval": 3, "count": 3}, [0, 2, 3]),  # 1.5 is rounded away from zero
        ({"type": "int", "minval": -3, "maxval": 0, "count": 3}, [-3, -2, 0]),  # and so is -1.5
        ({"type": "int", "minval": 0, "maxval": 10, "count": 4}, [0, 3, 7, 10]),  # 3.33, 6.67
        ({"type": "int", "minval": 1, "maxval": 4, "count": 1}, [3]),  # the midpoint, 2.5
        ({"type": "int", "minval": -4, "maxval": -1, "count": 1}, [-3]),
        ({"type": "int", "minval": 1, "maxval": 3, "count": 9}, [1, 2, 3]),  # no more than exist
        ({"type": "int", "minval": 0, "maxval": 9, "step": 3}, [0, 3, 6, 9]),
        ({"type": "int", "minval": 0, "maxval": 9, "step": 3, "count": 2}, [0, 9]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 5}, [0.0, 0.25, 0.5, 0.75, 1.0]),
        ({"type": "double", "minval": 0.1, "maxval": 0.4, "count": 4}, [0.1, 0.2, 0.3, 0.4]),
        ({"type": "double", "minval": -1, "maxval": 2, "count": 1}, [0.5]),
        ({"type": "double", "minval": 0, "maxval": 0.3, "step": 0.1}, [0.0, 0.1, 0.2, 0.3]),
        ({"type": "log", "base": 10, "minval": -3, "maxval": -1, "count": 3}, [0.001, 0.01, 0.1]),
        ({"type": "log", "base": 2, "minval": 0, "maxval": 4, "count": 1}, [4.0]),
        ({"type": "log", "base": 0.5, "minval": 0, "maxval": 2, "count": 3}, [1.0, 0.5, 0.25]),
        ({"n": {"type": "int", "minval": 1, "maxval": 2, "count": 2}, "m": 7}, [{"m": 7, "n": 1}, {"m": 7, "n": 2}]),
        ({}, [{}]),
        (
            {
                "type": "categorical",
                "vals": [{"n": "a", "k": {"type": "int", "minval": 1, "maxval": 2, "count": 2}}, 5],
            },
            [{"k": 1, "n": "a"}, {"k": 2, "n": "a"}, 5],
        ),
    ],
    ids=str,
)
def test_grid_axis(spec: object, points: list[object]) -> None:
    assert axis(spec) == points


def test_without_hyperparameters_there_are_no_points() -> None:
    assert list(parse_space({}).grid()) == []


def test_a_grid_needs_a_count_of_every_number() -> None:
    number = {"minval": 0, "maxval": 1}
    space = parse_space(
        {
            "i": {"type": "int", **number},
            "m": {"d": {"type": "double", **number}, "l": {"type": "log", "base": 2, **number}},
            "c": {"type": "categorical", "vals": [{"e": {"type": "double", **number}}]},
        }
    )
    with pytest.raises(SpaceError) as caught:
        space.grid()
    assert dict(caught.value.faults) == dict.fromkeys(
        [f"hyperparameters.{name}.count" for name in ("c.vals[0].e", "i", "m.d", "m.l")],
        "is required for a grid: the number of points",
    )


def test_a_grid_too_large_to_list_is_refused() -> None:
    axes = {name: {"type": "double", "minval": 0, "maxval": 1, "count": 1000} for name in "abc"}
    with pytest.raises(SpaceError, match="hyperparameters: the grid has 1,000,000,000 points, and may have 1,000,000"):
        parse_space(axes).grid()


def test_a_constraint_removes_grid_points() -> None:
    spec = {name: {"type": "int", "minval": 0, "maxval": 2, "count": 3} for name in "ab"}
    space = parse_space(spec, constraint=lambda point: point["a"] < point["b"])  # type: ignore[operator]
    assert list(space.grid()) == [{"a": 0, "b": 1}, {"a": 0, "b": 2}, {"a": 1, "b": 2}]


# ---------------------------------------------------------------------------------------- steps, logarithms of integers


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ({"type": "int", "minval": 1, "maxval": 10, "step": 4}, {1, 5, 9}),
        ({"type": "double", "minval": 0.1, "maxval": 0.5, "step": 0.2}, {0.1, 0.3, 0.5}),
        ({"type": "log", "base": 10, "minval": -1, "maxval": 0, "step": 0.3}, {0.3, 0.6, 0.9}),
        ({"type": "int", "minval": 1, "maxval": 3, "log": True}, {1, 2, 3}),
        ({"type": "int", "minval": 2, "maxval": 8, "step": 2, "log": True}, {2, 4, 6, 8}),
    ],
    ids=str,
)
def test_stepped_domains_draw_only_their_steps(spec: object, values: set[object]) -> None:
    space, rng = parse_space({"x": spec}), Random(0)
    drawn = [space.sample(rng)["x"] for _ in range(500)]
    assert set(drawn) == values
    assert all(space.check({"x": value}, path="p") == {"x": value} for value in values)


def test_log_integers_are_uniform_in_their_logarithm() -> None:
    space, rng = parse_space({"n": {"type": "int", "minval": 1, "maxval": 1023, "log": True}}), Random(0)
    drawn = [space.sample(rng)["n"] for _ in range(4000)]
    # The median m has log(m + .5) - log(.5) = log(1023.5 / .5) / 2, so m + .5 = .5 * sqrt(2047) = 22.6
    assert 20 <= sorted(drawn)[2000] <= 25  # type: ignore[type-var, operator]


# ---------------------------------------------------------------------------------------------- conditions, constraints

CONDITIONAL: dict[str, object] = {
    "optimizer": {
        "type": "categorical",
        "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0.5, "maxval": 0.9}}, {"name": "adam"}],
    }
}


def test_only_the_drawn_branch_has_hyperparameters() -> None:
    space, rng = parse_space(CONDITIONAL), Random(0)
    drawn = [space.sample(rng)["optimizer"] for _ in range(400)]
    assert 150 < drawn.count({"name": "adam"}) < 250
    others = [point for point in drawn if point != {"name": "adam"}]
    assert all(list(point) == ["momentum", "name"] and point["name"] == "sgd" for point in others)  # type: ignore[call-overload]
    assert all(0.5 <= point["momentum"] <= 0.9 for point in others)  # type: ignore[index]


def test_a_category_may_be_a_domain() -> None:
    space, rng = (
        parse_space({"clip": {"type": "categorical", "vals": [None, {"type": "int", "minval": 3, "maxval": 4}]}}),
        Random(0),
    )
    assert {space.sample(rng)["clip"] for _ in range(100)} == {None, 3, 4}


def test_mappings_with_a_type_of_their_own_are_plain_categories() -> None:
    vals = [{"type": "relu"}, {"type": "elu", "alpha": 1.0}]
    space = parse_space({"act": {"type": "categorical", "vals": vals}})
    assert all(space.sample(Random(seed))["act"] in vals for seed in range(10))


def test_refused_points_are_drawn_again_from_the_same_rng() -> None:
    spec = {"x": {"type": "double", "minval": 0, "maxval": 1}}
    free, bound = parse_space(spec), parse_space(spec, constraint=lambda point: point["x"] > 0.9)  # type: ignore[operator]
    rng = Random(3)
    expected = next(point for _ in range(1000) if (point := free.sample(rng))["x"] > 0.9)  # type: ignore[operator]
    assert bound.sample(Random(3)) == expected


def test_a_constraint_that_cannot_be_met_ends_with_an_error() -> None:
    space = parse_space({"x": 1}, constraint=lambda point: False)
    with pytest.raises(SpaceError, match="hyperparameters: the constraint rejected all 1000 points drawn"):
        space.sample(Random(0))
