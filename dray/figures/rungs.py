"""How well each rung of a search ranks trials."""

from __future__ import annotations

from dray.figures.data import FigureData
from dray.records.journal import read_journal
from dray.records.rungs import rung_estimates

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
