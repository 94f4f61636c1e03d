"""An experiment whose trials run in sandboxes, on a real Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dray
from dray.cluster import bubblewrap
from tests.ray.harness import TRIALS, printed, promotion, recorded

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := bubblewrap.why_impossible()), reason=f"this machine {why}"),
]


def ran(directory: Path, isolation: str) -> dray.Result:
    """A search that pauses trial 0, and promotes it when trial 1 is worse: it continues from its checkpoint."""
    points = [{"lr": 0.1}, {"lr": 0.001}]
    searcher = promotion(2, 20, num_rungs=2, max_concurrent_trials=1, points=points)
    config = recorded(Path(os.devnull), trials=2, batches=20, searcher=searcher, isolation=isolation)
    return dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run()


@pytest.mark.long
def test_sandboxed_trials_train_pause_and_resume_bit_by_bit(ray_is_up: None, tmp_path: Path) -> None:
    free, inside = (ran(tmp_path / isolation, isolation) for isolation in ("none", "sandbox"))
    assert inside.trials["batches"].tolist() == [20, 10]
    assert any("starts, from" in line and "checkpoint_10" in line for line in printed(inside.path, 0))
    columns = ["trial_id", "batches", "kind", "name", "value"]
    assert inside.metrics[columns].equals(free.metrics[columns])
