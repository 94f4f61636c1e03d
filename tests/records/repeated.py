"""An experiment whose best trials were trained again, written as a driver writes it, with given values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from dray.config.load import load_config
from dray.records.directory import ExperimentDirectory
from searchers.events import Create, Exited, Reason, Requested, Source, Started
from tests.records.test_result import Story

Outcome = float | Literal["runs", "errored", "canceled", "diverged"]
LENGTH = 20


def repeated(
    path: Path,
    values: Sequence[float],
    again: Mapping[tuple[int, int], Outcome],
    *,
    seeds: int = 3,
    top: int = 3,
    smaller_is_better: bool = True,
    metric: str = "error",
    experiment_seed: int = 1,
    later: Sequence[tuple[int | None, float, Reason]] = (),
) -> ExperimentDirectory:
    """Write it.

    Args:
        path: of the experiment; made.
        values: the value of each trial of the search.
        again: the value or the outcome of each repeat, by trial and seed; by default, it does not end.
        later: trials that are added after the repeats: the trial that each is forked from, its value, and how it ends.
    """
    config = load_config(
        {
            "name": "repeated",
            "hyperparameters": {"lr": {"type": "double", "minval": 0.1, "maxval": 0.2}},
            "searcher": {
                "name": "random",
                "metric": metric,
                "smaller_is_better": smaller_is_better,
                "max_length": {"batches": LENGTH},
                "max_trials": len(values),
                "max_concurrent_trials": 0,
            },
            "repeat": {"seeds": seeds, "for": f"top {top}"},
            "reproducibility": {"experiment_seed": experiment_seed},
        }
    )
    story = Story(path, config, began=1_700_000_000.0)
    story.happen(*(Started(trial=trial) for trial in range(len(values))))
    for trial, value in enumerate(values):
        story.validate(trial, LENGTH, value, decides=True)
        actions = story.happen(Exited(trial=trial, reason="completed"))
    for action in actions:
        if not isinstance(action, Create) or action.repeat is None:
            continue
        story.happen(Started(trial=action.trial))
        match again.get((action.repeat.trial, action.repeat.seed), "runs"):
            case "runs":
                pass
            case "errored" | "canceled" | "diverged" as reason:
                if reason == "diverged":
                    story.validate(action.trial, 9, float("nan"), save=False)
                story.happen(Exited(trial=action.trial, reason=reason))
            case value:
                story.validate(action.trial, LENGTH, value, decides=True)
                story.happen(Exited(trial=action.trial, reason="completed"))
    for number, (source, value, reason) in enumerate(later):
        forked = None if source is None else Source(trial=source, step=5, batches=5)
        action = story.search.request(Requested(id=f"later-{number}", source=forked))[0]
        assert isinstance(action, Create)
        story.happen(Started(trial=action.trial))
        story.validate(action.trial, LENGTH, value, decides=True)
        story.happen(Exited(trial=action.trial, reason=reason))
    story.metrics.close()
    story.journal.close()
    return story.directory
