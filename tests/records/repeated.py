"""An experiment whose best trials were trained again, written as a driver writes it, with given values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dray.config.load import load_config
from dray.config.search import build_search
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import MetricsLog
from dray.storage import CheckpointStore
from searchers.events import Create, Exited, Reason, Reported, Requested, Source, Started
from searchers.journal import Journal

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
    directory = ExperimentDirectory.create(path, config, None)
    metrics, journal, clock = MetricsLog(directory.metrics), Journal(directory.journal), 1_700_000_000.0

    def write(record: Mapping[str, Any]) -> None:
        nonlocal clock
        clock += 1
        journal.append({**record, "time": clock})

    write({"event": "opened", "version": "0.1.0"})
    search = build_search(config, write)
    actions = search.start()
    for trial in range(len(values)):
        search.on(Started(trial=trial))

    def run(trial: int, value: float) -> None:
        rows = [("training", "loss", value), ("validation", metric, value)]
        fields = {"batches": LENGTH, "epochs": 1.0, "time": clock}
        metrics.append(trial, [{**fields, "kind": kind, "name": name, "value": each} for kind, name, each in rows])
        search.on(Reported(trial=trial, step=LENGTH, value=value))
        store = CheckpointStore(directory.trial(trial))
        store.commit(store.stage(LENGTH), LENGTH)

    for trial, value in enumerate(values):
        run(trial, value)
        actions = search.on(Exited(trial=trial, reason="completed"))
    for action in actions:
        if not isinstance(action, Create) or action.repeat is None:
            continue
        outcome = again.get((action.repeat.trial, action.repeat.seed), "runs")
        search.on(Started(trial=action.trial))
        match outcome:
            case "runs":
                pass
            case "diverged":
                metrics.append(
                    action.trial,
                    [
                        {
                            "batches": 9,
                            "epochs": 1.0,
                            "kind": "training",
                            "name": "loss",
                            "value": float("nan"),
                            "time": clock,
                        }
                    ],
                )
                search.on(Exited(trial=action.trial, reason="diverged"))
            case "errored" | "canceled":
                search.on(Exited(trial=action.trial, reason=outcome))
            case value:
                run(action.trial, value)
                search.on(Exited(trial=action.trial, reason="completed"))
    for number, (source, value, reason) in enumerate(later):
        forked = None if source is None else Source(trial=source, step=5, batches=5)
        action = search.request(Requested(id=f"later-{number}", source=forked))[0]
        assert isinstance(action, Create)
        search.on(Started(trial=action.trial))
        run(action.trial, value)
        search.on(Exited(trial=action.trial, reason=reason))
    metrics.close()
    journal.close()
    return directory
