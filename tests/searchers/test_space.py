"""Spaces in Determined's YAML: what is drawn, that it is always the same, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from searchers import SpaceError, parse_space

REPO = Path(__file__).parents[2]
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


# ---------------------------------------------------------------------------------------------------------- sampling


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


def test_ints_include_both_ends_and_are_even() -> None:
    space, rng = parse_space({"n": {"type": "int", "minval": -1, "maxval": 2}}), Random(0)
    seen = Counter(space.sample(rng)["n"] for _ in range(4000))
    assert set(seen) == {-1, 0, 1, 2}
    assert all(800 < count < 1200 for count in seen.values())


def test_log_bounds_are_exponents() -> None:
    space, rng = parse_space({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}}), Random(0)
    exponents = [math.log10(space.sample(rng)["lr"]) for _ in range(3000)]  # type: ignore[arg-type]
    assert -4 <= min(exponents) < -3.98
    assert -1.02 < max(exponents) <= -1
    assert abs(sum(exponents) / 3000 + 2.5) < 0.05


def test_log_takes_the_counted_draw() -> None:
    space = parse_space({"lr": {"type": "log", "base": 2, "minval": 0, "maxval": 10}})
    assert space.sample(Random("7:3")) == {"lr": 2.0 ** Random("7:3").uniform(0, 10)}


def test_doubles_fill_their_range() -> None:
    space, rng = parse_space({"x": {"type": "double", "minval": -1, "maxval": 3}}), Random(0)
    drawn = [space.sample(rng)["x"] for _ in range(2000)]
    assert all(isinstance(x, float) and -1 <= x <= 3 for x in drawn)
    assert min(drawn) < -0.98  # type: ignore[type-var,operator]
    assert max(drawn) > 2.98  # type: ignore[type-var,operator]


def test_categories_are_all_drawn_and_may_be_anything() -> None:
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


def test_other_processes_draw_the_same() -> None:
    code = (
        "import json, sys; from random import Random; from searchers import parse_space;"
        "space = parse_space(json.loads(sys.argv[1]));"
        "print(json.dumps([space.sample(Random(f'7:{trial}')) for trial in range(20)]))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(SPEC)],
            capture_output=True,
            text=True,
            check=True,
            cwd=REPO,
            env={"PYTHONHASHSEED": hash_seed},
            timeout=30,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    space = parse_space(SPEC)
    assert [json.loads(output) for output in outputs] == [[space.sample(Random(f"7:{t}")) for t in range(20)]] * 2


def test_golden_samples_stay_as_they_are() -> None:
    """Experiments are repeated with later versions; should this fail, their seeds mean other trials."""
    assert parse_space(SPEC).sample(Random("7:0")) == GOLDEN


def test_names_are_dotted_and_sorted() -> None:
    assert parse_space(SPEC).names() == [
        "betas",
        "dropout",
        "global_batch_size",
        "lr",
        "model.act",
        "model.width",
        "optimizer",
    ]


def test_nothing_to_search_is_a_space() -> None:
    assert parse_space({}).sample(Random(0)) == {}
    assert parse_space({"model": {}}).sample(Random(0)) == {"model": {}}


def test_tuples_are_lists_as_in_a_journal() -> None:
    assert parse_space({"betas": (0.9, 0.99)}).sample(Random(0)) == {"betas": [0.9, 0.99]}


def test_whole_floats_are_integers_where_integers_are_due() -> None:
    point = parse_space({"n": {"type": "int", "minval": 1.0, "maxval": 2.0}}).sample(Random(0))
    assert type(point["n"]) is int


# ------------------------------------------------------------------------------------------------------------ errors


def test_all_faults_are_told_at_once_by_path() -> None:
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


def test_unknown_type_is_told_with_the_nearest_one() -> None:
    assert faults({"lr": {"type": "logg", "minval": 0}}) == {
        "hyperparameters.lr.type": "must be one of const, categorical, int, double, log, got 'logg'; "
        "did you mean 'log'?"
    }


def test_unknown_field_is_told_with_the_nearest_one() -> None:
    told = faults({"n": {"type": "int", "minval": 0, "maxvl": 3}})
    assert told == {
        "hyperparameters.n.maxvl": "is not a field of type int; did you mean 'maxval'?",
        "hyperparameters.n.maxval": "is required for type int",
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
        ([1, {1}], "x[1]", "got set"),
        ({"type": "const", "val": {"a": {3: 4}}}, "x.val.a", "got dict"),
    ],
    ids=str,
)
def test_fault(spec: object, path: str, says: str) -> None:
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
