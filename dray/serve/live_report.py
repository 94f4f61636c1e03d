"""The report's figures of an experiment that runs, from what the server has read of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dray.records.hparams import in_order
from dray.records.listing import StoredExperiment
from dray.records.result import Result
from dray.report import figures, front, html, slot_time
from dray.report.data import MAX_TRIALS, ReportData
from dray.report.figures import Figure
from dray.serve.live import Live
from searchers.pareto import ordered
from searchers.views import NEVER_BEST, TrialView

SHARE = 0.003
"""Of a core, that making figures again may cost on average, all together that are looked at."""
LEAST_S = 2.0


class LiveReport(ReportData):
    """As `ReportData`, without reading what `Live` has."""

    def __init__(self, live: Live) -> None:
        self.path, self.directory = live.path, live.directory
        self.overview = StoredExperiment.here(live.directory).overview()
        self.records = []
        self.result = Result(live.path)
        with live.lock:
            self.config, self.metric, self.sign = live.config, live.metric, live.sign
            self._views = {number: it.view for number, it in live.trials.items()}
            self._table = _table(live)
            self._validations = _validations(live)

    @property
    def table(self) -> pd.DataFrame:
        """As `Result.trials`."""
        return self._table

    @property
    def views(self) -> Mapping[int, TrialView]:
        """What the search knows of each trial."""
        return self._views

    @cached_property
    def validations(self) -> pd.DataFrame:
        """The searcher's metric, of all trials."""
        return self._validations


def _table(live: Live) -> pd.DataFrame:
    trials = list(live.trials.values())
    table = pd.DataFrame({"trial_id": list(live.trials), "state": [it.view.state for it in trials]})
    for name in in_order(dict.fromkeys(name for it in trials for name in it.hparams), live.config.hyperparameters):
        table[f"hparams.{name}"] = pd.Series([it.hparams.get(name) for it in trials])
    table["batches"] = [it.batches for it in trials]
    table["metric"] = pd.Series([it.values[-1] if it.values else math.nan for it in trials], dtype="float64")
    best = [math.nan if it.best_value is None else it.best_value for it in trials]
    table["best_metric"] = pd.Series(best, dtype="float64")
    if (objectives := live.objectives) is not None:
        losses = {number: it.view.losses for number, it in live.trials.items() if it.view.losses is not None}
        order = ordered(
            {number: its for number, its in losses.items() if live.trials[number].view.state not in NEVER_BEST}
        )
        for place, each in enumerate(objectives.objectives):
            sign = 1 if each.smaller_is_better else -1
            values = {number: sign * its.values[place] for number, its in losses.items()}
            table[f"metrics.{each.name}"] = table["trial_id"].map(values).astype("float64")
        violations = {number: its.violation for number, its in losses.items()}
        table["violation"] = table["trial_id"].map(violations).astype("float64")
        table["front"] = table["trial_id"].map({number: order.front_of(number) for number in order}).astype("Int64")
    return table


def _validations(live: Live) -> pd.DataFrame:
    trials = [it for it in live.trials.values() if it.at]
    return pd.DataFrame(
        {
            "trial_id": pd.Series([it.view.id for it in trials for _ in it.at], dtype="int64"),
            "batches": pd.Series([each for it in trials for each in it.at], dtype="int64"),
            "epochs": pd.Series([each for it in trials for each in it.epochs], dtype="float64"),
            "value": pd.Series([each for it in trials for each in it.values], dtype="float64"),
            "time": pd.Series([each for it in trials for each in it.times], dtype="float64"),
        }
    )


# ---------------------------------------------------------------------------------------------------------- figures
def _left_out(report: ReportData) -> str:
    shown, there, best = len(report.shown), len(report.ranked), MAX_TRIALS // 2
    return (
        "" if shown == there else f"{shown:,} of {there:,} trials shown: the best {best:,} and {best:,} evenly by rank."
    )


def _history(report: ReportData) -> dict[str, Figure]:
    return {} if report.ranked.empty else {"history": {**figures.history(report), "note": _left_out(report)}}


def _front(report: ReportData) -> dict[str, Figure]:
    objectives = report.config.searcher.objectives
    if report.ranked.empty or objectives is None or len(objectives.objectives) < 2:
        return {}
    return {"front": {**front.scatter(report, objectives), "note": _left_out(report)}}


def _parallel(report: ReportData) -> dict[str, Figure]:
    if report.ranked.empty or not report.varying:
        return {}
    return {"parallel": {**figures.parallel(report), "note": _left_out(report)}}


def _slices(report: ReportData) -> dict[str, Figure]:
    if report.ranked.empty or not report.varying:
        return {}
    left_out = _left_out(report)
    return {f"slice {name}": {**figure, "note": left_out} for name, figure in figures.slices(report).items()}


def _importance(report: ReportData) -> dict[str, Figure]:
    figure = figures.importances(report)
    found = report.importance
    if found is None:
        return {"importance": {"note": "Too few trials to tell which hyperparameters mattered."}}
    at = report.length(report.compared_at or 0, report.along)
    if figure is None:
        why = f"The {found.trials:,} trials at {at} do not show which hyperparameters mattered."
        return {"importance": {"note": why}}
    note = (
        f"Permutation importance for {report.metric} at {at}, which two thirds of the trials have reached. A random "
        f"forest explains {found.explained:.0%} of the ranks of trials that it has not seen ({found.trials:,} trials)."
    )
    return {"importance": {**figure, "note": note}}


def _slots(report: ReportData) -> dict[str, Figure]:
    table = report.result.timeline
    if table.empty:
        return {}
    spent = (
        ((table["end"] - table["start"]) * table["slots"]).groupby(table["phase"]).sum().sort_values(ascending=False)
    )
    phases = [
        {
            "name": slot_time.PHASES_SHOWN[str(phase)].name,
            "colour": slot_time.PHASES_SHOWN[str(phase)].colour,
            "share": float(seconds / spent.sum()),
            "time": html.duration(float(seconds)),
        }
        for phase, seconds in spent.items()
    ]
    found: dict[str, Figure] = {"shares": {**slot_time.shares(report), "phases": phases}}
    if (by_group := slot_time.stretches(report)) is not None:
        found["groups"] = by_group
    return found


KINDS: dict[str, Callable[[ReportData], dict[str, Figure]]] = {
    "history": _history,
    "front": _front,
    "parallel": _parallel,
    "slices": _slices,
    "importance": _importance,
    "slots": _slots,
}


@dataclass(frozen=True, slots=True)
class Made:
    """Figures of one kind.

    Attributes:
        body: as JSON: ``figures`` by name, ``at`` (Unix time in s), ``version`` of the experiment, and ``error`` if
            they can't be made. Or curves, see `dray.serve.curves.encode`.
        version: of the experiment then.
        cost_s: of the CPU's time.
        at: when, by the monotonic clock.
    """

    body: bytes
    version: int
    cost_s: float
    at: float

    def wait_s(self, figures: int) -> float:
        """How long they are not made again, for what that costs.

        Args:
            figures: how many are looked at now, which share what may be spent.
        """
        return self.at + max(LEAST_S, self.cost_s * figures / SHARE) - time.monotonic()


def make(live: Live, kind: str) -> Made:
    """Make figures."""

    def encoded() -> bytes:
        body: dict[str, Any] = {"figures": {}, "at": time.time(), "version": live.version}
        try:
            body["figures"] = KINDS[kind](LiveReport(live))
        except ModuleNotFoundError as missing:
            body["error"] = f"these figures need {missing.name}: pip install 'dray[report]'"
        return html.script(body).encode()

    return made_of(live, encoded)


def made_of(live: Live, body: Callable[[], bytes]) -> Made:
    """What ``body`` returns, with what it has cost this thread."""
    began, version = time.thread_time(), live.version
    return Made(body(), version, time.thread_time() - began, time.monotonic())
