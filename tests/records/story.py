"""An experiment in which everything happens, written as a driver writes it: curves turn up again after their best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.config.load import load_config
from dray.config.search import rungs_of
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import MetricsLog
from searchers.journal import Journal

NAN = float("nan")
STATES = {
    0: "COMPLETED",  # its best is between the two rungs at which the search compared it
    1: "ERRORED",  # after a restart; it had the best value of all
    2: "PAUSED",
    3: "PRUNED",
    4: "PRUNED",  # diverged
    5: "COMPLETED",  # restarted: the value at 10 batches was better before
    6: "INVALID_HP",
    7: "RUNNING",
    8: "PENDING",
}
VALIDATIONS = {
    0: ((10, 0.5), (20, 0.126), (30, 0.326)),
    1: ((10, 0.01),),
    2: ((10, 0.3),),
    3: ((10, 0.2),),
    4: ((10, 0.45), (20, NAN), (30, NAN)),
    5: ((10, 0.08), (10, 0.4), (20, 0.35)),
    6: ((10, 0.02),),
    7: ((10, 0.6), (20, 0.25)),
}
SIZES = (90.0, 10.0, 20.0, 300.0, 30.0, 80.0, 5.0, 40.0)
"""The trials' sizes, at every report; the objectives allow 200."""
BEST = {0: (0.126, 20), 1: (0.01, 10), 2: (0.3, 10), 3: (0.2, 10), 4: (0.45, 10), 5: (0.35, 20), 6: (0.02, 10)} | {
    7: (0.25, 20)
}
RESTARTS = {1: 1, 5: 1}
DIVERGED = {4: 20}


def happened(path: Path, *, several: bool = False) -> ExperimentDirectory:
    """Write it.

    Args:
        path: of the experiment; made.
        several: the search has two objectives and a constraint.
    """
    metrics = [{"name": "validation_loss"}, {"name": "size"}, {"name": "size", "at_most": 200}]
    config = load_config(
        {
            "name": "story",
            "entrypoint": "model_def:Trial",
            "hyperparameters": {
                "global_batch_size": 1,
                "lr": {"type": "double", "minval": 0.0, "maxval": 1.0},
                "net": {"hidden": {"type": "int", "minval": 1, "maxval": 300}},
            },
            "searcher": {
                "name": "asha",
                **({"metrics": metrics} if several else {"metric": "validation_loss"}),
                "max_length": {"batches": 30},
                "max_trials": 9,
                "num_rungs": 2,
                "divisor": 3,
            },
            "checkpoint_storage": {"save_trial_best": 0},
            "checkpoint_policy": "none",
            "reproducibility": {"experiment_seed": 7},
        }
    )
    directory = ExperimentDirectory.create(path, config, None)
    log, journal, now = MetricsLog(directory.metrics), Journal(directory.journal), 1_700_000_000.0

    def write(event: str, actions: list[Mapping[str, Any]] | None = None, **fields: Any) -> None:
        nonlocal now
        now += 1
        journal.append({"event": event, **fields, "time": now, **({} if actions is None else {"actions": actions})})

    def start(trial: int) -> None:
        write("started", [], trial=trial, hparams={"global_batch_size": 1, "lr": trial / 8, "net": {"hidden": trial}})

    def validate(trial: int, batches: int, value: float, *actions: Mapping[str, Any], decides: bool) -> None:
        row = {"batches": batches, "epochs": None, "time": now}
        named = [("training", "loss", value / 2), ("validation", "validation_loss", value)]
        named += [("validation", "size", SIZES[trial]), ("validation", "accuracy", 1 - value)]
        log.append(trial, [{**row, "kind": kind, "name": name, "value": each} for kind, name, each in named])
        if decides:
            of_all = {"metrics": [value, SIZES[trial], SIZES[trial]]} if several else {}
            write("reported", list(actions), trial=trial, step=batches, value=value, **of_all)

    first = {"metrics": config.searcher.objectives.to_json()} if config.searcher.objectives is not None else {}
    write("opened", version="0.1.0")
    create = [{"action": "create", "trial": trial} for trial in range(9)]
    write("start", create, seed=7, smaller_is_better=True, rungs=list(rungs_of(config)), **first)
    for trial, points in VALIDATIONS.items():
        start(trial)
        for place, (batches, value) in enumerate(points):
            if trial in RESTARTS and place == len(points) // 2:
                write("restarted", trial=trial, error="OutOfMemory", where="model_def.py at model_def.py:3 in f")
                start(trial)
            pauses = [{"action": "pause", "trial": 2}] if trial == 2 else []
            stops = [{"action": "stop", "trial": 3}] if trial == 3 else []
            validate(trial, batches, value, *pauses, *stops, decides=value == value and batches != 20)
    write("gave_up", trial=1, error="OutOfMemory", why="max_restarts")
    for trial, reason in ((0, "completed"), (1, "errored"), (3, "stopped"), (4, "diverged"), (5, "completed")):
        write("exited", [], trial=trial, reason=reason)
    write("exited", [], trial=6, reason="invalid_hp")
    log.close()
    journal.close()
    return directory
