"""What a search gains from earlier ones, and loses by unrelated ones: ASHA with the multi-fidelity sampler, simulated.

Each task is searched cold, and started from searches of the other tasks of its space (leave one task out), of which
each ended after as many epochs. The problems:

  recorded    learning curves of small real tasks (recorded_problems.py), rungs 1, 3, 9, 27; those to develop on
  kept        the same on the tasks that are kept back: once, for a finished method; sources are the others of these
  synthetic   families of problems in closed form (search_problems.py), rungs 1, 3, 9, 27, 81: three related tasks have
              other optima (by .08 of each range, standard deviation), weights and ripples

The ways: `cold`; `related`, from all other tasks of the space; `unrelated`, from the same searches, but with the
results of each shuffled among its trials, so that there is nothing to be learned; `mixed`, from the related ones and
as many unrelated ones.

Figures, paired by task and seed, with intervals of 95 of 100 resamples of the pairs: the normalised regret of the
incumbent (the trial with the smallest last report) after shares of the trained epochs; and the share of its epochs in
which a warm start has reached the regret that the cold search ends with, by the mean curves of both (9: never).

    python bench/warm_start.py [--problems recorded] [--seeds 8] [--ways cold related unrelated] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from _measure import Paper, command, machine, verdict
from recorded_problems import FOUR_RUNGS, KEPT, TUNE_ON, RecordedProblem, recording
from search_problems import REGIMES, CurveProblem

from searchers import ASHA, Action, Event, Reported, Search
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.search import Record
from searchers.simulate import Curve, simulate
from searchers.warm_start import Source

Array = npt.NDArray[np.float64]

WORKERS, DIVISOR, TRAININGS = 4, 3, 24
"""Of every search; it ends after so many full trainings' epochs."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
JITTER = 0.1
FIRST_SEED, SOURCE_SEED = 200, 10_000
FAMILY = 4
"""Related synthetic tasks of one seed."""
GRID = 240
"""Epochs at which regrets are kept are so many, evenly spaced."""
HALF, MOST = 0.5, 1.05
"""Goals: the share of epochs for the same regret, and the last regret with unrelated sources over the cold search's."""
WAYS = ("cold", "related", "unrelated", "mixed")


class Related(CurveProblem):
    """One of several tasks that resemble each other.

    Args:
        seed: Of the family.
        task: From 0.
    """

    def __init__(self, seed: int, task: int) -> None:
        regime = REGIMES["base"]
        super().__init__(seed, crossing=regime.crossing, noise=regime.noise)
        rng = np.random.default_rng([seed, task, 31])
        self._optimum = np.clip(self._optimum + rng.normal(0, 0.08, self._optimum.shape), 0.05, 0.95)
        self._offset = self._offset + rng.normal(0, 0.03, 3)
        self._weight = self._weight * np.exp(rng.normal(0, 0.3, 5))
        self._phase = self._phase + rng.normal(0, 0.5, 8)
        self.median = float(np.median(self._final(self._drawn(rng))))
        self.best = self._refine(rng)

    @staticmethod
    def _drawn(rng: np.random.Generator) -> Array:
        rows = rng.random((30_000, 6))
        rows[:, 5] = rng.integers(0, 3, len(rows))
        return rows


Problem = RecordedProblem | Related


@dataclass(frozen=True, slots=True)
class Case:
    """A task and a seed."""

    problems: str
    task: str
    seed: int

    def problem(self, seed: int | None = None) -> Problem:
        """The task, for a search of another seed, or of this one."""
        if self.problems == "synthetic":
            return Related(self.seed, int(self.task))
        return RecordedProblem(recording(self.task), self.seed if seed is None else seed, rungs=FOUR_RUNGS)

    def others(self) -> list[Case]:
        """The other tasks of the space."""
        if self.problems == "synthetic":
            return [replace(self, task=str(task)) for task in range(FAMILY) if str(task) != self.task]
        space = recording(self.task).space
        names = [name for name in tasks(self.problems) if name != self.task and recording(name).space == space]
        return [replace(self, task=name) for name in names]


def tasks(problems: str) -> list[str]:
    """The tasks that are searched. Of recorded ones those that have a table."""
    if problems == "synthetic":
        return ["0"]
    names = TUNE_ON if problems == "recorded" else KEPT
    return [name for name in names if (Path(__file__).parent / "curves" / f"{name}.parquet").exists()]


# --------------------------------------------------------------------------------------------------------- one search
class _Over(Exception):
    """All epochs are trained."""


def search(problem: Problem, seed: int, sources: Sequence[Source]) -> tuple[list[Record], list[float], float]:
    """Simulate a search.

    Returns:
        Its journal; the regret of its incumbent at each of `GRID` even shares of its epochs; its CPU seconds.
    """
    longest, records = problem.rungs[-1], list[Record]()
    budget = TRAININGS * longest
    whole = Search(
        ASHA(
            max_trials=100_000,
            max_length=longest,
            num_rungs=len(problem.rungs),
            divisor=DIVISOR,
            max_concurrent_trials=WORKERS,
        ),
        problem.space,
        seed=seed,
        smaller_is_better=True,
        log=records.append,
        sampler=MultiFidelitySampler(problem.space, seed=seed, rungs=problem.rungs, sources=sources),
    )
    steps: dict[int, float] = {}
    last: dict[int, float] = {}
    regrets: list[float] = []
    trained, regret = 0.0, 1.0

    def watch(now: float, event: Event, actions: list[Action]) -> None:
        nonlocal trained, regret
        if not isinstance(event, Reported) or event.value is None:
            return
        trained += event.step - steps.get(event.trial, 0)
        regrets.extend([regret] * (min(int(trained / budget * GRID), GRID) - len(regrets)))
        if len(regrets) == GRID:
            raise _Over
        steps[event.trial] = event.step
        last[event.trial] = event.value if math.isfinite(event.value) else math.inf
        regret = problem.regret(whole.trials[min(last, key=lambda trial: last[trial])].hparams or {})

    began = time.process_time()
    noise = problem.noise if isinstance(problem, CurveProblem) else 0.0
    with contextlib.suppress(_Over):
        simulate(
            whole,
            WORKERS,
            lambda config: Curve(problem.curve(config), problem.cost(config)),
            noise=noise,
            jitter=JITTER,
            seed=seed,
            watch=watch,
        )
    return records, regrets, time.process_time() - began


@cache
def learned(case: Case) -> Source:
    """What a cold search of a task has learned."""
    seed = SOURCE_SEED + case.seed
    problem = case.problem(seed)
    records, _, _ = search(problem, seed, ())
    return Source.of_records(records, rungs=problem.rungs, name=case.task)


def shuffled(source: Source, seed: int) -> Source:
    """The source with its results shuffled among its trials."""
    values = [trial.values for trial in source.trials]
    Random(f"{seed}:{source.name}").shuffle(values)
    trials = tuple(replace(trial, values=own) for trial, own in zip(source.trials, values, strict=True))
    return replace(source, trials=trials)


def sources(case: Case, way: str) -> list[Source]:
    """What a search of the case starts from."""
    related = [] if way == "cold" else [learned(other) for other in case.others()]
    unrelated = [shuffled(source, case.seed) for source in related] if way in ("unrelated", "mixed") else []
    return unrelated if way == "unrelated" else related + unrelated


# ------------------------------------------------------------------------------------------------------------- figures
def interval(curves: Sequence[Array], figure: Callable[..., float]) -> str:
    """A figure of mean curves, with its interval.

    Args:
        curves: Regrets of each way, paired, each of shape (cases, GRID).
        figure: Of the ways' mean curves.
    """
    rng, count = np.random.default_rng(0), len(curves[0])
    resampled: list[float] = []
    for _ in range(2000):
        chosen = rng.integers(0, count, count)
        resampled.append(figure(*(curve[chosen].mean(axis=0) for curve in curves)))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return f"{figure(*(curve.mean(axis=0) for curve in curves)):.3f} ({low:.3f} .. {high:.3f})"


def share_of_epochs(warm: Array, cold: Array) -> float:
    """Epochs in which a warm start reaches the cold search's last regret, over those of the cold one; 9: never."""
    reached, own = (np.flatnonzero(curve <= cold[-1]) for curve in (warm, cold))
    return float((reached[0] + 1) / (own[0] + 1)) if len(reached) else 9.0


def report(paper: Paper, curves: Mapping[str, Array], cases: Sequence[Case], cpu_s: Mapping[str, float]) -> None:
    """Print the tables and the goals."""
    places = [round(share * GRID) - 1 for share in SHARES]
    rows = [
        [
            way,
            *(interval([by_case], lambda curve, at=place: float(curve[at])) for place in places),
            "-" if way == "cold" else interval([by_case, curves["cold"]], share_of_epochs),
            f"{cpu_s[way]:.1f}",
        ]
        for way, by_case in curves.items()
    ]
    paper.table(["way", *(f"{share:.3g}" for share in SHARES), "share of epochs", "CPU s"], rows)
    named = sorted({case.task for case in cases})
    if len(named) > 1:
        paper.say("\nShare of epochs, and regret at a quarter and at the end, by task:\n")
        rows = []
        for way, by_case in curves.items():
            row = [way]
            for task in named:
                own = [number for number, case in enumerate(cases) if case.task == task]
                warm, cold = by_case[own].mean(axis=0), curves["cold"][own].mean(axis=0)
                row.append(f"{share_of_epochs(warm, cold):.2f}; {warm[places[2]]:.3f}, {warm[-1]:.3f}")
            rows.append(row)
        paper.table(["way", *named], rows)
    paper.say("\nGoals:\n")
    rows = []
    if "related" in curves:
        reached = share_of_epochs(curves["related"].mean(axis=0), curves["cold"].mean(axis=0))
        figure = interval([curves["related"], curves["cold"]], share_of_epochs)
        rows.append(["related: share of epochs for the same regret", figure, f"<= {HALF}", verdict(reached <= HALF)])
    if "unrelated" in curves:
        ratio = float(curves["unrelated"][:, -1].mean() / curves["cold"][:, -1].mean())
        figure = interval([curves["unrelated"], curves["cold"]], lambda warm, cold: float(warm[-1] / cold[-1]))
        rows.append(["unrelated: last regret over the cold's", figure, f"<= {MOST}", verdict(ratio <= MOST)])
    paper.table(["what", "figure", "goal", ""], rows)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", choices=("recorded", "kept", "synthetic"), default="recorded")
    parser.add_argument("--seeds", type=int, default=8, help="searches of each task (default 8)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="default 200")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["cold", "related", "unrelated"])
    parser.add_argument("--keep", type=Path, help="keep every search's figures here, and continue from those it has")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    cases = [
        case
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for task in tasks(options.problems)
        if (case := Case(options.problems, task, seed)).others()
    ]
    ways = list(dict.fromkeys(["cold", *options.ways]))
    known = [json.loads(line) for line in options.keep.read_text().splitlines()] if _exists(options.keep) else []
    found: dict[tuple[Case, str], tuple[list[float], float]] = {
        (Case(*case), way): (regrets, cpu_s) for case, way, regrets, cpu_s in known
    }
    paper = Paper()
    paper.say(
        f"`{command()}`\n\n{machine()}\n"
        f"{options.problems}: {TRAININGS} full trainings by {WORKERS} workers, {len(cases)} cases.\n"
    )
    for case in cases:
        for way in (way for way in ways if (case, way) not in found):
            _, regrets, cpu_s = search(case.problem(), case.seed, sources(case, way))
            found[case, way] = regrets, cpu_s
            if options.keep:
                with options.keep.open("a") as file:
                    entry: list[Any] = [[case.problems, case.task, case.seed], way, regrets, cpu_s]
                    file.write(json.dumps(entry) + "\n")
        print(case, {way: round(found[case, way][0][-1], 3) for way in ways}, flush=True)
    curves = {way: np.array([found[case, way][0] for case in cases]) for way in ways}
    report(paper, curves, cases, {way: fmean(found[case, way][1] for case in cases) for way in ways})
    if options.save:
        paper.save(f"warm_start_{options.problems}", "What a search gains from earlier ones")


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
