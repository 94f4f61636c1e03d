"""The report's figures of a running experiment, remade as often as their cost allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dray.records.reader import ExperimentReader
from dray.report import figures, front, html, slot_time
from dray.report.data import ReportData
from dray.report.figures import Figure

CPU_SHARE = 0.0005  # average share of a core spent on remaking the figures of a kind while they are viewed
CURVES_SHARE = 0.003  # the same for curves
LEAST_S = 2.0


MAX_INCLUDED = 100  # most trials that a request may ask for
QUICK = ("history", "front", "parallel", "slices")
"""Kinds that one thread makes, of the same data, whose collection takes longer than they do."""
KINDS = (*QUICK, "importance", "slots")


def _made(report: ReportData, kind: str) -> dict[str, Figure]:
    """The figures of a kind, by name, with a note about trials that they omit."""
    objectives, found = report.config.searcher.objectives, dict[str, Figure]()
    match kind:
        case "importance":
            figure, note = figures.importances(report)
            return {"importance": {**(figure or {}), "note": note}}
        case "slots" if not report.timeline.empty:
            phases = [each._asdict() for each in slot_time.phase_shares(report)]
            by_group = slot_time.stretches(report)
            slots = {"shares": {**slot_time.shares(report), "phases": phases}}
            return slots if by_group is None else {**slots, "groups": by_group}
        case _ if report.ranked.empty:
            return {}
        case "history":
            found = {"history": figures.history(report)}
        case "front" if objectives is not None and len(objectives.objectives) > 1:
            found = {"front": front.scatter(report, objectives)}
        case "parallel" if report.varying:
            found = {"parallel": figures.parallel(report)}
        case "slices":
            found = {f"slice {name}": figure for name, figure in figures.slices(report).items()}
    note = report.left_out(len(report.shown) - len(report.included))
    note += " The selected ones are shown, too." if report.included else ""
    return {name: {**figure, "note": note} for name, figure in found.items()}


@dataclass(frozen=True, slots=True)
class CachedFigures:
    """Figures of one kind, or curves."""

    # JSON: ``figures`` by name, ``included`` (trials that are shown only because they were asked for), ``at`` (Unix
    # time in s), and ``version`` of the experiment. Or curves, see `dray.serve.curves.curves`.
    body: bytes
    version: int  # the reader's version they were made from
    cost_s: float  # CPU time
    at: float  # time of their making, by the monotonic clock
    share: float  # of a core, on average

    @property
    def wait_s(self) -> float:
        """Seconds until their cost allows to remake them."""
        return max(0.0, self.at + max(LEAST_S, self.cost_s / self.share) - time.monotonic())


def figures_of(reader: ExperimentReader, kind: str, include: Collection[int] = ()) -> bytes:
    """Figures of a kind, for `cached`; with these trials even if others of their rank are left out."""
    version, key = reader.version, (reader.version, *include)
    report = reader.derived.get("report", {}).get(key) if kind in QUICK else None
    if report is None:
        report = ReportData(reader, include)
        if kind in QUICK:
            reader.derived["report"] = {key: report}
    found = {"figures": _made(report, kind), "included": report.included, "at": time.time(), "version": version}
    return html.script(found).encode()


def cached(reader: ExperimentReader, make: Callable[[], bytes], share: float) -> CachedFigures:
    """The result of ``make``, with its cost in this thread; the share of a core that remaking it may take."""
    began, version = time.thread_time(), reader.version
    return CachedFigures(make(), version, time.thread_time() - began, time.monotonic(), share)
