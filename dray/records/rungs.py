"""Estimates of how well each rung of a search predicts the next, from the reports in its journal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.config.search import build_method
from dray.config.searcher import AdaptiveASHASearcher, ASHASearcher, AutoSearcher
from dray.text import counted
from dray.training.units import amount
from searchers.auto import DIVISOR
from searchers.events import Reported
from searchers.objectives import loss_of
from searchers.records import event_from_json, repeats_in
from searchers.rung_correlation import RungCorrelation, less_strict

_LEAST = 3
"""The fewest trials at both rungs for an estimate."""


@dataclass(frozen=True, kw_only=True)
class RungEstimate:
    """A rung, and how well it ranks.

    Attributes:
        length: its length, in the searcher's unit.
        trials: number of trials that reached it.
        compared: number of those that also reached the next rung.
        correlation: estimated rank correlation of the trials' values at this rung and at the next; None while too few
            trials are compared.
        continues: share of trials that continue: one in divisor, or more if uninformative rungs are skipped.
    """

    length: int
    trials: int
    compared: int
    correlation: float | None
    continues: float

    def sentence(self, unit: str) -> str:
        known = "not known" if self.correlation is None else f"{self.correlation:.2f}"
        return (
            f"{amount(str(self.length), unit)}: rank correlation with the next rung {known} "
            f"({self.compared} of {counted(self.trials, 'trial')}), {self.continues:.0%} continue"
        )


def rung_estimates(config: ExperimentConfig, records: Iterable[Mapping[str, Any]]) -> list[RungEstimate]:
    """The estimate for each rung but the last of an ASHA search on one metric; [] for other searches."""
    searcher = config.searcher
    if searcher.metrics is not None:
        return []
    match searcher:
        case ASHASearcher() | AdaptiveASHASearcher():
            divisor, skips = searcher.divisor, searcher.skip_uninformative_rungs
        case AutoSearcher():
            divisor, skips = DIVISOR, True
        case _:
            return []
    lengths = list(dict.fromkeys(int(length) for length in build_method(config).rungs))
    rungs: list[dict[int, float]] = [{} for _ in lengths]  # values by trial
    correlations = [RungCorrelation() for _ in lengths]  # of each rung with the next
    reached: dict[int, int] = {}
    repeats: set[int] = set()  # the search does not rank them
    for record in records:
        repeats.update(repeats_in(record))
        if record.get("event") == "reported" and record["trial"] not in repeats:
            report = event_from_json(record)
            assert isinstance(report, Reported)
            value = loss_of(report.value, smaller_is_better=searcher.sign > 0)
            number = max(reached.get(report.trial, 0), bisect_right(lengths, report.step) - 1)
            while number < len(lengths) and report.step >= lengths[number]:
                if number and report.trial in (before := rungs[number - 1]):
                    correlations[number - 1].add(before[report.trial], value, before.values())
                rungs[number][report.trial] = value
                number += 1
            reached[report.trial] = number
    return [
        RungEstimate(
            length=length,
            trials=len(rung),
            compared=found.compared,
            correlation=None if found.compared < _LEAST else round(found.estimate, 3),
            continues=1 / (less_strict(divisor, found.estimate) if skips else divisor),
        )
        for length, rung, found in list(zip(lengths, rungs, correlations, strict=True))[:-1]
    ]
