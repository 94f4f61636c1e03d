"""Passes an experiment that is not running to an observer."""

from __future__ import annotations

import pandas as pd

import dray
from dray.observers.observer import Make, News
from dray.records.directory import ExperimentDirectory


def replay_to(directory: ExperimentDirectory, make: Make) -> None:
    """What an observer gets when the experiment is resumed, and ends at once; here, not in a thread."""
    result = dray.Result(directory.path)
    times = result.trials.set_index("trial_id")[["started", "ended"]].to_dict("index")
    rows = {trial: part.to_dict("records") for trial, part in result.metrics.groupby("trial_id")}
    observer = make()
    observer.update(
        [
            News(
                view=view,
                started=_seconds(times[trial]["started"]),
                ended=_seconds(times[trial]["ended"]),
                rows=rows.get(trial, []),
            )
            for trial, view in result.search.trials.items()
        ]
    )
    observer.close(result.search.done is not None)


def _seconds(time: pd.Timestamp) -> float | None:
    return None if pd.isna(time) else time.timestamp()
