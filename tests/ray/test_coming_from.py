"""docs/from-ray-tune.md's program for Ray, and the search of docs/from-hydra.md, whose trials compose their configs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import dray
from tests.docs.test_coming_from import project
from tests.forks.process import run_script

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]


def test_rays_program_runs(tmp_path: Path) -> None:
    """One trial of it: each takes seconds to start."""
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


def test_the_search_that_composes_its_configs(tmp_path: Path) -> None:
    code = project("from-hydra.md", tmp_path / "code")
    config = yaml.safe_load((code / "search.yaml").read_text())
    config["searcher"]["max_trials"] = 4
    result = dray.Experiment(config, model_dir=code, path=tmp_path / "experiment").run()
    assert len(result.trials) == 4
    assert set(result.trials["state"]) <= {"COMPLETED", "PRUNED"}
    assert result.trials["hparams.model.hidden"].between(16, 256).all()
    assert result.trials["best_metric"].nunique() == 4
