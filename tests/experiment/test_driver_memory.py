"""The driver keeps little of a trial that has ended. bench/driver_memory.py measures all of it, over 100,000 trials."""

from __future__ import annotations

import gc
import io
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from dray.display import display as display_module
from dray.display.counts import Counts
from dray.display.display import Display
from dray.experiment.effects import Effect, Examine, Prune
from dray.experiment.retention import Policy, Retention, checkpoints_needed
from dray.observers.observer import Observers
from dray.records.directory import ExperimentDirectory
from searchers.answers import decide
from searchers.asha import ASHA
from searchers.events import Started, TrialResult
from searchers.search import Record, Search
from searchers.space import parse

TRIALS = 86, 345
"""A dict is enlarged for its 86th, 171st and 342nd entry: each of them is just after such a time."""
RUNGS = 400, 1600, 6400
SPACE: dict[str, Any] = {
    "global_batch_size": 64,
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "dropout": {"type": "double", "minval": 0.0, "maxval": 0.6},
    "hidden": {"type": "int", "minval": 16, "maxval": 4096},
    "optimizer": {"type": "categorical", "vals": ["adam", "sgd"]},
    "sizes": [64, 32, 16],
}


class Driver:
    """The parts of a driver that know of each trial; trials run one after the other."""

    def __init__(self, path: Path) -> None:
        method = ASHA(max_trials=2000, max_length=RUNGS[-1], num_rungs=len(RUNGS), max_concurrent_trials=1)
        space = parse(SPACE)
        self.search = Search(method, space, seed=0, smaller_is_better=True, log=self._log)
        self.observers = Observers(ExperimentDirectory(path), {})
        console = Console(file=io.StringIO())
        self.display = Display(
            name="x", path=path, metric="loss", smaller_is_better=True, unit="batches", console=console
        )
        self.retention = Retention(
            Policy(),
            needs=lambda trial: checkpoints_needed(self.search.trials[trial]),
            emit=self._put,
        )
        self.numbers = 0
        self.jobs: list[Prune | Examine] = []
        self.search.start()
        self.display.begin(self.search)
        self.retention.recover([])

    def _put(self, effect: Effect) -> None:
        if isinstance(effect, Prune | Examine):
            self.jobs.append(effect)

    def _log(self, record: Record) -> None:
        self.observers.happened({**json.loads(json.dumps(record)), "time": time.time()}, self.search.trials)

    def play(self, trials: int) -> None:
        for trial in range(len(self.search.trials) - 1, trials):
            self._train(trial)
        self.display.update(Counts(), 1, 1)
        assert not self.jobs

    def _train(self, trial: int) -> None:
        self._train_on(trial)
        while self.jobs:
            match self.jobs.pop(0):
                case Prune() as prune:
                    self.retention.pruned(prune, prune.delete, [], failed=False)
                case Examine() as examine:
                    self.retention.examined(examine)

    def _train_on(self, trial: int) -> None:
        self.search.on(Started(trial=trial))
        for batches in RUNGS:
            value = hash((trial, batches)) % 1009 / 1009
            row = {"batches": batches, "epochs": 0.0, "kind": "validation", "name": "loss", "value": value, "time": 0.0}
            self.observers.rows(trial, [row])
            self.display.rows(trial, [row])
            self.retention.saved(trial, batches, f"/experiment/trial_{trial}/checkpoint_{batches}", value)
            self.numbers += 1
            outcome: Literal["completed"] | None = "completed" if batches == RUNGS[-1] else None
            result: Any = TrialResult(number=self.numbers, trial=trial, step=batches, value=value, outcome=outcome)
            if decide(self.search, result).decision == "stop":
                self.retention.changed([trial])
                return


def test_the_driver_keeps_less_than_a_kilobyte_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about 700 bytes; it was 1,800."""
    monkeypatch.setattr(display_module, "PLAIN_EVERY_S", (0.0, 0.0))
    driver, held = Driver(tmp_path), []
    tracemalloc.start()
    try:
        for trials in TRIALS:
            driver.play(trials)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert (held[1] - held[0]) / (TRIALS[1] - TRIALS[0]) < 1000
