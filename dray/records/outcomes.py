"""Outcomes of an experiment's trials: their ranking, and how many failed or diverged, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from dray.text import counted
from dray.training.metrics.checks import is_loss
from searchers.views import NEVER_BEST

FAILED = "ERRORED"
_SHOWN = 8


def ranked(trials: pd.DataFrame, sign: int) -> pd.DataFrame:
    """The trials that have validated, best first: those that failed after all others, and none with invalid
    hyperparameters. With several metrics by violation of the constraints, by front, and by the first objective.

    Args:
        trials: ``Result.trials``.
        sign: 1 if smaller is better, else -1.
    """
    validated = trials[(trials["state"] != "INVALID_HP") & trials["best_metric"].notna()]
    keys = [sign * validated["best_metric"], validated["state"] == FAILED]  # the last key counts most
    if "front" in validated:
        keys[1:1] = [validated["front"].astype("float64"), validated["violation"]]
    return validated.iloc[np.lexsort(keys)]


def sound(trials: pd.DataFrame) -> pd.DataFrame:
    """Those that can be the best: without those that failed, have invalid hyperparameters, or exceed a limit."""
    can = ~trials["state"].isin(NEVER_BEST)
    return trials[can & ~(trials["violation"] > 0) if "violation" in trials else can]


def varying_hparams(trials: pd.DataFrame) -> list[str]:
    """The columns of hyperparameters that differ between these trials."""
    drawn = [str(column) for column in trials.columns if str(column).startswith("hparams.")]
    # Compared as text: a hyperparameter can be a list, which has no hash.
    return [column for column in drawn if trials[column].map(str).nunique() > 1]


def failure_summary(states: Iterable[object]) -> str:
    """ "2 of 3 trials failed"; "" if none did."""
    every = list(states)
    failed = sum(state == FAILED for state in every)
    return f"{failed} of {counted(len(every), 'trial')} failed" if failed else ""


def no_best_reason(ranked: pd.DataFrame, metric: str) -> str:
    """Why there is no best trial although some have validated; "" if there is one, or none has validated.

    Args:
        ranked: the trials, as from `ranked`.
        metric: the searcher's.
    """
    if ranked.empty or not sound(ranked).empty:
        return ""
    first = ranked.iloc[0]
    if first["state"] != FAILED:
        return (
            "no best trial, because none that validated keeps every constraint; the closest is trial "
            f"{first['trial_id']} ({metric} {first['best_metric']:.4g})"
        )
    return (
        "no best trial, because every trial that validated failed; the best of these is trial "
        f"{first['trial_id']} ({metric} {first['best_metric']:.4g})"
    )


def nan_since(metrics: pd.DataFrame, metric: str) -> pd.Series[int]:
    """Of each trial that has diverged: the batches at which a loss was first reported as NaN or infinite, and never as
    finite since. By trial_id.

    Args:
        metrics: ``Result.metrics``.
        metric: the searcher's.
    """
    bad = metrics[~np.isfinite(metrics["value"])]
    bad = bad[np.array([is_loss(*each, metric) for each in zip(bad["kind"], bad["name"], strict=True)], bool)]
    of_one = ["trial_id", "kind", "name"]
    finite = metrics[metrics["trial_id"].isin(bad["trial_id"].unique()) & np.isfinite(metrics["value"])]
    last = finite.groupby(of_one, as_index=False)["batches"].max().rename(columns={"batches": "last"})
    both = bad.merge(last, how="left", on=of_one)
    since: pd.Series[int] = both[both["batches"] > both["last"].fillna(-1)].groupby("trial_id")["batches"].min()
    return since


def nan_since_by_trial(trials: pd.DataFrame) -> dict[int, int]:
    """``nan_since`` of the trials that have diverged.

    Args:
        trials: ``Result.trials``.
    """
    those = trials[trials["nan_since"].notna()]
    return dict(zip(those["trial_id"].tolist(), those["nan_since"].tolist(), strict=True))


def divergence_summary(trials: pd.DataFrame) -> str:
    """ "2 trials diverged: NaN since batch 40 (trial 3), 100 (trial 7)"; "" if none did."""
    since = nan_since_by_trial(trials)
    some = ", ".join(f"{batches} (trial {trial})" for trial, batches in list(since.items())[:_SHOWN])
    more = f" and {len(since) - _SHOWN} more" if len(since) > _SHOWN else ""
    return f"{counted(len(since), 'trial')} diverged: NaN since batch {some}{more}" if since else ""


def nan_since_text(since: Any) -> str:
    """ "NaN since batch 40" for a trial's ``nan_since``; "" if it has not diverged."""
    return "" if pd.isna(since) else f"NaN since batch {since}"
