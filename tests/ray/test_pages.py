"""Pages that need a Ray, as a reader follows them: their files, then their commands, one after another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dray
from tests.docs.pages import blocks, files
from tests.docs.test_coming_from import project
from tests.forks.process import run_script

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NOT_HERE = ("pip install", "dray demo")  # the demo: tests/ray/test_sweep.py


def followed(page: str, directory: Path) -> tuple[Path, dict[str, str]]:
    """The project directory, and what each command has printed; the results are in ``<directory>/results``."""
    code = directory / "project"
    code.mkdir()
    for name, text in files(page).items():
        (code / name).write_text(text)
    environment = {
        **os.environ,
        "DRAY_HOME": str(directory / "results"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    said: dict[str, str] = {}
    text = "".join(block.text for block in blocks("sh", page=page)).replace("\\\n", " ")
    for command in text.splitlines():
        if not command.startswith(NOT_HERE):
            done = subprocess.run(
                command, shell=True, cwd=code, env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            said[command.partition(" #")[0].strip()] = done.stdout
    return code, said


def test_the_quick_start_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    code, said = followed("quick-start.md", tmp_path)
    assert "COMPLETED" in said["dray experiment list"]
    assert "validation_loss" in said["dray trial metrics latest best"]
    assert "<html" in (code / "report.html").read_text()
    assert json.loads((code / "model" / "hparams.json").read_text())["global_batch_size"] == 64
    # The command's experiment, which was then extended, comes before the driver's and that of the program's own loop.
    paths = [path for name in ("digits", "loop") for path in sorted((tmp_path / "results").glob(f"{name}-*"))]
    trials = [dray.Result(path).trials for path in paths]
    assert [len(each) for each in trials] == [20, 16, 16]
    first, second, own_loop = trials
    assert set(first["state"]) <= {"COMPLETED", "PRUNED"}
    for other in (second, own_loop):  # the first ones are random, and depend on the seed alone
        assert (first["hparams.lr"][:4].to_numpy() == other["hparams.lr"][:4].to_numpy()).all()
    assert own_loop["best_metric"].min() < 0.6
    assert first["best_metric"].min() < 0.6  # at chance it is 2.3


def test_searches_of_hugging_faces_models(tmp_path: Path) -> None:
    code, _ = followed("hugging-face.md", tmp_path)
    assert (code / "best-model" / "model.safetensors").exists()
    for name, metric, number in (("bert-trial", "validation_loss", 8), ("bert-trainer", "eval_loss", 4)):
        [path] = (tmp_path / "results").glob(f"{name}-*")
        trials = dray.Result(path).trials
        assert len(trials) == number
        assert set(trials["state"]) <= {"COMPLETED", "PRUNED"}
        assert trials["best_metric"].min() < 0.6, metric  # at chance it is 0.69


@pytest.mark.usefixtures("ray_is_up")
def test_rays_program_runs(tmp_path: Path) -> None:
    """One trial of docs/from-ray-tune.md's: each takes seconds to start."""
    code = project("from-ray-tune.md", tmp_path / "code")
    (code / "once.py").write_text(
        "import sys, tuner\n"
        "[result] = tuner.search(sys.argv[1], trials=1)\n"
        "assert result.error is None\n"
        "print(result.metrics['training_iteration'], result.metrics['validation_loss'])\n"
    )
    printed = run_script(code / "once.py", str(tmp_path / "results"), directory=code)
    [loss] = re.findall(r"^9 ([\d.]+)$", printed, re.MULTILINE)
    assert 0 < float(loss) < 2.3


@pytest.mark.usefixtures("ray_is_up")
def test_the_search_that_composes_its_configs(tmp_path: Path) -> None:
    code = project("from-hydra.md", tmp_path / "code")
    config = yaml.safe_load((code / "search.yaml").read_text())
    config["searcher"]["max_trials"] = 4
    result = dray.Experiment(config, model_dir=code, path=tmp_path / "experiment").run()
    assert len(result.trials) == 4
    assert set(result.trials["state"]) <= {"COMPLETED", "PRUNED"}
    assert result.trials["hparams.model.hidden"].between(16, 256).all()
    assert result.trials["best_metric"].nunique() == 4
