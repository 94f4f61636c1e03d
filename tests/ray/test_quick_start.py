"""docs/index.md, the quick start, as a reader follows it: its files, then its commands, one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dray
from tests.docs.pages import blocks, files

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

PAGE = "index.md"
NOT_HERE = ("pip install", "dray demo")  # the demo: tests/ray/test_sweep.py


def test_the_quick_start_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    project, results = tmp_path / "project", tmp_path / "results"
    project.mkdir()
    for name, text in files(PAGE).items():
        (project / name).write_text(text)
    assert {path.name for path in project.iterdir()} == {"model_def.py", "asha.yaml", "driver.py"}
    commands = [line for block in blocks("sh", page=PAGE) for line in block.text.splitlines()]
    environment = {
        **os.environ,
        "DRAY_HOME": str(results),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    said: dict[str, str] = {}
    for command in commands:
        if not command.startswith(NOT_HERE):
            done = subprocess.run(
                command, shell=True, cwd=project, env=environment, capture_output=True, text=True, timeout=500
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            said[command.partition(" #")[0].strip()] = done.stdout

    assert "COMPLETED" in said["dray experiment list"]
    assert "validation_loss" in said["dray trial metrics latest best"]
    assert "<html" in (project / "report.html").read_text()
    assert json.loads((project / "model" / "hparams.json").read_text())["global_batch_size"] == 64
    # Of the command's experiment, which was then extended, and of the driver's.
    trials = [dray.Result(path).trials for path in sorted(results.glob("digits-*"))]
    assert [len(each) for each in trials] == [20, 16]
    first, second = trials
    assert set(first["state"]) <= {"COMPLETED", "PRUNED"}
    assert (first["hparams.lr"][:16].to_numpy() == second["hparams.lr"].to_numpy()).all(), "one seed"
    assert first["best_metric"].min() < 0.6  # at chance it is 2.3
