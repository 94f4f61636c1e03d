"""Failures of searches on spaces of which half does not fit in memory, with and without the model of what fits.

A trial runs out of memory, before its first report, if its size exceeds the median size of its space. There are four
problems. In three a larger size is always better, so that a search is drawn to the limit: "product" has the product of
layers, width and batch size, halved by activation checkpointing; "conditional" has two kinds of models, each with
hyperparameters of its own; in "categorical" the model is one of five names. "inside" is like "product", but the best
size is an eighth of the limit.

Without the model, a trial that does not fit ends as "errored", which all samplers count as one of the worst. Figures:
trials out of memory among the first 30, one after another, and the best loss once as many trials have trained in both
searches (30, and with gp 20). Searches are paired by seed. Intervals are 95% bootstrap intervals over the seeds.

    python bench/out_of_memory.py [--seeds 24] [--samplers tpe gp multi_fidelity] [--problems ...] [--save]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import Any

import numpy as np
import optuna
from _measure import Paper, machine

from searchers import Exited, Reported, Started, parse_space
from searchers.events import Reason
from searchers.named_sampler import named_sampler
from searchers.space import Space

FIRST, TRAINED, TRAINED_GP = 30, 30, 20
GP_SEEDS = 10  # a search by gp takes 10 to 70 s

LR = {"type": "log", "base": 10, "minval": -5, "maxval": -1}
PRODUCT = parse_space(
    {
        "layers": {"type": "int", "minval": 1, "maxval": 16},
        "hidden": {"type": "int", "minval": 64, "maxval": 2048},
        "batch": {"type": "categorical", "vals": [16, 32, 64, 128, 256]},
        "checkpointing": {"type": "categorical", "vals": [False, True]},
        "lr": LR,
        "regularization": {"type": "double", "minval": 0, "maxval": 0.5},
    }
)
CONDITIONAL = parse_space(
    {
        "model": {
            "type": "categorical",
            "vals": [
                {
                    "name": "cnn",
                    "channels": {"type": "log", "base": 2, "minval": 4, "maxval": 9},
                    "depth": {"type": "int", "minval": 2, "maxval": 20},
                },
                {
                    "name": "transformer",
                    "width": {"type": "int", "minval": 128, "maxval": 1536, "step": 64},
                    "layers": {"type": "int", "minval": 2, "maxval": 24},
                    "heads": {"type": "categorical", "vals": [4, 8, 16]},
                },
            ],
        },
        "batch": {"type": "categorical", "vals": [8, 16, 32, 64, 128, 256]},
        "lr": LR,
    }
)
CATEGORICAL = parse_space(
    {
        "model": {"type": "categorical", "vals": ["base", "huge", "large", "small", "tiny"]},
        "batch": {"type": "categorical", "vals": [8, 16, 32, 64, 128, 256]},
        "precision": {"type": "categorical", "vals": ["bf16", "fp32"]},
        "optimizer": {"type": "categorical", "vals": ["adam", "lamb", "sgd"]},
        "lr": LR,
        "regularization": {"type": "double", "minval": 0, "maxval": 0.5},
    }
)
MODELS = {"tiny": 0, "small": 1, "base": 2, "large": 3, "huge": 4.5}
Point = Mapping[str, Any]


def product_size(point: Point) -> float:
    """The logarithm to base 2 of a trial's memory."""
    return math.log2(point["layers"] * point["hidden"] * point["batch"]) - float(point["checkpointing"])


def conditional_size(point: Point) -> float:
    model = point["model"]
    if model["name"] == "cnn":
        return math.log2(model["channels"] * model["depth"] * point["batch"])
    return math.log2(model["width"] * model["layers"] * point["batch"] / 8)


def categorical_size(point: Point) -> float:
    state = 0.0 if point["optimizer"] == "sgd" else 0.6
    return MODELS[point["model"]] + math.log2(point["batch"]) + float(point["precision"] == "fp32") + state


@dataclass
class Problem:
    """A space, and the sizes and losses of its points."""

    space: Space
    size: Callable[[Point], float]
    best_size: float  # in powers of two above the limit

    def __post_init__(self) -> None:
        self.limit = median(self.size(self.space.sample(Random(number))) for number in range(4001))

    def loss(self, point: Point) -> float:
        """The loss of a trial that fits."""
        above = self.size(point) - self.limit
        from_size = -0.3 * above if self.best_size == math.inf else 0.1 * (above - self.best_size) ** 2
        from_decay = 0.3 * (2 * point.get("regularization", 0.2) - 0.4) ** 2
        return float(from_size + (math.log10(point["lr"]) + 3) ** 2 / 4 + from_decay)


PROBLEMS = {
    "product": Problem(PRODUCT, product_size, math.inf),
    "conditional": Problem(CONDITIONAL, conditional_size, math.inf),
    "categorical": Problem(CATEGORICAL, categorical_size, math.inf),
    "inside": Problem(PRODUCT, product_size, -3.0),
}


def search(sampler_name: str, problem_name: str, seed: int, reason: Reason) -> tuple[int, float]:
    """Run a search in which trials that do not fit end for this reason. Return their number among the first, and the
    best loss of those that trained."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    problem, wanted = PROBLEMS[problem_name], TRAINED_GP if sampler_name == "gp" else TRAINED
    sampler = named_sampler(sampler_name, problem.space, seed=seed, rungs=(1,))
    fits: list[bool] = []
    losses: list[float] = []
    while len(fits) < FIRST or len(losses) < wanted:
        trial = len(fits)
        point = sampler.ask(trial)
        sampler.tell(Started(trial=trial), point)
        fits.append(problem.size(point) <= problem.limit)
        if fits[-1]:
            losses.append(problem.loss(point))
            sampler.tell(Reported(trial=trial, step=1, value=losses[-1]), point)
        sampler.tell(Exited(trial=trial, reason="completed" if fits[-1] else reason), point)
    return fits[:FIRST].count(False), min(losses[:wanted])


def fewer(without: Sequence[int], with_model: Sequence[int]) -> str:
    """How many percent fewer failures there are, with the interval."""
    drawn = _drawn(len(without))
    shares = 1 - np.array(with_model)[drawn].sum(axis=1) / np.array(without)[drawn].sum(axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return f"{1 - sum(with_model) / sum(without):.0%} ({low:.0%} .. {high:.0%})"


def higher(without: Sequence[float], with_model: Sequence[float]) -> str:
    """How much higher the best loss is, with the interval."""
    differences = np.array(with_model) - np.array(without)
    low, high = np.quantile(differences[_drawn(len(without))].mean(axis=1), [0.025, 0.975])
    return f"{differences.mean():+.2f} ({low:+.2f} .. {high:+.2f})"


def _drawn(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(0, count, (10_000, count))


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=24, help=f"seeds (default 24), of which gp takes {GP_SEEDS}")
    parser.add_argument("--samplers", nargs="+", default=["tpe", "gp", "multi_fidelity"], help="which (default: all)")
    parser.add_argument("--problems", nargs="+", default=[*PROBLEMS], help="which (default: all)")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    paper = Paper()
    paper.say(f"{machine()}\nOptuna {optuna.__version__}.\n")
    rows = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for sampler in options.samplers:
            seeds = range(min(options.seeds, GP_SEEDS) if sampler == "gp" else options.seeds)
            for problem in options.problems:
                searches = [(sampler, problem, seed, reason) for reason in REASONS for seed in seeds]
                found = pool.starmap(search, searches, chunksize=1)
                without, with_model = found[: len(seeds)], found[len(seeds) :]
                failures = [[count for count, _ in each] for each in (without, with_model)]
                best = [[loss for _, loss in each] for each in (without, with_model)]
                counts = [f"{fmean(each):.1f}" for each in failures]
                losses = [f"{fmean(each):.2f}" for each in best]
                rows.append([sampler, problem, str(len(seeds)), *counts, fewer(*failures), *losses, higher(*best)])
                print(*rows[-1], sep=" | ", flush=True)
    heads = ["sampler", "problem", "seeds", "failures without", "with", "fewer", "best loss without", "with", "higher"]
    paper.table(heads, rows)
    if options.save:
        paper.save("out_of_memory", "Trials that run out of memory where half of the space does not fit")


REASONS: tuple[Reason, Reason] = ("errored", "out_of_memory")

if __name__ == "__main__":
    main()
