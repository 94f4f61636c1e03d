"""What beliefs about hyperparameters gain and cost: the regret with them less that without, paired.

A right belief is within a factor of 3 of the best learning rate, and has the other values of the best configuration. A
wrong one is the far corner of the space, with another optimizer. The problems are the synthetic ones of
search_quality.py, and its way `promotion+multi_fidelity` searches.

    python bench/beliefs.py [--seeds 20] [--first-seed 0] [--regimes base crossing]
"""

from __future__ import annotations

import argparse
from random import Random
from typing import Any

import numpy as np
from _measure import Paper, command, machine
from search_page import at, means
from search_problems import LR, OPTIMIZERS, Array, CurveProblem
from search_quality import Case, search
from search_ways import WAYS, Way

from searchers.multi_fidelity import MultiFidelitySampler

PLAIN = "promotion+multi_fidelity"
EARLY, END = 4, 32
"""Full trainings."""
WITHIN = {"lr": 3, "weight_decay": 3, "width": 64, "dropout": 0.1, "warmup": 0.05}


def right(problem: CurveProblem) -> Array:
    """The center of a right belief."""
    row = problem.optimum.copy()
    factor = 3 ** Random(problem.seed).uniform(-1, 1)
    row[0] = np.clip(row[0] + np.log(factor) / np.log(LR[1] / LR[0]), 0, 1)
    return row


def wrong(problem: CurveProblem) -> Array:
    """The center of a wrong belief."""
    row = problem.optimum
    return np.append(np.where(row[:5] < 0.5, 1.0, 0.0), (row[5] + 1) % len(OPTIMIZERS))


def way(center: Any) -> Way:
    """The search with a belief around this center of a problem."""

    def make(problem: Any, workers: int) -> tuple[Any, Any]:
        config = problem.config(center(problem))
        prior = {
            name: {"around": value} | ({"within": WITHIN[name]} if name in WITHIN else {})
            for name, value in config.items()
        }
        method, _ = WAYS[PLAIN].make(problem, workers)
        return method, MultiFidelitySampler(problem.space, seed=problem.seed, rungs=problem.rungs, prior=prior)

    return Way(f"with a {center.__name__} belief", make)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--regimes", nargs="+", default=["base", "crossing"])
    options = parser.parse_args()
    WAYS.update(right=way(right), wrong=way(wrong))
    paper, rows = Paper(), []
    paper.say(f"`{command()}`\n\n{machine()}\n")
    for regime in options.regimes:
        regrets: dict[str, list[list[float]]] = {name: [] for name in (PLAIN, "right", "wrong")}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for name, found in regrets.items():
                trace = search(name, Case("synthetic", regime, "", seed)).lowest
                found.append([at(trace, EARLY), at(trace, END)])
        plain = np.array(regrets.pop(PLAIN))
        for name, found in regrets.items():
            (early, end), *interval = means(np.array(found) - plain).tolist()
            low, high = interval
            rows.append(
                [
                    regime,
                    name,
                    f"{early:+.3f} ({low[0]:+.3f} .. {high[0]:+.3f})",
                    f"{end:+.3f} ({low[1]:+.3f} .. {high[1]:+.3f})",
                ]
            )
    paper.table(["regime", "belief", f"after {EARLY} full trainings", f"after {END}"], rows)


if __name__ == "__main__":
    main()
