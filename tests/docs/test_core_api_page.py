"""docs/core-api.md: its programs run standalone, and the first as a trial of its search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.experiment.local import run_local
from tests.docs.pages import files
from tests.forks.process import run_script

FILES = files("core-api.md")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    (tmp_path / "model").mkdir()
    for name, text in FILES.items():
        (tmp_path / "model" / name).write_text(text)
    return tmp_path / "model"


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "validations"), [("train.py", 16), ("operations.py", 1)])
def test_programs_run_standalone(program: str, validations: int, model: Path) -> None:
    run_script(model / program, directory=model)
    [run] = (model.parent / "results" / "local").iterdir()
    assert sum("validation" in row for row in rows(run)) == validations
    assert len(list(run.glob("checkpoint_*"))) == (16 if program == "train.py" else 0)


def test_program_runs_as_a_trial_of_its_search(model: Path) -> None:
    config = load_config(yaml.safe_load(FILES["asha.yaml"]))
    run = run_local(config, model)
    found = rows(run)
    assert [row["batches"] for row in found if "validation" in row] == [100 * epoch for epoch in range(1, 17)]
    metadata = json.loads((run / "checkpoint_1600" / "metadata.json").read_text())
    assert metadata == {"steps_completed": 1600}


def test_operations_are_those_of_the_search(model: Path) -> None:
    searcher = {"name": "asha", "metric": "error", "max_trials": 4, "max_length": {"epochs": 16}, "num_rungs": 3}
    run = run_local(load_config({"entrypoint": "python3 operations.py", "searcher": searcher}), model)
    assert [row["validation"] for row in rows(run)[:-1]] == [{"error": 1.0}, {"error": 0.25}, {"error": 0.0625}]
