"""Statistics of the recorded development tables; nothing is printed about the held-out ones.

best, median    final losses of configurations, means of their trainings
diverged        share of trainings whose final loss is not finite
after 1, 3, 9   rank correlation of the losses after so many epochs with the final ones, same training
two trainings   rank correlation of the final losses of two trainings of one configuration, of all and of the best
                fifth: what noise leaves to be found
nearest, forest share of the variance of the final losses' logarithms that is explained for configurations that are
                left out (five folds): by the nearest one, and by the forest of recorded_problems.py

python bench/curves/describe.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _measure import Paper
from recorded_problems import TUNE_ON, Array, Recording, recording

FOLDS = 5


def rank_correlation(one: Array, other: Array) -> float:
    """The rank correlation of losses; diverged ones share the last rank."""
    return float(spearmanr(*(np.nan_to_num(each, nan=np.inf) for each in (one, other))).statistic)


def explained(recorded: Recording) -> tuple[float, float]:
    """The shares that the nearest configuration and the forest explain."""
    count = len(recorded.configs)
    order = np.random.default_rng(0).permutation(count)
    true, nearest, forest = np.zeros(count), np.zeros(count), np.zeros(count)
    logs = recorded.means[:, -1]
    for fold in range(FOLDS):
        train = np.sort(np.delete(order, np.s_[fold::FOLDS]))
        part = Recording(recorded.task, recorded.space, [recorded.configs[n] for n in train], recorded.losses[train])
        for n in order[fold::FOLDS]:
            config = recorded.configs[n]
            true[n], nearest[n] = logs[n], logs[train[part.nearest(config)]]
            forest[n] = part.expected(config)[-1]
    return tuple(1 - ((guess - true) ** 2).mean() / true.var() for guess in (nearest, forest))  # type: ignore[return-value]


def main() -> None:
    """Print the table."""
    rows = []
    for task in TUNE_ON:
        recorded = recording(task)
        losses = recorded.losses
        final = losses[:, :, -1]
        best = np.argsort(np.nan_to_num(final.mean(axis=1), nan=np.inf))[: len(final) // 5]
        early = (rank_correlation(losses[:, 0, epochs - 1], final[:, 0]) for epochs in (1, 3, 9))
        rows.append(
            [
                task,
                str(final.shape[1]),
                f"{np.exp(recorded.best):.3f}",
                f"{np.exp(recorded.median):.3f}",
                f"{1 - np.isfinite(final).mean():.1%}",
                " / ".join(f"{each:.2f}" for each in early),
                f"{rank_correlation(final[:, 0], final[:, 1]):.2f}",
                f"{rank_correlation(final[best, 0], final[best, 1]):.2f}",
                *(f"{share:.2f}" for share in explained(recorded)),
            ]
        )
    head = ["task", "trainings", "best", "median", "diverged", "after 1 / 3 / 9", "two trainings", "of the best"]
    Paper().table([*head, "nearest", "forest"], rows)


if __name__ == "__main__":
    main()
