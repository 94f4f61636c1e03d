"""The figures of a running experiment, remade as often as their cost allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from dray.figures import front, plots, slot_time
from dray.figures.data import FigureData
from dray.figures.plots import Figure
from dray.records.journal import read_journal
from dray.records.reader import ExperimentReader
from dray.records.rungs import rung_estimates
from dray.serve.answers import encoded
from dray.text import finite

CPU_SHARE = 0.0005  # average share of a core spent on remaking the figures of a kind while they are viewed
CURVES_SHARE = 0.003  # the same for curves
LEAST_S = 2.0


QUICK = ("history", "front", "parallel", "slices")
"""Kinds that one thread makes, of the same data, whose collection takes longer than they do."""
KINDS = (*QUICK, "importance", "rungs", "slots")


def _made(source: FigureData, kind: str) -> dict[str, Figure]:
    """The figures of a kind, by name, with a note about trials that they omit."""
    objectives, found = source.config.searcher.objectives, dict[str, Figure]()
    match kind:
        case "importance":
            figure, note = plots.importances(source)
            return {"importance": {**(figure or {}), "note": note}}
        case "rungs":
            return {"rungs": {"table": table}} if (table := rungs(source)) else {}
        case "slots":
            return slot_time.slot_time(source)
        case _ if source.ranked.empty:
            return {}
        case "history":
            found = {"history": plots.history(source)}
        case "front" if objectives is not None and len(objectives.objectives) > 1:
            found = {"front": front.front(source, objectives)}
        case "parallel" if source.varying:
            found = {"parallel": plots.parallel(source)}
        case "slices":
            found = {f"slice {name}": figure for name, figure in plots.slices(source).items()}
    note = source.left_out(len(source.shown) - len(source.included))
    note += " The selected ones are shown, too." if source.included else ""
    return {name: {**figure, "note": note} for name, figure in found.items()}


class Figures(TypedDict):
    figures: dict[str, dict[str, Any]]
    included: list[int]  # trials that are shown only because they were asked for
    at: float  # the time of their making
    version: int  # the version of the experiment they were made from


@dataclass(frozen=True, slots=True)
class CachedFigures:
    """Figures of one kind, or curves."""

    body: bytes  # JSON of `Figures`, or of `dray.serve.curves.Curves`
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
    source = reader.derived.get("figures", {}).get(key) if kind in QUICK else None
    if source is None:
        source = FigureData(reader, include)
        if kind in QUICK:
            reader.derived["figures"] = {key: source}
    found: Figures = {
        "figures": _made(source, kind),
        "included": source.included,
        "at": time.time(),
        "version": version,
    }
    return encoded(finite(found))


def cached(reader: ExperimentReader, make: Callable[[], bytes], share: float) -> CachedFigures:
    """The result of ``make``, with its cost in this thread; the share of a core that remaking it may take."""
    began, version = time.thread_time(), reader.version
    return CachedFigures(make(), version, time.thread_time() - began, time.monotonic(), share)


HEAD = ["rung", "trials", "reached the next", "rank correlation with the next", "continue"]


def rungs(source: FigureData) -> list[list[str]]:
    """A row of text for each rung but the last, after the headings; [] while no trial has reached two rungs."""
    found = rung_estimates(source.config, read_journal(source.directory.journal)[: source.records])
    if not any(each.compared for each in found):
        return []
    return [HEAD] + [
        [
            source.length(each.length),
            f"{each.trials:,}",
            f"{each.compared:,}",
            "" if each.correlation is None else f"{each.correlation:.2f}",
            f"{each.continues:.0%}",
        ]
        for each in found
    ]
