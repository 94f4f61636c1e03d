"""The report's figures of an experiment that runs, made again as often as their cost allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dray.records.reader import ExperimentReader
from dray.report import figures, front, html, slot_time
from dray.report.data import ReportData
from dray.report.figures import Figure

CPU_SHARE = 0.003
"""Of a core, that making figures again may cost on average, all together that are looked at."""
LEAST_S = 2.0


def _history(report: ReportData) -> dict[str, Figure]:
    return _noted(report, {"history": figures.history(report)})


def _front(report: ReportData) -> dict[str, Figure]:
    objectives = report.config.searcher.objectives
    if objectives is None or len(objectives.objectives) < 2:
        return {}
    return _noted(report, {"front": front.scatter(report, objectives)})


def _parallel(report: ReportData) -> dict[str, Figure]:
    return _noted(report, {"parallel": figures.parallel(report)}) if report.varying else {}


def _slices(report: ReportData) -> dict[str, Figure]:
    return _noted(report, {f"slice {name}": figure for name, figure in figures.slices(report).items()})


def _noted(report: ReportData, found: dict[str, Figure]) -> dict[str, Figure]:
    """With a note on the trials that they leave out."""
    note = report.left_out(len(report.shown))
    return {name: {**figure, "note": note} for name, figure in found.items()}


def _importance(report: ReportData) -> dict[str, Figure]:
    figure, note = figures.importances(report)
    return {"importance": {**(figure or {}), "note": note}}


def _slots(report: ReportData) -> dict[str, Figure]:
    table = report.timeline
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
class CachedFigures:
    """Figures of one kind, or curves.

    Attributes:
        body: as JSON: ``figures`` by name, ``at`` (Unix time in s), ``version`` of the experiment, and ``error`` if
            they can't be made. Or curves, see `dray.serve.trials.curves`.
        version: of the experiment then.
        cost_s: of the CPU's time.
        at: when, by the monotonic clock.
    """

    body: bytes
    version: int
    cost_s: float
    at: float

    def wait_s(self, figures: int) -> float:
        """How long they are not made again, for what that costs, if so many figures are looked at and share what may
        be spent."""
        return self.at + max(LEAST_S, self.cost_s * figures / CPU_SHARE) - time.monotonic()


def figures_of(reader: ExperimentReader, kind: str) -> bytes:
    """Figures of a kind, for `cached`."""
    version, found, error = reader.version, {}, {}
    try:
        report = ReportData(reader)
        if kind in ("importance", "slots") or not report.ranked.empty:
            found = KINDS[kind](report)
    except ModuleNotFoundError as missing:
        error = {"error": f"these figures need {missing.name}: pip install 'dray[report]'"}
    return html.script({"figures": found, "at": time.time(), "version": version, **error}).encode()


def cached(reader: ExperimentReader, make: Callable[[], bytes]) -> CachedFigures:
    """What ``make`` returns, with what it has cost this thread."""
    began, version = time.thread_time(), reader.version
    return CachedFigures(make(), version, time.thread_time() - began, time.monotonic())
