"""What fails on one rank has failed, whatever the others are doing, and without `hang_timeout_s`."""

from __future__ import annotations

from pathlib import Path

import pytest

import dray
from dray.errors import ExperimentError
from tests.ray.harness import TRIALS, journal, lines, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_failure_is_known_within_thirty_seconds_though_another_rank_is_busy_for_ten_minutes(tmp_path: Path) -> None:
    config = recorded(
        tmp_path / "record",
        trials=1,
        batches=8,
        entrypoint="deaf:Deaf",
        resources={"slot": "cpu", "slots_per_trial": 2, "max_slots": 2},
        max_restarts=0,
    )
    with pytest.raises(ExperimentError, match=r"KeyError: 'gone'\n  deaf.py:"):
        dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment").run()
    failed_at = next(line["time"] for line in lines(tmp_path / "record") if line.get("stuck") == 1)
    [ended] = [event for event in journal(tmp_path / "experiment") if event.get("trial") == 0 and "error" in event]
    assert ended["time"] < failed_at + 30
