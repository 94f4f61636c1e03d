"""What a config says is valid, but hardly meant: one warning, with the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray.config.load import load_config, stored_config

RANDOM = {"name": "random", "metric": "loss", "max_trials": 3, "max_length": {"epochs": 3}}
SINGLE = {"name": "single", "metric": "loss", "max_length": {"epochs": 3}}
ASHA = {**RANDOM, "name": "asha", "num_rungs": 3}
ADAPTIVE = {**RANDOM, "name": "adaptive_asha", "max_trials": 30}
LR = {"type": "log", "base": 10, "minval": -4, "maxval": -1}
RATES = {**LR, "minval": 0.0001, "maxval": 0.1}


def warned(caplog: pytest.LogCaptureFixture, searcher: dict[str, Any], **hyperparameters: Any) -> list[str]:
    """The lines of the warning, one for each doubt."""
    load_config({"entrypoint": "model_def:T", "searcher": searcher, "hyperparameters": hyperparameters})
    lines = "\n".join(caplog.messages).split("\n")
    assert lines[0] in ("", "The experiment config may not mean what you want:")
    return [line.strip() for line in lines[1:]]


@pytest.mark.parametrize(
    ("minval", "maxval", "said"),
    [
        (0.0001, 0.1, "from 1.00023 to 1.25893, * for 0.0001 to 0.1 write {* minval: -4, maxval: -1}"),
        (0, 0.1, "from 1 to 1.25893, * is 0.0001 to 0.1"),
        (16, 256, "from 1e+16 to 1e+256, * for 16 to 256 write {* minval: 1.204, maxval: 2.408}"),
    ],
)
def test_exponents_that_read_like_values_are_warned_of(
    caplog: pytest.LogCaptureFixture, minval: float, maxval: float, said: str
) -> None:
    [line] = warned(caplog, RANDOM, model={"lr": {**LR, "minval": minval, "maxval": maxval}})
    first, *others = said.split("*")
    assert line.startswith(f"hyperparameters.model.lr: ranges {first}")
    assert all(other in line for other in others)


def test_a_range_within_a_category_is_found_too(caplog: pytest.LogCaptureFixture) -> None:
    [line] = warned(caplog, RANDOM, opt={"type": "categorical", "vals": ["adam", {"name": "sgd", "lr": RATES}]})
    assert line.startswith("hyperparameters.opt.vals[1].lr: ranges from 1.00023")


@pytest.mark.parametrize(
    ("spec", "cure"),
    [
        ({"min": 0.1, "max": 0.5}, "write {type: double, minval: 0.1, maxval: 0.5}; to keep it, {type: const, val: {"),
        ({"values": [1, 2]}, "write {type: categorical, vals: [1, 2]};"),
        ([0.1, 0.01], "is one constant, the list [0.1, 0.01]; * write {type: categorical, vals: [0.1, 0.01]};"),
    ],
)
def test_a_range_in_another_tools_form_is_a_constant(caplog: pytest.LogCaptureFixture, spec: Any, cure: str) -> None:
    [line] = warned(caplog, RANDOM, lr=LR, other=spec)
    assert line.startswith("hyperparameters.other: ")
    assert all(part in line for part in cure.split("*"))


def test_a_search_without_a_range_repeats_one_point(caplog: pytest.LogCaptureFixture) -> None:
    [line] = warned(caplog, ASHA | {"num_rungs": 1}, lr=0.1, layers={"type": "const", "val": 3})
    assert line.startswith("hyperparameters: none has a range, so all 3 trials train with the same values")


@pytest.mark.parametrize(
    ("searcher", "said"),
    [
        (
            {"name": "auto", "max_length": {"epochs": 1}},
            "with 1 epoch there is one rung, *, give the length in batches",
        ),
        ({"name": "auto", "max_length": {"epochs": 2}}, "with 2 epochs there is"),
        ({"name": "auto", "max_length": {"epochs": 2}, "max_trials": 1}, None),
        ({"name": "auto", "max_length": {"epochs": 3}}, None),
        ({"name": "auto", "max_length": {"batches": 2}}, None),
        ({"name": "adaptive_asha", "max_length": {"epochs": 3}, "max_trials": 30}, "with 3 epochs there is"),
        ({"name": "adaptive_asha", "max_length": {"epochs": 3}, "max_trials": 30, "divisor": 3}, None),
        ({"name": "asha", "max_length": {"epochs": 1}, "num_rungs": 1}, None),
        ({"name": "random", "max_length": {"epochs": 1}}, None),
    ],
)
def test_a_length_with_one_rung_is_warned_of(
    caplog: pytest.LogCaptureFixture, searcher: dict[str, Any], said: str | None
) -> None:
    lines = warned(caplog, RANDOM | searcher, lr=LR)
    assert len(lines) == (said is not None)
    for line in lines:
        assert all(part in line for part in f"searcher.max_length: {said}".split("*"))


@pytest.mark.parametrize(
    ("searcher", "hyperparameters"),
    [
        (SINGLE, {"lr": 0.1, "layers": [64, 32]}),
        (ADAPTIVE | {"max_length": {"epochs": 4}}, {"lr": LR, "rate": {**LR, "minval": -0.5, "maxval": 0}}),
        (RANDOM, {"hidden": {**LR, "base": 2, "minval": 4, "maxval": 8}, "steps": {**LR, "minval": 0, "maxval": 3}}),
        (RANDOM, {"lr": LR, "layers": {"type": "const", "val": [64, 32]}, "blocks": [[1, 2], [3]], "one": ["a"]}),
        (RANDOM, {"clip": {"type": "categorical", "vals": [{"min": 0, "max": 1}, {"type": "log", "x": 1}]}}),
        (RANDOM | {"max_trials": 1}, {"lr": 0.1}),
    ],
)
def test_what_is_meant_is_not_warned_of(
    caplog: pytest.LogCaptureFixture, searcher: dict[str, Any], hyperparameters: dict[str, Any]
) -> None:
    assert warned(caplog, searcher, **hyperparameters) == []


def test_a_stored_config_is_not_warned_of_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"entrypoint: m:T\nsearcher: {SINGLE}\nhyperparameters: {{lr: {RATES}}}\n")
    assert stored_config(file).space == load_config(file).space
    [message] = caplog.messages
    assert message.startswith(f"{file} may not mean what you want:\n  hyperparameters.lr: ")
