"""Experiments, trials and curves as the tools show them: without what is not set, and metrics with six digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dray.agents.answers import figure
from dray.records.thinning import thinned


def brief(seen: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment as the list shows it."""
    fields = {
        "experiment": seen["number"],
        "name": seen["name"],
        "state": seen["state"],
        "trials": f"{seen['ended']} of {seen.get('total', seen['trials'])} ended, {seen['failed']} failed",
        "metric": seen["metric"],
        "best_metric": figure(seen["best_metric"]),
        "best_trial": seen["best_trial"],
        "best_by": seen.get("best_by"),
        "budget": seen.get("usage"),
        "why": seen.get("why") or seen.get("reason"),
        "tags": (seen["submitted"] or {}).get("tags") or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def trial_row(row: Mapping[str, Any], varying: Sequence[str]) -> dict[str, Any]:
    """A trial as results show it: the fields that are set, and the hyperparameters that differ between trials."""
    left_out = ("started", "ended", "hparams", "metric", *(() if row["restarts"] else ("restarts",)))
    fields = {key: figure(value) for key, value in row.items() if key not in left_out and value is not None}
    hparams = {key: value for key, value in row["hparams"].items() if key in varying} or row["hparams"]
    return {"trial": row["trial"], **fields, "hparams": hparams}


def over_seeds(finalist: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of a trial's repeats with other seeds, its interval, and whether it differs from the best."""
    keys = ("seeds", "mean", "low", "high", "difference", "difference_low", "difference_high", "distinguishable")
    return {key: figure(finalist[key]) for key in keys if finalist[key] is not None}


def curve(trial: int, series: Mapping[str, Any], most: int) -> dict[str, Any]:
    values = [value if isinstance(value, int | float) else None for value in series["values"]]
    kept = thinned(values, most)
    fields = {"trial": trial, "kind": series["kind"], "metric": series["name"]}
    fields |= {"points": series["of"], "points_left_out": series["of"] - len(kept)}
    points = {"batches": [series["batches"][i] for i in kept], "values": [figure(series["values"][i]) for i in kept]}
    return {**fields, **points}
