"""A grid of three trials on a real Ray, from the command line: one completes, one fails, and the loss of one is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import dray
from tests.experiment.test_local import TRIAL
from tests.ray.harness import Driver, journal, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = TRIAL.replace(
    'return {"loss": loss}',
    """how = self.context.get_hparam("how")
        if how == "fails" and batch_idx == 5:
            raise RuntimeError("no more")
        return {"loss": loss * float("nan") if how == "diverges" and batch_idx >= 3 else loss}""",
).replace(
    'return {"error": self.loss(batch)}',
    'return {"error": self.loss(batch) * (0 if self.context.get_hparam("how") == "fails" else 1)}',
)


@pytest.mark.timeout(300)
def test_failures_and_nan_are_told_first_and_have_an_exit_code(drive: Callable[..., Driver], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_weight.py").write_text(MODEL)
    config = write_config(
        tmp_path,
        {
            "name": "outcomes",
            "entrypoint": "my_weight:OneWeight",
            "hyperparameters": {
                "global_batch_size": 2,
                "lr": 0.1,
                "how": {"type": "categorical", "vals": ["well", "diverges", "fails"]},
            },
            "searcher": {
                "name": "grid",
                "metric": "error",
                "max_length": {"batches": 8},
                "max_concurrent_trials": 1,
            },
            "resources": {"slot": "cpu"},
            "scheduling_unit": 2,
            "min_validation_period": {"batches": 2},
            "max_restarts": 0,
            "stop_on_nan": True,
        },
    )
    path = tmp_path / "experiment"
    driver = drive("create", config, tmp_path / "model", "--path", path)
    assert driver.wait() == 3, driver.log.read_text()
    result = dray.Result(path)
    trials = result.trials.set_index("hparams.how")
    assert trials["state"].to_dict() == {"well": "COMPLETED", "diverges": "STOPPED", "fails": "ERRORED"}
    assert trials["batches"].to_dict() == {"well": 8, "diverges": 4, "fails": 4}
    assert trials["restarts"].eq(0).all()
    assert trials["nan_since"].dropna().to_dict() == {"diverges": 4}
    assert math.isfinite(trials.loc["diverges", "best_metric"])  # type: ignore[arg-type]
    assert result.best_trial.hparams["how"] == "well"
    ends = {record["trial"]: record["reason"] for record in journal(path) if record["event"] == "exited"}
    numbers = trials["trial_id"]
    assert ends == {numbers["well"]: "completed", numbers["diverges"]: "diverged", numbers["fails"]: "errored"}
    told = driver.log.read_text()
    assert f"trial {numbers['diverges']} is stopped (stop_on_nan): the training metric loss is nan" in told
    first = told.index("\n1 of 3 trials failed\n1 trial diverged: NaN since batch 4 ")
    assert first < told.index("\nbest trials by error:\n")
    # Its journal is replayed, and there is nothing left to do.
    again = drive("resume", path)
    assert again.wait() == 3
    assert [record["event"] for record in journal(path)[-1:]] == ["opened"]
