"""Reports that nobody waits for travel together; none is lost on the way, also of a trial that fails."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import dray
from dray.desk.messages import Message
from tests.ray.harness import TRIALS, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


def test_training_metrics_of_every_report_arrive_in_order(tmp_path: Path) -> None:
    config = recorded(
        tmp_path / "record",
        trials=2,
        batches=350,
        entrypoint="recorded:FailsLate",
        min_validation_period=None,
        checkpoint_policy="none",
        max_restarts=0,
    )
    # When the second one gets its workers, the driver has read what the first one reported.
    config["searcher"]["max_concurrent_trials"] = 1
    path, rows = tmp_path / "experiment", []

    def heard(message: Message) -> None:
        rows.append(sum(len(pd.read_parquet(part)) for part in (path / "metrics").glob("part-*.parquet")))

    result = dray.Experiment(config, model_dir=TRIALS, path=path).run(on_message=heard)
    assert rows[-1] > 0, "other tools see what has been reported while it runs"
    assert result.trials["state"].tolist() == ["COMPLETED", "ERRORED"]
    training = result.metrics[result.metrics["kind"] == "training"]
    reported = {trial: rows["batches"].tolist() for trial, rows in training.groupby("trial_id")}
    assert reported == {0: [100, 200, 300, 350], 1: [100, 200]}
