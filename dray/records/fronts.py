"""How trials stand that are compared by several metrics: each by the validation that stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from searchers.objectives import Losses, Objectives, is_better
from searchers.pareto import ParetoOrder, ordered
from searchers.views import NEVER_BEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The validation that stands for a trial: that with the least violation of the constraints, then with the best
    first objective, then the earliest.

    Attributes:
        batches: trained until then.
        metrics: by name, as measured.
        losses: as the search compares them.
    """

    batches: int
    metrics: Mapping[str, float]
    losses: Losses


def standings(metrics: pd.DataFrame, objectives: Objectives) -> dict[int, Standing]:
    """By trial; without trials that never had all metrics, all finite.

    Args:
        metrics: ``Result.metrics``.
        objectives: of the search.
    """
    names = list(dict.fromkeys(objectives.names))
    rows = metrics[(metrics["kind"] == "validation") & metrics["name"].isin(names)]
    once = rows.drop_duplicates(keys := ["trial_id", "batches", "name"], keep="last")
    table = once.set_index(keys)["value"].unstack("name").sort_index()
    found: dict[int, Standing] = {}
    for (trial, batches), values in zip(table.index, table.reindex(columns=names).to_numpy(), strict=True):
        measured = dict(zip(names, map(float, values), strict=True))
        losses = objectives.normalised(objectives.measured(measured))
        if losses is not None and (trial not in found or is_better(losses, found[trial].losses)):
            found[int(trial)] = Standing(batches=int(batches), metrics=measured, losses=losses)
    return found


def order_of(standing: Mapping[int, Standing], states: Mapping[int, str]) -> ParetoOrder:
    """The trials in order; without those that failed.

    Args:
        standing: as from `standings`.
        states: of the trials.
    """
    return ordered({trial: each.losses for trial, each in standing.items() if states[trial] not in NEVER_BEST})
