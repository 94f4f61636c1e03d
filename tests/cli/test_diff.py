"""``dray experiment diff``: the configs and the code of two experiments."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from dray.records.difference import MAX_TEXT_BYTES
from dray.records.directory import ExperimentDirectory
from tests.cli.said import Said
from tests.docs.pages import PAGES

Dray = Callable[..., Said]


@pytest.fixture
def two(digits: ExperimentDirectory) -> tuple[ExperimentDirectory, ExperimentDirectory]:
    """``digits-1`` and ``other-2``, with code; they are the same."""
    digits.code.mkdir(exist_ok=True)
    (digits.code / "model_def.py").write_text("a = 1\nb = 2\n")
    (digits.code / "same.py").write_text("pass\n")
    other = digits.path.with_name("other-2")
    shutil.copytree(digits.path, other)
    return digits, ExperimentDirectory.open(other)


def change(directory: ExperimentDirectory, **sections: dict[str, Any]) -> None:
    config = yaml.safe_load(directory.config_file.read_text())
    for name, fields in sections.items():
        config[name].update(fields)
    directory.config_file.write_text(yaml.safe_dump(config))


def test_fields_are_named_by_their_path(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    lr = {"type": "log", "base": 10, "minval": -4, "maxval": -1.0000001}
    change(two[1], hyperparameters={"lr": lr, "optimizer": "adam"}, searcher={"max_trials": 99})
    change(two[0], hyperparameters={"depth": {"type": "int", "minval": 1, "maxval": 3}})
    assert dray("e", "diff", "digits-1", "other-2", "--json").value == {
        "config": [
            {
                "path": "hyperparameters.depth",
                "a": {"type": "int", "minval": 1, "maxval": 3},
            },
            {"path": "hyperparameters.lr.maxval", "a": -1, "b": -1.0000001},
            {
                "path": "hyperparameters.optimizer",
                "a": {"type": "categorical", "vals": ["adam", "sgd"]},
                "b": "adam",
            },
            {"path": "searcher.max_trials", "a": 8, "b": 99},
        ],
        "code": [],
    }
    said = dray("e", "diff", "digits-1", "other-2")
    rows = [re.split(r"  +", line) for line in said.out.splitlines()]
    assert rows[0] == ["field", "a: digits-1", "b: other-2"]
    assert ["hyperparameters.lr.maxval", "-1", "-1.0000001"] in rows
    assert ["searcher.max_trials", "8", "99"] in rows
    assert said.out.splitlines()[-1] == "the code is the same"


def test_code_is_a_unified_diff(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    a, b = (each.code for each in two)
    (b / "model_def.py").write_text("a = 1\nb = 3\n")
    (a / "gone.py").write_text("x\n")
    (b / "pkg").mkdir()
    (b / "pkg" / "new.py").write_text("y\n")
    for size, code in ((1, a), (2, b)):
        (code / "weights.bin").write_bytes(b"\xff\0" * size)
        (code / "data.csv").write_text("1\n" * MAX_TEXT_BYTES * size)
        (code / "__pycache__").mkdir()
        (code / "__pycache__" / "x.pyc").write_bytes(bytes(size))
    assert dray("e", "diff", "digits-1", "other-2").out.splitlines() == [
        "Files a/data.csv and b/data.csv differ",
        *["--- a/gone.py", "+++ /dev/null", "@@ -1 +0,0 @@", "-x"],
        *["--- a/model_def.py", "+++ b/model_def.py", "@@ -1,2 +1,2 @@", " a = 1", "-b = 2", "+b = 3"],
        *["--- /dev/null", "+++ b/pkg/new.py", "@@ -0,0 +1 @@", "+y"],
        "Files a/weights.bin and b/weights.bin differ",
    ]


def test_what_is_the_same_says_so(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    said = dray("e", "diff", "digits-1", "other-2")
    assert (said.code, said.out) == (0, "config and code are the same\n")


def test_fields_of_json_are_on_the_page() -> None:
    [row] = re.findall(r"^\| `experiment diff` \| (.*) \|$", PAGES["cli.md"], re.MULTILINE)
    assert {"config", "path", "a", "b", "code"} <= set(re.findall(r"`(\w+)`", row))
