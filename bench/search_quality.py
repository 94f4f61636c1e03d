"""What a search finds over time: dray's ways, and those of Ray, Optuna, Syne Tune, DEHB, HpBandSter, SMAC and NePS.

Each search is simulated (`searchers.simulate`), with divisor 3, for as long as 50 full trainings take four workers. The
ways are in search_ways.py; those whose library is not installed are skipped. The problems:

  synthetic   in closed form (search_problems.py), rungs 1, 3, 9, 27, 81; a seed is one problem
  recorded    learning curves of small real tasks (recorded_problems.py), with three rungs (3, 9, 27 epochs), with four
              (1, 3, 9, 27), or with four of which the first is useless; a seed is one search on each development task
  kept        the same on the held-out tasks: only once, for the final figures of a finished method

Figure: the normalised regret of the incumbent, 0 for the best configuration and 1 for the median one; before the first
report it is 1. There are two incumbents: the trial with the lowest report so far, and the trial with the lowest report
at the highest rung that any trial has reached, which is the last rung soon. Everything is paired: for one seed, worker
speeds are the same, and random proposals are the same configurations with the same noise.

    python bench/search_quality.py --problems recorded --seeds 20 --jobs 16 --keep traces.jsonl
    python bench/search_quality.py --page traces.jsonl

`--keep` keeps how both incumbents' regrets change over time, and continues from the searches that a file has. `--page`
makes bench/results/search_quality.md and docs/search_quality.svg from one or more such files. To run one way on one
task, in seconds: --problems recorded --regimes three --tasks digits_mlp --ways promotion+random --seeds 1. A search
with smac takes up to a minute of CPU time, with syne-tune+cqr two. search_peers.py says how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _measure import Paper, machine
from recorded_problems import KEPT, TUNE_ON, RecordedProblem, recording
from search_page import INCUMBENTS, Found, page, report
from search_peers import Problem
from search_problems import REGIMES, CurveProblem, Regime
from search_ways import WAYS

from searchers import Action, Event, Reported, Search
from searchers.simulate import Curve, simulate

FIRST_SEED = 200
MAX_LENGTH = 81
"""Steps of a full training on a synthetic problem."""
JITTER = 0.1

RUNGS = {"three": 3, "four": 4, "useless": 4}
"""The regimes of tables, with the number of their rungs."""
TABLES = Regime(noise=0.0)
"""Their cluster is that of `base`; the noise is in the curves."""
DEFAULT = ("base", "crossing", "useless")


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: a seed of a regime, on a task if it is a table. Its searches, one per way, are paired."""

    problems: str
    regime: str
    task: str
    seed: int

    def problem(self) -> tuple[Problem, Regime]:
        """The problem, and its cluster."""
        if self.problems != "synthetic":
            recorded = recording(self.task)
            useless = self.regime == "useless"
            return RecordedProblem(recorded, self.seed, num_rungs=RUNGS[self.regime], useless=useless), TABLES
        regime = REGIMES[self.regime]
        given = {name: getattr(regime, name) for name in ("crossing", "noise", "mute", "first")}
        return CurveProblem(self.seed, max_t=MAX_LENGTH, **given), regime


def search(way: str, case: Case) -> Found:
    """Simulate a search of a case."""
    problem, regime = case.problem()
    method, sampler = WAYS[way].make(problem, regime.workers)
    whole = Search(
        method, problem.space, seed=problem.seed, smaller_is_better=True, log=lambda record: None, sampler=sampler
    )
    full = problem.rungs[-1] / regime.workers  # time of a full training per training
    best: dict[str, tuple[float, ...]] = {}
    traces: dict[str, list[tuple[float, float]]] = {incumbent: [(0.0, 1.0)] for incumbent in INCUMBENTS}

    def watch(now: float, event: Event, actions: list[Action]) -> None:
        if not isinstance(event, Reported) or event.value is None:
            return
        loss = event.value if math.isfinite(event.value) else math.inf
        for incumbent, rank in (("lowest", (loss, event.trial)), ("highest", (-event.step, loss, event.trial))):
            if incumbent in best and rank >= best[incumbent]:
                continue
            best[incumbent] = rank
            regret = round(problem.regret(whole.trials[event.trial].hparams or {}), 5)
            if regret != traces[incumbent][-1][1]:
                traces[incumbent].append((round(now / full, 3), regret))

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
        until=regime.trainings * problem.rungs[-1],
        seed=problem.seed,
        watch=watch,
    )
    return Found(
        **asdict(case),
        way=way,
        trials=len(whole.trials),
        cpu_s=round(time.process_time() - began, 2),
        **traces,
        machine=machine().splitlines()[0],
        versions=WAYS[way].versions,
    )


def _search(unit: tuple[str, Case]) -> Found:
    """In a process of its own."""
    _silence_peers()
    return search(*unit)


def _silence_peers() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def searches(units: Sequence[tuple[str, Case]], jobs: int, minutes: float) -> Iterator[Found]:
    """The outcomes of those that end in time, as they end."""
    ends = time.monotonic() + 60 * minutes
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        outcomes = pool.imap_unordered(_search, units)
        for _ in units:
            try:
                yield outcomes.next(max(ends - time.monotonic(), 0.0))
            except multiprocessing.TimeoutError:
                return


# --------------------------------------------------------------------------------------------------------- command line
def main() -> None:
    """Read the command line, and search or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=["synthetic", "recorded", "kept"], default=["synthetic"])
    parser.add_argument("--tasks", nargs="+", help="of the tables (default: all)")
    parser.add_argument(
        "--regimes", nargs="+", choices=sorted({*REGIMES, *RUNGS}), help="default: base crossing useless three four"
    )
    parser.add_argument("--seeds", type=int, default=10, help="per regime and task (default 10)")
    parser.add_argument(
        "--first-seed", type=int, default=FIRST_SEED, help="default 200; nothing is tuned from there on"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time (default 1)")
    parser.add_argument("--minutes", type=float, default=1e6, help="end then with what there is (default: no limit)")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep all searches here, and continue from those it has"
    )
    parser.add_argument("--page", type=Path, nargs="+", metavar="FILE", help="make the page from kept searches")
    options = parser.parse_args()
    if options.page:
        page([found for file in options.page for found in kept(file) if found.way in options.ways])
        return
    if "kept" in options.problems and options.tasks:
        parser.error("--tasks: the kept tasks are used once, all together")

    _silence_peers()
    ways = [way for way in options.ways if _is_installed(way)]
    regimes = options.regimes or [*DEFAULT, "three", "four"]
    cases = [
        Case(problems, regime, task, seed)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for problems in options.problems
        for regime in regimes
        if regime in (REGIMES if problems == "synthetic" else RUNGS)
        for task in _tasks(problems, options.tasks)
    ]
    known = {
        (found.way, Case(found.problems, found.regime, found.task, found.seed)): found for found in kept(options.keep)
    }
    # Synthetic problems have no other tasks, so no earlier searches.
    all_units = [(way, case) for case in cases for way in ways if way != "auto+like" or case.task]
    units = [unit for unit in all_units if unit not in known]
    began, results = time.monotonic(), [known[unit] for unit in all_units if unit in known]
    for found in searches(units, options.jobs, options.minutes):
        results.append(found)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    print(f"{len(results)} of {len(all_units)} searches, {time.monotonic() - began:.0f} s\n")
    if results:
        report(Paper(), results)


def _is_installed(way: str) -> bool:
    try:
        if WAYS[way].libraries:
            WAYS[way].make(CurveProblem(), TABLES.workers)
    except ImportError as error:
        print(f"{way}: skipped: {error}", flush=True)
        return False
    return True


def _tasks(problems: str, tasks: Sequence[str] | None) -> Sequence[str]:
    match problems:
        case "synthetic":
            return [""]
        case "kept":
            return KEPT
    return tasks or TUNE_ON


def kept(path: Path | None) -> list[Found]:
    """The searches that a file has; none if there is no file."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    entries: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
    return [Found(**entry) for entry in entries]


if __name__ == "__main__":
    main()
