"""Lengths counted by a validation metric: trials end at `max_time`, and are compared at its rungs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from tests.ray.harness import TRIALS, attempts, check_promotions, ends, journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

SEARCHER = {
    "name": "asha",
    "variant": "promotion",
    "metric": "error",
    "max_time": 20,
    "time_metric": "seconds",
    "max_trials": 6,
    "num_rungs": 3,
    "divisor": 2,
    "max_concurrent_trials": 3,
}


def config(record: Path, **fields: Any) -> dict[str, Any]:
    """Rungs at 5, 10 and 20 seconds, which the trial of `recorded.Timed` comes to at 10, 20 and 40 batches."""
    one = {"slot": "cpu", "max_slots": 1}
    made = recorded(record, trials=0, batches=0, entrypoint="recorded:Timed", searcher=SEARCHER, resources=one)
    return {**made, "min_validation_period": {"batches": 6}, "checkpoint_policy": "none"}


def test_trials_are_compared_and_end_where_they_first_validate_past_the_metrics_rungs(tmp_path: Path) -> None:
    record = tmp_path / "record"
    result = dray.Experiment(config(record), model_dir=TRIALS, path=tmp_path / "experiment").run()
    # Validations are at 3, 6, 9, ... seconds: 12, 24 and 42 batches.
    assert set(result.trials["batches"]) == {12, 24, 42}
    assert set(result.trials["state"][result.trials["batches"] == 42]) == {"COMPLETED"}
    assert ends(result.path) == dict.fromkeys(range(6), 1)
    reported = {(r["trial"], r["step"]) for r in journal(result.path) if r["event"] == "reported"}
    assert {step for _, step in reported} == {6, 12, 21}
    assert check_promotions(result.path, divisor=2, top=20) >= 3
    for trial, mine in attempts(record).items():
        length = result.trials.set_index("trial_id")["batches"][trial]
        assert [batch for attempt in mine for batch in attempt.batches] == list(range(length))
