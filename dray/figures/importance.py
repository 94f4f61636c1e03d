"""Importance of hyperparameters, from a random forest that predicts a trial's rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

LEAST_TRIALS = 10
MAX_TRIALS = 1_000
TREES, REPEATS = 100, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importances of hyperparameters.

    Attributes:
        shares: by hyperparameter, largest first; they add up to 1.
        explained: R² on trials that a tree has not seen; around 0 or less, the forest explains nothing.
        trials: number of trials that the forest was trained on.
    """

    shares: dict[str, float]
    explained: float
    trials: int


def importance(hparams: pd.DataFrame, scores: pd.Series[float]) -> Importance | None:
    """Permutation importance (Breiman 2001): the loss in the forest's accuracy when one column is shuffled.

    The forest predicts ranks, so the size of bad values does not matter.

    Args:
        hparams: a row per trial, and a column for each varying hyperparameter.
        scores: of the same trials at the same length of training; smaller is better, and NaN and infinity are worst.

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
    """A column for a tree's splits: numbers unchanged, other values by order of their names, missing ones lowest."""
    numbers = pd.to_numeric(column.map(lambda value: None if isinstance(value, bool) else value), errors="coerce")
    if numbers.notna().sum() < column.notna().sum():
        names = column.map(lambda value: None if value is None else str(value))
        numbers = pd.Series(pd.Categorical(names).codes, dtype=float).replace(-1.0, np.nan)
    return numbers.astype(float).fillna(numbers.min() - 1 if numbers.notna().any() else 0.0).to_numpy()
