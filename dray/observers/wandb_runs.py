"""Weights & Biases: a run for each trial, in a group for the experiment.

A run's config has the hyperparameters; its history has `training/loss`, `validation/accuracy` and so on, over
`batches`; its summary has `state`, dray's name of the trial's state. Offline runs are in the experiment's directory, in
`wandb/`, for `wandb sync`.

A run ends when its trial ends or is paused, and continues with it. A history is append-only: so `wandb/written.jsonl`
has the time up to which each trial's metrics are in ended runs, and a resumed experiment adds later metrics. Metrics
that a trial measures twice, because it resumed from a checkpoint, appear twice; so do those of a killed run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from dray.config.schema import ExperimentConfig
from dray.observers.observer import News, identity
from dray.records.directory import ExperimentDirectory
from searchers.rows import cut_incomplete, lenient, read
from searchers.views import NEVER_BEST

_LIVE = ("PENDING", "RUNNING", "PAUSED")
_FAILED = (*NEVER_BEST, "CANCELED")


def _was_written(row: Any) -> str:
    match row:
        case [int(), int() | float(), str()]:
            return ""
    return f"expected a trial, a time and a state, got {row!r:.60}"


class WandBRuns:
    """An `Observer` that writes these runs."""

    def __init__(self, directory: ExperimentDirectory, config: ExperimentConfig) -> None:
        assert config.loggers.wandb is not None
        self._directory, self._config, self._fields = directory, config, config.loggers.wandb
        self._mode = self._fields.mode or os.environ.get("WANDB_MODE", "online")
        if self._mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key: set WANDB_API_KEY, or loggers: {wandb: {mode: offline}}")
        # wandb has its own log files, but also passes its messages to the program's log.
        logging.getLogger("wandb").propagate = False
        self._id = hashlib.sha256(identity(directory, config).encode()).hexdigest()[:8]
        kept = directory.path / "wandb"
        kept.mkdir(exist_ok=True)
        written = kept / "written.jsonl"
        cut_incomplete(written)
        #: By trial: the time of its last metric, and its state.
        self._known: dict[int, tuple[float, str]] = {}
        for trial, until, state in lenient(read(written, missing=b""), written, _was_written):
            self._known[trial] = (until, state)
        self._file = written.open("a")
        #: Trials of an earlier driver that have no update yet.
        self._earlier = set(self._known)
        self._runs: dict[int, wandb.Run] = {}

    def update(self, news: Sequence[News]) -> None:
        for one in news:
            if one.trial.drawn is not None:
                self._write(one)

    def close(self, done: bool) -> None:
        for trial in list(self._runs):
            self._end(trial)
        self._file.close()

    def _write(self, one: News) -> None:
        trial, state = one.trial.id, one.trial.state
        rows = one.rows
        last, known = self._known.get(trial, (-1.0, ""))
        if trial in self._earlier:  # a trial's first update contains its whole past
            self._earlier.remove(trial)
            rows = [row for row in rows if row["time"] > last]
        if not rows and state == known:
            return
        run = self._runs.get(trial) or self._open(one)
        for batches, some in itertools.groupby(sorted(rows, key=_batches), key=_batches):
            run.log({"batches": batches, **{f"{row['kind']}/{row['name']}": row["value"] for row in some}})
        run.summary["state"] = state
        self._known[trial] = (max([last, *(row["time"] for row in rows)]), state)
        if state != "RUNNING":
            self._end(trial)

    def _end(self, trial: int) -> None:
        """End the run: only then is everything certain to be written."""
        run, (_, state) = self._runs.pop(trial), self._known[trial]
        if state in _LIVE:
            run.mark_preempting()
        run.finish(exit_code=int(state in _LIVE or state in _FAILED))
        self._file.write(json.dumps([trial, *self._known[trial]]) + "\n")
        self._file.flush()

    def _open(self, one: News) -> wandb.Run:
        trial, metric = one.trial.id, f"validation/{self._config.searcher.first_metric}"
        run = wandb.init(
            project=self._fields.project or self._config.name,
            entity=self._fields.entity,
            dir=self._directory.path,
            mode=self._mode,  # type: ignore[arg-type]  # wandb reports an invalid mode from the environment
            id=f"{self._id}-{trial}",
            resume="allow",
            reinit="create_new",  # many at once
            name=f"trial_{trial}",
            group=self._directory.path.name,
            config=dict(one.trial.drawn or {}),
            # This process does not train, so its output, machine and code don't matter.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        run.define_metric("batches")
        run.define_metric("*", step_metric="batches")
        better = "min" if self._config.searcher.sign == 1 else "max"
        run.define_metric(metric, step_metric="batches", summary=f"{better},last")
        self._runs[trial] = run
        return run


def _batches(row: Mapping[str, Any]) -> int:
    return int(row["batches"])
