"""Importance of hyperparameters, by a random forest that predicts a trial's rank from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

LEAST_TRIALS = 10
MAX_TRIALS = 2_000
TREES, REPEATS = 100, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importances.

    Attributes:
        shares: of each hyperparameter, largest first; 1 in all.
        explained: R² on trials that a tree has not seen; at about 0 or less the forest explains nothing.
        trials: number of trials that it was trained on.
    """

    shares: dict[str, float]
    explained: float
    trials: int


def importance(hparams: pd.DataFrame, scores: pd.Series[float]) -> Importance | None:
    """Permutation importance (Breiman 2001): how much worse the forest predicts when one column is shuffled.

    It predicts ranks, so that it does not matter how far bad trials diverged.

    Args:
        hparams: a row per trial, a column for each hyperparameter that varies.
        scores: of the same trials, all at the same length of training; smaller is better, not finite is the worst.

    Returns:
        None if there are fewer than ten trials, or nothing varies.
    """
    if len(scores) < LEAST_TRIALS or hparams.shape[1] == 0:
        return None
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    chosen = np.linspace(0, len(scores) - 1, min(len(scores), MAX_TRIALS)).astype(int)
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
    """As a tree's splits need them: numbers as they are, other values by the order of their names, missing lowest."""
    numbers = pd.to_numeric(column.map(lambda value: None if isinstance(value, bool) else value), errors="coerce")
    if numbers.notna().sum() < column.notna().sum():
        names = column.map(lambda value: None if value is None else str(value))
        numbers = pd.Series(pd.Categorical(names).codes, dtype=float).replace(-1.0, np.nan)
    return numbers.astype(float).fillna(numbers.min() - 1 if numbers.notna().any() else 0.0).to_numpy()
