"""``dray diff``: two experiments, or two trials."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.records.directory import ExperimentDirectory
from dray.records.trial_record import flatten
from tests.cli.said import Said
from tests.docs.pages import JSON
from tests.records.repeated import repeated
from tests.report.simulated import loss

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
    found = dray("diff", "digits-1", "other-2", "--json").value
    assert found["config"] == [
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
    ]
    assert [found[name] for name in ("diff", "hyperparameters", "versions", "data")] == ["", [], [], []]
    rows = [re.split(r"  +", line) for line in dray("diff", "digits-1", "other-2").out.splitlines()]
    trial = found["a"]["trial"]
    assert rows[0] == ["", "field", f"a: digits-1/{trial}", f"b: other-2/{trial}"]
    assert ["config", "hyperparameters.lr.maxval", "-1", "-1.0000001"] in rows
    assert ["config", "searcher.max_trials", "8", "99"] in rows
    assert ["the same", "hyperparameters, data, code"] in rows
    assert ["unknown", "versions"] in rows


def test_trials_are_compared_at_common_points(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    trials = {each["trial"]: each for each in dray("t", "list", "digits-1", "--json").value}
    long, short = (next(trial for trial in trials if trials[trial]["batches"] == batches) for batches in (160, 10))
    found = dray("diff", f"digits-1/{long}", f"other-2/{short}", "--json").value
    assert (found["a"]["trial"], found["b"]["trial"]) == (long, short)
    assert found["a"]["data"] == found["b"]["data"] == {"batches_per_epoch": 10, "records_per_epoch": 640}
    drawn = [flatten(trials[trial]["hparams"]) for trial in (long, short)]
    assert {each["path"]: (each["a"], each["b"]) for each in found["hyperparameters"]} == {
        name: (drawn[0][name], drawn[1][name]) for name in drawn[0] if drawn[0][name] != drawn[1][name]
    }
    [row] = [each for each in found["metrics"] if each["name"] == "validation_loss"]
    assert row["batches"] == 10
    assert [row["a"], row["b"]] == pytest.approx([loss(trials[trial]["hparams"], 1.0) for trial in (long, short)])
    best = [trials[trial]["best_metric"] for trial in (long, short)]
    assert found["comparison"]["difference"] == best[0] - best[1]
    said = dray("diff", f"digits-1/{long}", f"other-2/{short}").out
    assert f"difference            {found['comparison']['text']}\n" in said


def test_repeated_trials_are_compared_by_seed_with_an_interval(home: Path, dray: Dray) -> None:
    """The differences are -0.10, -0.09 and -0.11, so the interval is 4.303 * 0.01 / sqrt(3) on either side."""
    values = {0: (0.10, 0.12, 0.14), 1: (0.20, 0.21, 0.25)}
    again = {(trial, seed): value for trial in values for seed, value in enumerate(values[trial], 1)}
    repeated(home / "repeated-3", [0.05, 0.06], again, top=2)
    found = dray("diff", "repeated-3/0", "repeated-3/1", "--json").value["comparison"]
    assert (found["seeds"], found["paired"], found["better"]) == (3, True, 0)
    assert [found[name] for name in ("difference", "low", "high")] == pytest.approx(
        [-0.1, -0.12484, -0.07516], abs=1e-5
    )


def test_best_of_a_curve_is_shown_at_eight_points_and_its_end(digits: ExperimentDirectory, dray: Dray) -> None:
    best = next(each for each in dray("t", "list", "digits-1", "--json").value if each["batches"] == 160)["trial"]
    found = dray("diff", f"digits-1/{best}", f"digits-1/trial_{best}", "--json").value
    points = [each["batches"] for each in found["metrics"] if each["name"] == "validation_loss"]
    assert points == [20, 40, 60, 80, 100, 120, 140, 160]
    assert all(each["a"] == each["b"] for each in found["metrics"])


def test_versions_are_those_of_the_driver_that_started_the_trial(
    two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray
) -> None:
    for directory, torch in zip(two, ("2.8.0", "2.9.0"), strict=True):
        lines = directory.journal.read_text().splitlines()
        opened = {"event": "opened", "versions": {"python": "3.11.7", "torch": torch}, "time": 1.0}
        later = {"event": "opened", "versions": {"python": "3.14.0", "torch": "3.0"}, "time": 2e9}
        directory.journal.write_text("\n".join([json.dumps(opened), *lines, json.dumps(later), ""]))
    assert dray("diff", "digits-1", "other-2", "--json").value["versions"] == [
        {"path": "torch", "a": "2.8.0", "b": "2.9.0"}
    ]


@pytest.mark.parametrize(
    ("given", "named"), [("digits-1/99", "99"), ("nothing/7", "'nothing'"), ("nothing", "'nothing'")]
)
def test_what_does_not_exist_is_named(digits: ExperimentDirectory, dray: Dray, given: str, named: str) -> None:
    assert named in dray("diff", "digits-1", given).is_one_line()


def test_code_is_a_patch(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    a, b = (each.code for each in two)
    (b / "model_def.py").write_text("a = 1\nb = 3  # \x1b]0;title\x07\n")
    (a / "gone.py").write_text("x\n")
    said = dray("e", "diff", "digits-1", "other-2").out.splitlines()  # its name in the group
    assert said[said.index("diff --git a/gone.py b/gone.py") :] == [
        *["diff --git a/gone.py b/gone.py", "deleted file mode 100644"],
        *["--- a/gone.py", "+++ /dev/null", "@@ -1 +0,0 @@", "-x"],
        *["diff --git a/model_def.py b/model_def.py"],
        *[
            "--- a/model_def.py",
            "+++ b/model_def.py",
            "@@ -1,2 +1,2 @@",
            " a = 1",
            "-b = 2",
            r"+b = 3  # \x1b]0;title\x07",
        ],
    ]


def test_a_trials_own_code_is_compared(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    directory, code = two[0], "3f9c01ab52de"
    of_variant = directory.code_of(code)
    of_variant.mkdir(parents=True)
    shutil.copy(directory.code / "same.py", of_variant)
    (of_variant / "model_def.py").write_text("a = 1\nb = 4\n")
    records = [json.loads(line) for line in directory.journal.read_text().splitlines()]
    for record in records:
        for action in record.get("actions", ()):
            if (action["action"], action.get("trial")) == ("create", 3):
                action["code"] = code
    directory.journal.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    lines = dray("diff", "digits-1/0", "digits-1/3", "--json").value["diff"].splitlines()
    assert [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")] == ["-b = 2", "+b = 4"]


def test_what_is_the_same_says_so(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    said = dray("diff", "digits-1", "other-2")
    assert said.code == 0
    assert re.search(r"^the same +config, hyperparameters, data, code$", said.out, re.MULTILINE)
    assert re.search(r"^best validation_loss +a (\S+), b \1$", said.out, re.MULTILINE)


def test_fields_of_json_are_on_the_page(two: tuple[ExperimentDirectory, ExperimentDirectory], dray: Dray) -> None:
    found = dray("diff", "digits-1", "other-2", "--json").value
    assert {*found, *found["a"], *found["metrics"][0]} <= JSON["diff"]
