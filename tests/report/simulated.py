"""An experiment's directory as a driver would have written it, of a search in virtual time: of any size, in seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.config.search import build_method
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import SYSTEM, MetricsLog
from searchers.events import Action, Event, Exited, Reported, Started
from searchers.search import Search
from searchers.simulate import Curve, simulate

BATCHES = 10
"""Batches per epoch."""
START_S = 0.5
"""From a trial's getting its workers to its first batch."""
BEGAN = 1_700_000_000.0


SEVERAL = [{"name": "validation_loss"}, {"name": "size"}, {"name": "size", "at_most": 200}]
"""Metrics of a search with several objectives; the size is the hyperparameter `hidden`."""


def config_of(trials: int, *, epochs: int = 16, several: bool = False) -> ExperimentConfig:
    """An ASHA search with three rungs over hyperparameters of all kinds."""
    return load_config(
        {
            "name": "simulated",
            "entrypoint": "model_def:DigitsTrial",
            "hyperparameters": {
                "global_batch_size": 64,
                "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
                "hidden": {"type": "int", "minval": 16, "maxval": 256},
                "optimizer": {"type": "categorical", "vals": ["adam", "sgd"]},
                "layers": {"type": "const", "val": [1, 2]},
            },
            "searcher": {
                "name": "asha",
                **({"metrics": SEVERAL} if several else {"metric": "validation_loss"}),
                "max_length": {"epochs": epochs},
                "max_trials": trials,
                "divisor": 4,
                "num_rungs": 3,
            },
            "reproducibility": {"experiment_seed": 7},
        }
    )


def loss(hparams: Mapping[str, Any], epochs: float) -> float:
    """How a trial learns: `lr` matters most, `optimizer` a little, and `hidden` hardly."""
    off = abs(math.log10(hparams["lr"]) + 2.2)
    return float(
        0.1 + 0.3 * off + (0.1 if hparams["optimizer"] == "sgd" else 0) + 1 / epochs + 1e-4 * hparams["hidden"]
    )


def simulated(
    path: Path, trials: int, *, workers: int = 4, failures: float = 0.0, several: bool = False
) -> ExperimentDirectory:
    """Write one: four metrics an epoch, an epoch a second, of which a quarter is validation.

    Args:
        path: of the experiment; made.
        trials, workers: of the search.
        failures: of a worker, per second.
        several: it compares trials by `SEVERAL`.
    """
    config = config_of(trials, several=several)
    directory = ExperimentDirectory.create(path, config, None)
    metrics = MetricsLog(directory.metrics)
    trained: dict[int, int] = {}
    free = [f"group-{number}" for number in range(workers)][::-1]
    has: dict[int, str] = {}
    timeline: list[str] = []
    records: list[dict[str, Any]] = []
    lines: list[str] = []

    def write(record: Mapping[str, Any], time: float) -> None:
        lines.append(json.dumps({**record, "time": BEGAN + time}))

    def note(event: str, time: float, group: str, **fields: int) -> None:
        timeline.append(json.dumps({"event": event, "time": BEGAN + time, "group": group, **fields}))

    def leave(trial: int, time: float) -> None:
        if trial in has:
            free.append(has.pop(trial))
            note("left", time, free[-1], trial=trial)

    def happened(time: float, event: Event, actions: list[Action]) -> None:
        while records:
            write(records.pop(0), time)
        trial = event.trial
        if isinstance(event, Started):
            leave(trial, time)
            has[trial] = free.pop()
            note("granted", time, has[trial], trial=trial)
        elif isinstance(event, Exited):
            leave(trial, time)
        if isinstance(event, Reported):
            hparams = search.trials[trial].hparams
            assert hparams is not None
            until, before = int(event.step), trained.get(trial, 0)
            taken = {"starting_s": 0.0 if before else START_S, "training_s": 0.75 * (until - before)}
            metrics.append(trial, system(taken | {"validating_s": 0.25 * (until - before)}, until, BEGAN + time))
            for epoch in range(trained.get(trial, 0) + 1, until + 1):
                metrics.append(trial, rows(hparams, epoch, BEGAN + time - (until - epoch), several=several))
            trained[trial] = until

    search = Search(
        build_method(config),
        config.space,
        seed=7,
        smaller_is_better=True,
        log=records.append,
        objectives=config.searcher.objectives,
    )
    for group in free:
        note("starts", 0.0, group, slots=1)
        note("joined", 0.0, group)
    simulate(
        search,
        workers,
        lambda hparams: Curve(
            lambda epochs: (
                (loss(hparams, epochs), hparams["hidden"], hparams["hidden"]) if several else loss(hparams, epochs)
            )
        ),
        start_cost=START_S,
        failures=failures,
        watch=happened,
    )
    while records:
        write(records.pop(0), 0.0)
    (directory.metrics / "_timeline.jsonl").write_text("".join(line + "\n" for line in timeline))
    directory.journal.write_text("".join(line + "\n" for line in lines))
    metrics.close()
    return directory


def system(found: Mapping[str, float], epoch: int, time: float) -> list[dict[str, Any]]:
    """What a trial took of its time."""
    at = {"batches": BATCHES * epoch, "epochs": float(epoch), "kind": SYSTEM, "time": time}
    return [{**at, "name": name, "value": value} for name, value in found.items() if value]


def rows(hparams: Mapping[str, Any], epoch: int, time: float, *, several: bool = False) -> list[dict[str, Any]]:
    """What a trial reports at an epoch's end."""
    value = loss(hparams, epoch)
    found = [
        ("training", "loss", 0.9 * value),
        ("training", "accuracy", 1 / (1 + value)),
        ("validation", "validation_loss", value),
        ("validation", "accuracy", 1 / (1 + 1.1 * value)),
    ]
    if several:
        found.append(("validation", "size", float(hparams["hidden"])))
    return [
        {"batches": BATCHES * epoch, "epochs": float(epoch), "kind": kind, "name": name, "value": value, "time": time}
        for kind, name, value in found
    ]
