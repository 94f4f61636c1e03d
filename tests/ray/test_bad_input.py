"""Mistakes that one message has to name: without Ray where it can be known without, and through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.errors import EntrypointError
from tests.ray.harness import ROOT, TRIALS, recorded, write_config

pytestmark = pytest.mark.slow

MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": (
        {"max_restart": 1},
        ["max_restart: unknown field; did you mean max_restarts?"],
    ),
    "unknown key in a section": (
        {"searcher": {"name": "random", "metrik": "error", "max_length": {"batches": 4}, "max_trials": 2}},
        ["searcher.metrik: unknown field; did you mean metric?"],
    ),
    "wrong type": (
        {"resources": {"slots_per_trial": "two"}},
        ["resources.slots_per_trial: must be a number, got 'two' (a string); for example slots_per_trial: "],
    ),
    "missing metric": (
        {"searcher": {"name": "random", "max_length": {"batches": 4}, "max_trials": 2}},
        ["searcher.metric: missing required field; the validation metric that the search optimizes; either this or"],
    ),
    "divisor 1": (
        {
            "searcher": {
                "name": "asha",
                "metric": "error",
                "max_length": {"batches": 4},
                "max_trials": 2,
                "num_rungs": 2,
                "divisor": 1,
            }
        },
        ["searcher.divisor: must be > 1, got 1"],
    ),
    "batch size under the slots": (
        {"resources": {"slots_per_trial": 16}},
        ["hyperparameters.global_batch_size: must be at least resources.slots_per_trial (16)", "got 8"],
    ),
    "no such module": (
        {"entrypoint": "recordet:Recorded"},
        ["entrypoint: no module recordet in ", "did you mean recorded?"],
    ),
    "no such class": (
        {"entrypoint": "recorded:Recordet"},
        ["entrypoint: recorded has no class Recordet; did you mean recorded:Recorded?"],
    ),
}

# One process for all of them, as each would have to import torch; the command is the real one.
CHECK = """
import json, sys
from typer.testing import CliRunner
from dray.cli import app
told = []
for config in sys.argv[2:]:
    result = CliRunner().invoke(app, ["experiment", "create", config, sys.argv[1], "--path", config + ".results"])
    told.append([result.exit_code, result.output, "ray" in sys.modules and sys.modules["ray"].is_initialized()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    """Exit code, output, and whether a Ray was up then; for each mistake."""
    configs = []
    for number, (change, _) in enumerate(MISTAKES.values()):
        directory = tmp_path_factory.mktemp(f"mistake{number}")
        configs.append(write_config(directory, {**recorded(directory / "record", trials=2, batches=4), **change}))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(TRIALS), *map(str, configs)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=ROOT,
    )
    return dict(zip(MISTAKES, map(tuple, json.loads(done.stdout)), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_by_its_field_and_no_ray_is_left(mistake: str, told: dict[str, tuple[int, str, bool]]) -> None:
    code, output, ray_is_up = told[mistake]
    assert code == 2
    for words in MISTAKES[mistake][1]:
        assert words in output
    assert "Traceback" not in output
    assert not ray_is_up


def test_mistakes_are_all_told_at_once(told: dict[str, tuple[int, str, bool]]) -> None:
    output = told["unknown key in a section"][1]
    assert "searcher.metric: missing required field" in output
    assert "has 2 errors:" in output


def test_nothing_is_stored_of_an_experiment_that_cannot_be(tmp_path: Path) -> None:
    config = {**recorded(tmp_path / "record", trials=2, batches=4), "entrypoint": "recordet:Recorded"}
    with pytest.raises(EntrypointError):
        dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "results")
    assert not (tmp_path / "results").exists()
