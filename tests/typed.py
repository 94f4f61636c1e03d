"""Code as users write it, which mypy checks together with the package (see pyproject.toml); it is not run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from typing_extensions import assert_type

import dray


def experiments_by_name_number_and_path() -> None:
    for name in ("latest", 12, Path("results/digits-1"), "s3://bucket/results/digits-1"):
        result = dray.Result(name)
        assert_type(result.trials, pd.DataFrame)
        assert_type(result.best_trial.batches, int)
        assert_type(dray.Experiment.resume(name).run(), dray.Result)
