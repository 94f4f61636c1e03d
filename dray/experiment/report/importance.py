"""Which hyperparameters mattered: by a random forest that predicts a trial's rank from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

LEAST_TRIALS = 10
MOST_TRIALS = 2_000
TREES, REPEATS = 100, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Args:
    shares: of each hyperparameter, of 1 in all, largest first.
    explained: of the variance of the ranks of trials that a tree has not seen (R²); about 0 or less: nothing.
    trials: that it was learned from.
    """

    shares: dict[str, float]
    explained: float
    trials: int


def importance(hparams: pd.DataFrame, scores: pd.Series[float]) -> Importance | None:
    """By how much worse the forest predicts when one column is shuffled (permutation importance, Breiman 2001).

    Ranks, so that it does not matter how badly the bad ones diverged.

    Args:
        hparams: a row a trial, a column for each that varies.
        scores: of the same rows, all at the same length of training; smaller is better, what is not finite is worst.

    Returns:
        None if there are fewer than ten trials, or nothing varies.
    """
    if len(scores) < LEAST_TRIALS or hparams.shape[1] == 0:
        return None
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    chosen = np.linspace(0, len(scores) - 1, min(len(scores), MOST_TRIALS)).astype(int)
    table = np.column_stack([_as_numbers(hparams[name].iloc[chosen]) for name in hparams.columns])
    ranks = scores.iloc[chosen].replace([np.inf, -np.inf], np.nan).rank(pct=True, na_option="bottom").to_numpy()
    forest = RandomForestRegressor(TREES, oob_score=True, random_state=0).fit(table, ranks)
    shuffled = permutation_importance(forest, table, ranks, n_repeats=REPEATS, random_state=0)
    gains = np.maximum(shuffled.importances_mean, 0.0)
    shares = gains / gains.sum() if gains.sum() > 0 else gains
    order = np.argsort(-shares, kind="stable")
    return Importance(
        shares={str(hparams.columns[i]): float(shares[i]) for i in order},
        explained=float(forest.oob_score_),
        trials=len(chosen),
    )


def _as_numbers(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """For a tree, that cuts an axis in two: numbers as they are, others by their names, what is not there below all."""
    numbers = pd.to_numeric(column.map(lambda value: None if isinstance(value, bool) else value), errors="coerce")
    if numbers.notna().sum() < column.notna().sum():
        names = column.map(lambda value: None if value is None else str(value))
        numbers = pd.Series(pd.Categorical(names).codes, dtype=float).replace(-1.0, np.nan)
    return numbers.astype(float).fillna(numbers.min() - 1 if numbers.notna().any() else 0.0).to_numpy()
