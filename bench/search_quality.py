"""Results of a search over time: dray's methods and samplers, a plain transcription of the rule, Ray's and Optuna's.

Each search is simulated (`searchers.simulate`), with divisor 3; search_ways.py has the methods. The problems:

  synthetic   in closed form (search_problems.py), rungs 1, 3, 9, 27, 81; a seed is one problem
  recorded    learning curves of small real tasks (recorded_problems.py), rungs 3, 9, 27 (`three`) and 1, 3, 9, 27
              (`four`); a seed is one search on each development task
  kept        the same on the held-out tasks: only once, for the final figures of a finished method

Figure: the normalised regret of the incumbent, 0 for the best configuration and 1 for the median one, after an eighth,
a quarter, half and all of the time; the incumbent is the trial with the smallest last report, and before the first
report the regret is 1. Everything is paired: for one seed, worker speeds are the same, and random proposals are the
same configurations with the same noise. Intervals are 95% bootstrap intervals over the searches. Nothing was tuned on
synthetic seeds from 200 on.

    python bench/search_quality.py [--problems recorded] [--seeds 60] [--regimes ...] [--ways ...] [--save]

To run one method on one task, in seconds: --problems recorded --regimes three --tasks digits_mlp --ways promotion+tpe.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import optuna
from _measure import Paper, command, machine, verdict
from recorded_problems import FOUR_RUNGS, KEPT, THREE_RUNGS, TUNE_ON, RecordedProblem, recording
from search_problems import REGIMES, CurveProblem, Regime
from search_ways import OURS, WAYS, Problem

from searchers import Action, Event, Reported, Search
from searchers.simulate import Curve, simulate

FIRST_SEED = 200
MAX_LENGTH = 81
"""Steps of a full training on a synthetic problem."""
JITTER = 0.1

RUNGS = {"three": THREE_RUNGS, "four": FOUR_RUNGS}
"""The regimes of recorded problems."""
RECORDED = Regime(noise=0.0)
"""Their cluster is that of `base`; the noise is in the curves."""

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the time after which the incumbent is measured."""

SAME = 0.006
"""ASHA with random proposals must be within this of the plain rule."""
EARLY, END = 0.24, 0.06
"""The regret that the best method must reach on `CHECKED` after an eighth of the time, and at the end."""
CHECKED = ("base", "crossing")
PEERS = ("ray+tpe", "optuna+hyperband")
"""The peers that dray's best method must beat."""


# ----------------------------------------------------------------------------------------------------------- one search
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of one search: the regrets of its incumbents after `SHARES`, the trials it began, its CPU seconds."""

    regrets: Sequence[float]
    trials: int
    cpu_s: float


def search(way: str, problem: Problem, regime: Regime) -> Found:
    """Simulate one."""
    method, sampler = WAYS[way][1](problem, regime.workers)
    whole = Search(
        method, problem.space, seed=problem.seed, smaller_is_better=True, log=lambda record: None, sampler=sampler
    )
    until = regime.trainings * problem.rungs[-1]
    reports: list[tuple[float, int, float]] = []  # (time, trial, loss)

    def watch(now: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, Reported) and event.value is not None:
            reports.append((now, event.trial, event.value if math.isfinite(event.value) else math.inf))

    began = time.process_time()
    simulate(
        whole,
        regime.workers,
        lambda config: Curve(problem.curve(config), problem.cost(config)),
        reports=problem.rungs,
        start_cost=regime.start_cost,
        resume_cost=regime.resume_cost,
        noise=regime.noise,
        jitter=JITTER,
        until=until,
        seed=problem.seed,
        watch=watch,
    )
    cpu_s = time.process_time() - began
    regrets = []
    for share in SHARES:
        _, incumbent = min(((loss, trial) for at, trial, loss in reports if at <= share * until), default=(0, None))
        regrets.append(1.0 if incumbent is None else problem.regret(whole.trials[incumbent].hparams or {}))
    return Found(regrets=regrets, trials=len(whole.trials), cpu_s=cpu_s)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: a seed of a regime, on a task if it is recorded. Its searches, one per method, are paired."""

    regime: str
    task: str
    seed: int

    def search(self, way: str) -> Found:
        """Search it."""
        if self.task:
            problem: Problem = RecordedProblem(recording(self.task), self.seed, rungs=RUNGS[self.regime])
            return search(way, problem, RECORDED)
        regime = REGIMES[self.regime]
        problem = CurveProblem(
            self.seed,
            crossing=regime.crossing,
            noise=regime.noise,
            mute=regime.mute,
            first=regime.first,
            max_t=MAX_LENGTH,
        )
        return search(way, problem, regime)


# -------------------------------------------------------------------------------------------------------------- figures
def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% bootstrap interval of the mean.

    >>> interval([0.5] * 9)
    (0.5, 0.5)
    """
    rng = np.random.default_rng(0)
    means = np.asarray(values)[rng.integers(0, len(values), (10_000, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def shown(values: Sequence[float], sign: str = "") -> str:
    """The mean and its interval."""
    low, high = interval(values)
    return f"{fmean(values):{sign}.3f} ({low:{sign}.3f} .. {high:{sign}.3f})"


Results = Mapping[str, Mapping[Case, Found]]
"""Results by method; all methods have the same cases."""


def report(paper: Paper, results: Results, against: Sequence[str]) -> None:
    """Print the tables of each regime, with paired comparisons against some of the methods, and the targets."""
    cases = list(next(iter(results.values())))
    targets: list[list[str]] = []
    for regime in dict.fromkeys(case.regime for case in cases):
        of_regime = [case for case in cases if case.regime == regime]
        paper.say(f"\n## {regime}\n\n{_described(of_regime)}\n")
        regrets = {
            way: [[by_case[case].regrets[share] for case in of_regime] for share in range(len(SHARES))]
            for way, by_case in results.items()
        }
        rows = []
        for way, by_case in results.items():
            trials = fmean(by_case[case].trials for case in of_regime)
            cpu_s = fmean(by_case[case].cpu_s for case in of_regime)
            rows.append([way, WAYS[way][0], *map(shown, regrets[way]), f"{trials:.0f}", f"{cpu_s:.1f}"])
        paper.table(["way", "what", "1/8", "1/4", "1/2", "end", "trials", "CPU s"], rows)
        for peer in (peer for peer in against if peer in regrets):
            rows = [
                [way, *(shown(_less(regrets[way][share], regrets[peer][share]), "+") for share in range(len(SHARES)))]
                for way in regrets
                if way != peer
            ]
            paper.say(f"\nLess regret than {WAYS[peer][0]}:\n")
            paper.table(["way", "1/8", "1/4", "1/2", "end"], rows)
        if of_regime[0].task:
            tasks = list(dict.fromkeys(case.task for case in of_regime))
            rows = [[way, *(_of_task(by_case, of_regime, task) for task in tasks)] for way, by_case in results.items()]
            paper.say("\nRegret by task, after a quarter and at the end:\n")
            paper.table(["way", *tasks], rows)
        targets += _targets(regime, regrets)
    if targets:
        paper.say("\n## Targets\n")
        paper.table(["regime", "what", "figure", "target", ""], targets)


def _described(cases: Sequence[Case]) -> str:
    seeds = f"Seeds {cases[0].seed} to {cases[-1].seed}"
    if not cases[0].task:
        return f"{REGIMES[cases[0].regime]}. {seeds}."
    cluster = f"{RECORDED.workers} workers, {RECORDED.trainings:g} full trainings each"
    return f"Rungs {RUNGS[cases[0].regime]}; {cluster}. {seeds} of each task: {len(cases)} searches of each way."


def _less(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [other - one for one, other in zip(ours, others, strict=True)]


def _of_task(by_case: Mapping[Case, Found], cases: Sequence[Case], task: str) -> str:
    regrets = [by_case[case].regrets for case in cases if case.task == task]
    return f"{fmean(each[1] for each in regrets):.3f} / {fmean(each[-1] for each in regrets):.3f}"


def _targets(regime: str, regrets: Mapping[str, Sequence[Sequence[float]]]) -> list[list[str]]:
    rows = []
    if regime in CHECKED and {"stopping+random", "rule"} <= set(regrets):
        apart = _less(regrets["rule"][-1], regrets["stopping+random"][-1])
        low, high = interval(apart)
        same = verdict(low >= -SAME and high <= SAME)
        rows.append([regime, "stopping+random: more than the plain rule", shown(apart, "+"), f"+-{SAME}", same])
    ours = [way for way in regrets if way in OURS]
    if not ours:
        return rows
    best = min(ours, key=lambda way: fmean(regrets[way][-1]))
    if regime in CHECKED:
        for share, name, most in ((0, "1/8", EARLY), (-1, "the end", END)):
            reached = verdict(fmean(regrets[best][share]) <= most)
            rows.append([regime, f"{best} at {name}", shown(regrets[best][share]), f"<= {most:.2f}", reached])
    for peer in (peer for peer in PEERS if peer in regrets):
        for share, name in ((1, "1/4"), (-1, "the end")):
            less = _less(regrets[best][share], regrets[peer][share])
            ahead = verdict(interval(less)[0] > 0)
            rows.append([regime, f"{best} at {name}: less than {peer}", shown(less, "+"), "interval > 0", ahead])
    return rows


# --------------------------------------------------------------------------------------------------------- command line
TASKS = {"synthetic": ("",), "recorded": TUNE_ON, "kept": KEPT}


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", choices=TASKS, default="synthetic", help="default: synthetic")
    parser.add_argument("--seeds", type=int, default=60, help="per regime and task (default 60)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="default 200")
    parser.add_argument(
        "--regimes", nargs="+", choices=[*REGIMES, *RUNGS], help="default: base crossing; recorded: three four"
    )
    parser.add_argument("--tasks", nargs="+", choices=TUNE_ON, help="recorded tasks (default: all five)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways (default: all)")
    parser.add_argument(
        "--against",
        nargs="+",
        choices=WAYS,
        default=PEERS,
        help="compare all with these, in pairs (default: Ray's, Optuna's)",
    )
    parser.add_argument("--keep", type=Path, help="keep every search's figures here, and continue from those it has")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    known = REGIMES if options.problems == "synthetic" else RUNGS
    regimes = options.regimes or (CHECKED if options.problems == "synthetic" else list(RUNGS))
    if wrong := [regime for regime in regimes if regime not in known]:
        parser.error(f"--regimes: {', '.join(wrong)}: {options.problems} problems have {', '.join(known)}")
    if options.tasks and options.problems != "recorded":
        parser.error("--tasks needs --problems recorded; the kept tasks are used once, all together")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    tasks = options.tasks or TASKS[options.problems]
    cases = [Case(regime, task, seed) for seed in seeds for regime in regimes for task in tasks]
    kept = _kept(options.keep)
    results: dict[str, dict[Case, Found]] = {way: {} for way in options.ways}
    paper, began = Paper(), time.monotonic()
    paper.say(f"`{command()}`\n\n{machine()}\nOptuna {optuna.__version__}. Problems: {options.problems}.")
    for number, case in enumerate(cases, 1):
        for way, by_case in results.items():
            by_case[case] = kept.get((way, case)) or case.search(way)
            if (way, case) not in kept:
                _note(options.keep, way, case, by_case[case])
        if number % (len(cases) // len(seeds)) == 0:
            means = " ".join(f"{w} {fmean(f.regrets[-1] for f in by.values()):.3f}" for w, by in results.items())
            print(f"seed {case.seed}, {time.monotonic() - began:.0f} s: {means}", flush=True)
    report(paper, results, options.against)
    if options.save:
        name = "search_quality" if options.problems == "synthetic" else f"search_quality_{options.problems}"
        paper.save(name, "What a search finds: dray, and its peers")


def _kept(path: Path | None) -> dict[tuple[str, Case], Found]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    entries = (json.loads(line) for line in lines)
    return {(way, Case(*case)): Found(**fields) for way, case, fields in entries}


def _note(path: Path | None, way: str, case: Case, found: Found) -> None:
    if path is not None:
        with path.open("a") as file:
            entry: list[Any] = [way, [case.regime, case.task, case.seed]]
            file.write(json.dumps([*entry, {name: getattr(found, name) for name in Found.__slots__}]) + "\n")


if __name__ == "__main__":
    main()
