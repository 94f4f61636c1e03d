"""An experiment that is read as it grows: each time only what its journal and its metrics have got since."""

from __future__ import annotations

import json
import math
import threading
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dray.config.schema import ExperimentConfig
from dray.config.search import as_extended, rungs_of
from dray.records.directory import ExperimentDirectory
from dray.records.growing_metrics import GrowingMetrics
from dray.records.hparams import in_order
from dray.records.logs import GrowingFile
from dray.records.metrics import SYSTEM
from dray.records.outcomes import FAILED
from dray.serve.trial import Trial
from dray.training.metrics.checks import is_loss
from searchers.errors import JournalError
from searchers.pareto import ordered
from searchers.records import EVENT_KINDS, action_from_json, event_from_json, hparams_from_json
from searchers.views import NEVER_BEST, TrialView

FRESH_S = 0.5
"""What was read this lately is not read again."""


_Place = tuple[bool, float, float, int]
"""Whether a trial failed, its violation, its score (smaller is better), and its number."""


class Live:
    """An experiment. Take ``lock`` to read its attributes after `refresh`.

    Args:
        path: its directory.

    Attributes:
        version: grows with each change.
        trials: by number.
        failures: the journal's records of failures.
        metrics: kinds and names of metrics that were reported.
        states: how many trials are in each state.
        varying: names of the hyperparameters that differ between trials.
        along: the x-axis of curves: "epochs" if the search counts in them and every validation has them, else
            "batches".
        axis: of its curves, as `dray.serve.curves` has last made it.

    Raises:
        NoExperiment: there is none.
        ConfigError: its config can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = ExperimentDirectory.open(path)
        self.lock = threading.RLock()
        self.version = 0
        self.asked = time.monotonic()
        self._created: ExperimentConfig = self.directory.config()
        self._begin()

    def _begin(self) -> None:
        self.config = self._created
        self.metric, self.sign = self.config.searcher.first_metric, self.config.searcher.sign
        self.objectives = self.config.searcher.objectives
        self.rungs = rungs_of(self.config)
        self.trials: dict[int, Trial] = {}
        self.failures: list[Mapping[str, Any]] = []
        self.metrics: set[tuple[str, str]] = set()
        self.along = "epochs" if self.config.searcher.unit == "epochs" else "batches"
        self._journal = GrowingFile(self.directory.journal)
        self._metrics = GrowingMetrics(self.directory.metrics)
        self._read_at = -math.inf
        self._order: list[_Place] = []
        self._places: dict[int, _Place] = {}
        self._known: set[int] = set()
        self.axis: tuple[object, float, dict[str, Any]] | None = None
        self._drawn: dict[str, str] = {}
        self.varying: list[str] = []
        self.states: Counter[str] = Counter()
        self.version += 1

    def refresh(self, *, asked: bool = True) -> None:
        """Read what is new.

        Args:
            asked: somebody looks at it.

        Raises:
            JournalError: its journal is damaged.
        """
        with self.lock:
            now = time.monotonic()
            self.asked = now if asked else self.asked
            if now - self._read_at < FRESH_S:
                return
            try:
                self._refresh()
            except (ValueError, KeyError, TypeError):
                # A line that was torn, and is gone since the experiment was resumed; or the experiment is another one.
                self._metrics.close()
                self._begin()
                try:
                    self._refresh()
                except (ValueError, KeyError, TypeError) as error:
                    raise JournalError(f"{self.path}: the journal can't be read: {error}") from None
            self._read_at = time.monotonic()

    def close(self) -> None:
        """Close its files."""
        with self.lock:
            self._metrics.close()

    def _refresh(self) -> None:
        lines = self._journal.new_lines()
        if lines:
            for record in json.loads(f"[{','.join(lines)}]"):
                self._happened(record)
        parts, rows = self._metrics.new_rows()
        if parts is not None:
            self._load(parts)
        self._reported(rows)
        if lines or rows or parts is not None:
            self.version += 1

    # ------------------------------------------------------------------ the journal
    def _happened(self, record: Mapping[str, Any]) -> None:
        event, at = record.get("event"), record.get("time")
        if event in EVENT_KINDS:
            trial = self.trials[record["trial"]]
            drawn = hparams_from_json(record.get("hparams")) if event == "started" else None
            assert drawn is None or isinstance(drawn, dict)
            after = trial.view.after(
                event_from_json(record), hparams=drawn, smaller_is_better=self.sign == 1, objectives=self.objectives
            )
            self._see(trial, after)
            if event == "started" and trial.started is None:
                trial.started = at
            elif event == "exited" and trial.ended is None:
                trial.ended = at
        elif event in ("restarted", "gave_up"):
            self.failures.append(record)
            if event == "restarted":
                self.trials[record["trial"]].restarts += 1
                self.trials[record["trial"]].changed()
        elif event == "extended":
            self.config = as_extended(self.config, [record])
            self.rungs = rungs_of(self.config)
        for action in record.get("actions", ()):
            number = action.get("trial")
            if action["action"] == "create":
                self._see(self._trial(number), TrialView(id=number))
            elif action["action"] != "done":
                it = self.trials[number]
                self._see(it, it.view.under(action_from_json(action)))  # type: ignore[arg-type]

    def _see(self, trial: Trial, view: TrialView) -> None:
        """Something has happened to a trial."""
        before, drawn = trial.view.state, trial.hparams
        trial.see(view)
        if view.state != before or trial.view.id not in self._known:
            self.states[before] -= trial.view.id in self._known
            self.states[view.state] += 1
            self._known.add(trial.view.id)
        if trial.hparams is not drawn:
            for name, value in trial.hparams.items():
                if self._drawn.setdefault(name, str(value)) != str(value) and name not in self.varying:
                    self.varying = in_order(sorted([*self.varying, name]), self.config.hyperparameters)
        self._rank(trial)

    def _violation(self, trial: Trial) -> float:
        """Of the constraints; infinite if it has not been compared."""
        if self.objectives is None:
            return 0.0
        return math.inf if trial.view.losses is None else trial.view.losses.violation

    def _rank(self, trial: Trial) -> None:
        """Move a trial to its rank."""
        number, best = trial.view.id, trial.best_value
        place = (trial.view.state == FAILED, self._violation(trial), self.sign * (best or 0.0), number)
        wanted = None if best is None or trial.view.state == "INVALID_HP" else place
        before = self._places.get(number)
        if wanted == before:
            return
        if before is not None:
            del self._order[bisect_left(self._order, before)]
            del self._places[number]
        if wanted is not None:
            insort(self._order, wanted)
            self._places[number] = wanted

    def _trial(self, number: int) -> Trial:
        if number not in self.trials:
            self.trials[number] = Trial(TrialView(id=number), self.sign)
        return self.trials[number]

    # ------------------------------------------------------------------ metrics
    def _load(self, parts: pa.Table) -> None:
        """All metrics that are in Parquet: only those that the tables and the curves need become Python's."""
        self._order, self._places = [], {}
        for trial in self.trials.values():
            self.trials[trial.view.id] = Trial(
                trial.view, self.sign, trial.hparams, trial.started, trial.ended, trial.restarts
            )
        rows = parts.filter(pc.not_equal(parts["kind"], SYSTEM))
        last = rows.group_by("trial_id").aggregate([("batches", "max")])
        for number, batches in zip(last["trial_id"].to_pylist(), last["batches_max"].to_pylist(), strict=True):
            self._trial(number).batches = batches
        series = rows.group_by(["kind", "name"]).aggregate([])
        self.metrics = set(zip(series["kind"].to_pylist(), series["name"].to_pylist(), strict=True))
        searched = pc.and_(pc.equal(rows["kind"], "validation"), pc.equal(rows["name"], self.metric))
        self._reported(rows.filter(searched).to_pylist())
        bad = pc.invert(pc.fill_null(pc.is_finite(rows["value"]), False))
        diverged = rows.filter(bad)["trial_id"].unique()
        if len(diverged):
            theirs = rows.filter(pc.is_in(rows["trial_id"], value_set=diverged))
            for kind, name in self.metrics:
                if is_loss(kind, name, self.metric) and (kind, name) != ("validation", self.metric):
                    mine = pc.and_(pc.equal(theirs["kind"], kind), pc.equal(theirs["name"], name))
                    self._reported(theirs.filter(mine).to_pylist())

    def _reported(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            kind, name = row["kind"], row["name"]
            if kind == SYSTEM:
                continue
            self.metrics.add((kind, name))
            trial, batches, value = self._trial(row["trial_id"]), row["batches"], row["value"]
            if batches > trial.batches:
                trial.batches = batches
            if kind == "validation" and name == self.metric:
                if row["epochs"] is None and self.along == "epochs":
                    self.along = "batches"
                    for each in self.trials.values():
                        each.redraw()
                trial.validated(batches, row["epochs"], value, row["time"])
                self._rank(trial)
            if (trial.nan or value is None or not math.isfinite(value)) and is_loss(kind, name, self.metric):
                trial.loss((kind, name), batches, value)
            trial.changed()

    # ------------------------------------------------------------------ what is derived
    def ranked(self) -> list[Trial]:
        """The trials that have validated, best first, as `dray.records.outcomes.ranked`."""
        return [self.trials[number] for *_, number in self._order]

    def rank_of(self, trial: int) -> int | None:
        """From 1; None: it has not validated."""
        place = self._places.get(trial)
        return None if place is None else bisect_left(self._order, place) + 1

    def best(self) -> Trial | None:
        """The best trial of those that did not fail, and keep every limit; in the first objective."""
        first = next(iter(self._order), None)
        return None if first is None or first[0] or first[1] else self.trials[first[-1]]

    def front(self) -> list[int]:
        """The Pareto front by the journal, the best in the first objective first; [] with one metric."""
        can = {number: it.view.losses for number, it in self.trials.items() if it.view.state not in NEVER_BEST}
        there = {number: losses for number, losses in can.items() if losses is not None}
        return sorted(ordered(there).front, key=lambda number: there[number].values[0])
