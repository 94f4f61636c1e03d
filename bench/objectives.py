"""Results of searches with two objectives over time, on problems whose Pareto fronts are known in closed form.

A trial has a size, known at once, and a loss, which falls as it trains, from hyperparameters x0 .. x5 in [0, 1]:

    size = x0        loss = g h(x0 / g) at the end, g = 1 + 4 mean |xi - oi|, with the best oi drawn for each seed

h(s) is 1 - sqrt(s) (ZDT1, a convex front), 1 - s^2 (ZDT2, a concave one) or sqrt(1 - s^2) (a circle); "limit" is ZDT1
with the constraint size >= 0.3. Before the end, a loss is higher by up to 0.1 (sqrt(81 / step) - 1), times a factor
from 0.2 to 1 that depends on the trial, so that curves cross. Reports have noise of 0.01; figures are without it.

Figure: the share of the true front's hypervolume, up to size 1.1 and loss 2, that all reports so far leave out: 0 is
the whole front. Each search is simulated (`searchers.simulate`) on four workers, for as long as 12 full trainings take
them; rungs 1, 3, 9, 27, 81. Everything is paired: one seed is one problem. Intervals are 95% bootstrap intervals over
the seeds.

    python bench/objectives.py [--seeds 40] [--problems convex limit] [--ways ...] [--save]
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import optuna
from _measure import Paper, machine

from searchers import (
    ASHA,
    Event,
    Method,
    Metric,
    Objectives,
    PromotionASHA,
    RandomSearch,
    Reported,
    Search,
    parse_space,
)
from searchers.named_sampler import named_sampler
from searchers.simulate import Curve, simulate

FIRST_SEED, WIDTH, WORKERS, TRAININGS, MAX_LENGTH, ENDLESS = 300, 6, 4, 12, 81, 100_000
FAR = (1.1, 2.0)
SPACE = parse_space({f"x{i}": {"type": "double", "minval": 0, "maxval": 1} for i in range(WIDTH)})


@dataclass(frozen=True)
class Front:
    """A shape of the true front, the losses h(s) of the best trials of each size s, and its integral from 0 to s."""

    h: Callable[[float], float]
    integral: Callable[[float], float]
    least: float = 0.0

    @property
    def volume(self) -> float:
        """The area that the front dominates."""
        below = self.integral(1.0) - self.integral(self.least)
        return FAR[1] * (FAR[0] - self.least) - below

    @property
    def objectives(self) -> Objectives:
        limit = (Metric(name="size", at_least=self.least),) if self.least else ()
        return Objectives((Metric(name="loss"), Metric(name="size"), *limit))


CONVEX = (lambda s: 1 - math.sqrt(s), lambda s: s - s**1.5 / 1.5)
PROBLEMS = {
    "convex": Front(*CONVEX),
    "concave": Front(lambda s: 1 - s**2, lambda s: s - s**3 / 3),
    "circle": Front(
        lambda s: math.sqrt(max(1 - s**2, 0.0)), lambda s: (s * math.sqrt(max(1 - s**2, 0.0)) + math.asin(s)) / 2
    ),
    "limit": Front(*CONVEX, least=0.3),
}


def hypervolume(points: Sequence[tuple[float, float]]) -> float:
    """The area that these points dominate, up to `FAR`.

    >>> round(hypervolume([(0.1, 1.0), (0.6, 0.5)]), 3)
    1.25
    """
    volume, top = 0.0, FAR[1]
    for size, loss in sorted(points):
        if size < FAR[0] and loss < top:
            volume += (FAR[0] - size) * (top - loss)
            top = loss
    return volume


# ---------------------------------------------------------------------------------------------------------------- ways
def asha(kind: type[ASHA | PromotionASHA], pareto: bool) -> Method:
    return kind(
        max_trials=ENDLESS,
        max_length=MAX_LENGTH,
        num_rungs=5,
        divisor=3,
        max_concurrent_trials=WORKERS,
        pareto=pareto,
    )


@dataclass(frozen=True)
class Way:
    """How to search; with `weights`, for the weighted sum as a single metric instead of several metrics."""

    what: str
    method: Callable[[bool], Method]
    sampler: str = "random"
    weights: tuple[float, float] | None = None


def stopping(pareto: bool) -> Method:
    return asha(ASHA, pareto)


def promotion(pareto: bool) -> Method:
    return asha(PromotionASHA, pareto)


WAYS = {
    "full": Way(
        "random, full trainings",
        lambda pareto: RandomSearch(max_trials=ENDLESS, max_concurrent_trials=WORKERS, max_length=MAX_LENGTH),
    ),
    "stopping": Way("ASHA, stopping; random", stopping),
    "promotion": Way("ASHA, promotion; random", promotion),
    "stopping-tpe": Way("ASHA, stopping; TPE", stopping, "tpe"),
    "promotion-tpe": Way("ASHA, promotion; TPE", promotion, "tpe"),
    "stopping-nsga2": Way("ASHA, stopping; NSGA-II", stopping, "nsga2"),
    "promotion-nsga2": Way("ASHA, promotion; NSGA-II", promotion, "nsga2"),
    "stopping-multi_fidelity": Way("ASHA, stopping; multi_fidelity", stopping, "multi_fidelity"),
    "promotion-multi_fidelity": Way("ASHA, promotion; multi_fidelity", promotion, "multi_fidelity"),
    "loss-tpe": Way("ASHA, stopping; TPE; the loss alone", stopping, "tpe", (1.0, 0.0)),
    "sum-tpe": Way("ASHA, stopping; TPE; loss + size", stopping, "tpe", (1.0, 1.0)),
}
BASE = "stopping"


def search(way: Way, front: Front, seed: int) -> float:
    """The share of the hypervolume that the search leaves out."""
    best = [Random(f"{seed}:{i}").random() for i in range(WIDTH)]

    def final(hparams: Mapping[str, Any]) -> tuple[float, float]:
        off = fmean(abs(hparams[f"x{i}"] - best[i]) / max(best[i], 1 - best[i]) for i in range(1, WIDTH))
        g = 1 + 4 * off
        return g * front.h(hparams["x0"] / g), hparams["x0"]

    def measured(hparams: Mapping[str, Any], step: float) -> tuple[float, float]:
        loss, size = final(hparams)
        slow = 0.2 + 0.8 * zlib.crc32(repr(sorted(hparams.items())).encode()) / 2**32
        return loss + slow * 0.1 * (math.sqrt(MAX_LENGTH / step) - 1), size

    def noisy(hparams: Mapping[str, Any], step: float) -> Any:
        loss, size = measured(hparams, step)
        loss += Random(f"{seed}:{loss}").gauss(0, 0.01)
        if way.weights is not None:
            over = 10 * max(front.least - size, 0.0)  # a penalty in place of the constraint
            return way.weights[0] * loss + way.weights[1] * size + over
        return (loss, size, size) if front.least else (loss, size)

    found: list[tuple[float, float]] = []

    def watch(at: float, event: Event, actions: object) -> None:
        if isinstance(event, Reported):
            loss, size = measured(it.trials[event.trial].hparams or {}, event.step)
            if size >= front.least:
                found.append((size, loss))

    objectives = front.objectives if way.weights is None else None
    method = way.method(objectives is not None)
    it = Search(
        method,
        SPACE,
        seed=seed,
        smaller_is_better=True,
        log=lambda record: None,
        sampler=named_sampler(way.sampler, SPACE, seed=seed, rungs=method.rungs, objectives=objectives),
        objectives=objectives,
    )
    reports = tuple(3**r for r in range(5))
    simulate(
        it,
        WORKERS,
        lambda hparams: Curve(lambda step: noisy(hparams, step)),
        reports=reports,
        until=TRAININGS * MAX_LENGTH,
        watch=watch,
    )
    return 1 - hypervolume(found) / front.volume


# -------------------------------------------------------------------------------------------------------------- figures
def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% bootstrap interval of the mean."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def shown(values: Sequence[float], sign: str = "") -> str:
    """The mean, with its interval."""
    low, high = interval(values)
    return f"{fmean(values):{sign}.3f} ({low:{sign}.3f} .. {high:{sign}.3f})"


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="problems of each kind (default 40)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="first seed (default 300)")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="which (default: all)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways (default: all)")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    paper, began = Paper(), time.monotonic()
    paper.say(f"{machine()}\nOptuna {optuna.__version__}. Seeds {seeds[0]} to {seeds[-1]}.")
    for problem in options.problems:
        found: dict[str, list[float]] = {}
        for way in options.ways:
            found[way] = [search(WAYS[way], PROBLEMS[problem], seed) for seed in seeds]
            print(f"{problem}, {way}: {fmean(found[way]):.3f}, {time.monotonic() - began:.0f} s", flush=True)
        paper.say(f"\n## {problem}\n")
        rows = []
        for way, values in found.items():
            row = [way, WAYS[way].what, shown(values)]
            if BASE in found:
                apart = [one - other for one, other in zip(values, found[BASE], strict=True)]
                row.append("-" if way == BASE else shown(apart, "+"))
            rows.append(row)
        heads = ["way", "what", "left out", f"more than {BASE}"]
        paper.table(heads[: len(rows[0])], rows)
    if options.save:
        paper.save("objectives", "What a search with two objectives finds")


if __name__ == "__main__":
    main()
