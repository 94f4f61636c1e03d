"""What `searcher.like` gains: the regret of searches with first points from earlier ones less that without, paired.

A task's earlier searches are those of `auto`, with 64 trials each, on the other recorded tasks (recorded_problems.py).
Half of these have another space, with three hyperparameters in common. `--change` makes them differ more: other ranges,
a metric of another scale and direction, another length. `--unrelated` takes searches that say nothing about the task
instead: random configurations of its space, with the results of others (shuffled), with the results of the task turned
around (negated), or with those of a synthetic function.

    python bench/like.py [--counts 1 3 10] [--seeds 4] [--change range] [--unrelated shuffled] [--kept]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
from _measure import Paper, command, machine
from recorded_problems import KEPT, TUNE_ON, RecordedProblem, recording
from search_page import at, means
from search_quality import RUNGS, TABLES, Case, search
from search_ways import WAYS, Way

from searchers import Event, Exited, Reported, Search
from searchers.auto import Auto
from searchers.like import Earlier, first_points
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.samplers import FirstPoints
from searchers.simulate import Curve, simulate
from searchers.unit_cube import UnitCube

MARKS = (1, 5, 20, 50)
"""Full trainings."""
TRIALS = 64
CHANGES = ("range", "metric", "length", "missing")
UNRELATED = ("shuffled", "negated", "synthetic")


@dataclass(frozen=True, slots=True)
class Like:
    """What a search begins from.

    Args:
        count: of earlier searches; with 0, nothing.
        change: how they differ besides their task, one of `CHANGES`, or "".
        unrelated: one of `UNRELATED`, or "".
    """

    count: int = 0
    change: str = ""
    unrelated: str = ""


@cache
def earlier_search(task: str, seed: int, change: str) -> Earlier:
    """A search by `auto` on a recorded task."""
    problem = RecordedProblem(recording(task), seed, num_rungs=4 if change == "length" else 3)
    method = Auto(max_trials=TRIALS, max_length=problem.rungs[-1], max_concurrent_trials=TABLES.workers)
    sampler = MultiFidelitySampler(problem.space, seed=seed, rungs=method.rungs)
    whole = Search(method, problem.space, seed=seed, smaller_is_better=True, log=lambda record: None, sampler=sampler)
    events: list[Reported | Exited] = []

    def watch(now: float, event: Event, actions: object) -> None:
        if isinstance(event, Reported | Exited):
            events.append(event)

    simulate(
        whole,
        TABLES.workers,
        lambda config: Curve(problem.curve(config), problem.cost(config)),
        reports=method.rungs,
        seed=seed,
        watch=watch,
    )
    hparams = {number: dict(trial.hparams or {}) for number, trial in whole.trials.items()}
    return changed(Earlier(rungs=method.rungs, hparams=hparams, events=events), change)


def changed(earlier: Earlier, change: str) -> Earlier:
    """The search, as if its config had been different."""
    match change:
        case "metric":  # a score of thousands, of which the largest was wanted; normalised, it is the score's negative
            events = [
                Reported(trial=each.trial, step=each.step, value=1000 * math.tanh(each.value or 0.0))
                if isinstance(each, Reported)
                else each
                for each in earlier.events
            ]
            return Earlier(rungs=earlier.rungs, hparams=earlier.hparams, events=events)
        case "missing":  # two hyperparameters had no names yet
            lost = ("lr", "weight_decay")
            hparams = {
                trial: {name: value for name, value in each.items() if name not in lost}
                for trial, each in earlier.hparams.items()
            }
            return Earlier(rungs=earlier.rungs, hparams=hparams, events=earlier.events)
        case "range":  # only what was tried below the middle of the learning rates is left: its range ended there
            middle = float(np.median([float(each["lr"]) for each in earlier.hparams.values()]))  # type: ignore[arg-type]
            hparams = {trial: each for trial, each in earlier.hparams.items() if float(each["lr"]) <= middle}  # type: ignore[arg-type]
            return Earlier(rungs=earlier.rungs, hparams=hparams, events=earlier.events)
    return earlier


def unrelated_search(problem: RecordedProblem, seed: int, kind: str) -> Earlier:
    """A search at random in the task's space, whose results say nothing about the task, or the opposite."""
    rng = Random(f"{seed}:{kind}")
    configs = [problem.space.sample(rng) for _ in range(TRIALS)]
    top = problem.rungs[-1]
    match kind:
        case "shuffled":
            losses = [float(problem.recorded.expected(each).min()) for each in configs]
            rng.shuffle(losses)
        case "negated":
            losses = [-float(problem.recorded.expected(each).min()) for each in configs]
        case _:
            center = problem.space.sample(rng)
            cube = UnitCube(problem.space)
            losses = [float(((cube.row(each) - cube.row(center)) ** 2).sum()) for each in configs]
    events: list[Reported | Exited] = []
    for trial, loss in enumerate(losses):
        events += [Reported(trial=trial, step=top, value=loss), Exited(trial=trial, reason="completed")]
    return Earlier(rungs=(top,), hparams=dict(enumerate(configs)), events=events)


def earlier_searches(problem: RecordedProblem, task: str, like: Like) -> list[Earlier]:
    """Those of other tasks, each task about as often, or unrelated ones."""
    if like.unrelated:
        return [unrelated_search(problem, 1000 * problem.seed + each, like.unrelated) for each in range(like.count)]
    others = [each for each in TUNE_ON if each != task]
    Random(f"{task}:{problem.seed}").shuffle(others)
    return [
        earlier_search(others[each % len(others)], 100 + problem.seed % 4 + 4 * (each // len(others)), like.change)
        for each in range(like.count)
    ]


def way(like: Like, task: str) -> Way:
    """`auto`, with what it begins from."""

    def make(problem: Any, workers: int) -> tuple[Any, Any]:
        method, sampler = WAYS["auto"].make(problem, workers)
        points = first_points(problem.space, earlier_searches(problem, task, like), seed=problem.seed)
        return method, FirstPoints(problem.space, points, sampler)

    return Way("auto", make)


def regrets(unit: tuple[Case, Like]) -> list[float]:
    """The regrets of a search at `MARKS`. In a process of its own."""
    case, like = unit
    WAYS["like"] = way(like, case.task)
    trace = search("like", case).lowest
    return [at(trace, mark) for mark in MARKS]


def milliseconds(count: int) -> float:
    """What the points of a new experiment take to compute, with this many earlier ones."""
    problem = RecordedProblem(recording(TUNE_ON[0]), 0)
    earlier = earlier_searches(problem, TUNE_ON[0], Like(count))
    began = time.perf_counter()
    first_points(problem.space, earlier, seed=0)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 3, 10])
    parser.add_argument("--seeds", type=int, default=4, help="per task and regime")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--regimes", nargs="+", choices=RUNGS, default=["three"])
    parser.add_argument("--change", choices=CHANGES, default="")
    parser.add_argument("--unrelated", choices=UNRELATED, default="")
    parser.add_argument("--kept", action="store_true", help="search on the kept tasks, once, with a finished method")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    cases = [
        Case("kept" if options.kept else "recorded", regime, task, seed)
        for regime in options.regimes
        for task in (KEPT if options.kept else TUNE_ON)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    likes = [Like(), *(Like(count, options.change, options.unrelated) for count in options.counts)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        found = np.array(pool.map(regrets, [(case, like) for like in likes for case in cases], chunksize=1))
    found = found.reshape(len(likes), len(cases), len(MARKS))
    paper = Paper()
    paper.say(f"`{command()}`\n\n{machine()}\n")
    rows = [["none", *(f"{each:.3f}" for each in found[0].mean(axis=0)), ""]]
    for like, mine in zip(likes[1:], found[1:], strict=True):
        difference, low, high = intervals(mine - found[0])
        cells = [
            f"{mean:.3f} ({change:+.3f}, {least:+.3f} .. {most:+.3f})"
            for mean, change, least, most in zip(mine.mean(axis=0), difference, low, high, strict=True)
        ]
        rows.append([str(like.count), *cells, f"{milliseconds(like.count):.0f}"])
    paper.table(["earlier searches", *(f"after {mark}" for mark in MARKS), "ms a creation"], rows)


def intervals(values: Any) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Means, and the ends of their intervals."""
    middle, low, high = means(values).tolist()
    return middle, low, high


if __name__ == "__main__":
    main()
