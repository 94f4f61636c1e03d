"""docs/hugging-face.md as a reader follows it: its files, then its commands, one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dray
from tests.docs.pages import blocks, files

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

PAGE = "hugging-face.md"


def test_searches_of_hugging_faces_models(tmp_path: Path) -> None:
    project, results = tmp_path / "project", tmp_path / "results"
    project.mkdir()
    for name, text in files(PAGE).items():
        (project / name).write_text(text)
    environment = {
        **os.environ,
        "DRAY_HOME": str(results),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    for command in [line for block in blocks("sh", page=PAGE) for line in block.text.splitlines()]:
        if not command.startswith("pip install"):
            subprocess.run(command, shell=True, cwd=project, env=environment, check=True, timeout=600)
    assert (project / "best-model" / "model.safetensors").exists()
    for name, metric, number in (("bert-trial", "validation_loss", 8), ("bert-trainer", "eval_loss", 4)):
        [path] = results.glob(f"{name}-*")
        trials = dray.Result(path).trials
        assert len(trials) == number
        assert set(trials["state"]) <= {"COMPLETED", "PRUNED"}
        assert trials["best_metric"].min() < 0.6, metric  # at chance it is 0.69
