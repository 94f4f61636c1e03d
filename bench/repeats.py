"""How good the trial called best is, with and without repeats, where luck hides what is good.

The problems are the synthetic ones of search_problems.py, with seeds that nothing was tuned on. All validations of a
run are shifted by its luck: half of its variance belongs to the seed, as the order of the data does, and half to the
trial alone. A search of 64 trials is compared with the same one followed by `repeat: {seeds: 3, for: top 4}`, and with
one of more trials that trains as long in all. Regrets are true ones: 0 is the best configuration, 1 the median one.

    python bench/repeats.py [--problems 36] [--luck 0.02 0.1 0.3]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

from _measure import Paper, command, machine
from search_problems import CurveProblem

from dray.records.repeats import compared
from dray.records.trial_record import TrialRecord
from searchers import Auto, Method, RandomSearch, Repeats, Search, Started
from searchers.intervals import mean_of
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.objectives import Metric, Objectives
from searchers.simulate import Curve, simulate

TRIALS, SEEDS, TOP, LENGTH, WORKERS = 64, 3, 4, 27, 4
FIRST = 700
WITHIN_A_RUN = 0.2
"""Standard deviation of the noise of one validation, relative to that of the luck of a run."""
OBJECTIVES = Objectives((Metric(name="loss"),))


@dataclass(frozen=True)
class Outcome:
    """The trial called best, in regrets."""

    true: float
    said: float
    is_best: bool  # of the trials that the search trained to the end
    trained: float  # length in all
    is_distinguished: bool = False  # from all other finalists
    is_wrong: bool = False  # although another one is better


def searched(name: str, problem: CurveProblem, trials: int, luck: float, repeats: bool) -> Outcome:
    """Run a search."""
    make = Auto if name == "auto" else RandomSearch
    method: Method = make(max_trials=trials, max_length=LENGTH, max_concurrent_trials=WORKERS)
    sampler = MultiFidelitySampler(problem.space, seed=problem.seed, rungs=method.rungs) if name == "auto" else None
    if repeats:
        method = Repeats(method, seeds=SEEDS, top=TOP, max_concurrent_trials=WORKERS)
    search = Search(
        method, problem.space, seed=problem.seed, smaller_is_better=True, log=lambda record: None, sampler=sampler
    )
    size, latest = luck * (problem.median - problem.best), -1

    def watch(time: float, event: Any, actions: Any) -> None:
        nonlocal latest
        if isinstance(event, Started):
            latest = event.trial

    def trial(hparams: Any) -> Curve:
        curve, seed = problem.curve(hparams), search.seed_of(latest)
        shift = size * math.sqrt(0.5) * (Random(seed).gauss(0, 1) + Random(f"{seed}:{latest}").gauss(0, 1))
        return Curve(lambda step: curve(step) + shift)

    done = simulate(
        search, WORKERS, trial, reports=problem.rungs, watch=watch, noise=WITHIN_A_RUN * size, seed=problem.seed
    )
    views = [view for view in search.trials.values() if search.repeat(view.id) is None and view.best is not None]
    true = {view.id: problem.regret(view.hparams or {}) for view in views}
    best = min(views, key=lambda view: (view.best, view.id))
    full = [view.id for view in views if view.last_step == LENGTH]
    chosen, said = best.id, best.best or math.inf
    claims, wrong = False, False
    if repeats:
        again: dict[int, dict[int, TrialRecord]] = {}
        for view in search.trials.values():
            if (repeat := search.repeat(view.id)) is not None:
                record = again.setdefault(repeat.trial, {})[repeat.seed] = TrialRecord(view.id, OBJECTIVES)
                record.validated("loss", LENGTH, None, view.best or math.inf, 0.0)
                record.exit("completed", 0.0)
        first, *rest = compared(again, 1)
        assert first.mean is not None
        chosen, said = first.trial, first.mean.mean
        claims = all(each.difference is not None and each.difference.excludes_zero for each in rest)
        wrong = claims and any(true[each.trial] < true[chosen] for each in rest)
    said = (said - problem.best) / (problem.median - problem.best)
    is_best = true[chosen] <= min(true[trial] for trial in full)
    return Outcome(true[chosen], said, is_best, done.trained, claims, wrong)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=36)
    parser.add_argument("--luck", type=float, nargs="+", default=[0.02, 0.1, 0.3])
    options = parser.parse_args()
    problems = [CurveProblem(FIRST + seed, crossing=0.25, max_t=LENGTH) for seed in range(options.problems)]
    paper, rows = Paper(), []
    paper.say(f"`{command()}`\n\n{machine()}\n")
    for name in ("random", "auto"):
        for luck in options.luck:
            plain = [searched(name, each, TRIALS, luck, repeats=False) for each in problems]
            repeated = [searched(name, each, TRIALS, luck, repeats=True) for each in problems]
            factor = fmean(each.trained for each in repeated) / fmean(each.trained for each in plain)
            larger = [searched(name, each, round(TRIALS * factor), luck, repeats=False) for each in problems]
            for way, found in (("64 trials", plain), ("with repeats", repeated), ("as long, more trials", larger)):
                claims = sum(each.is_distinguished for each in found)
                less = mean_of([mine.true - with_.true for mine, with_ in zip(found, repeated, strict=True)])
                rows.append(
                    [
                        name,
                        f"{luck:g}",
                        way,
                        f"{fmean(each.trained for each in found) / LENGTH:.0f}",
                        f"{fmean(each.is_best for each in found):.0%}",
                        f"{fmean(each.true for each in found):.3f}",
                        "" if found is repeated else f"{less.mean:+.3f} ({less.low:+.3f} .. {less.high:+.3f})",
                        f"{fmean(each.said - each.true for each in found):+.3f}",
                        f"{sum(each.is_wrong for each in found)} of {claims}" if way == "with repeats" else "",
                    ]
                )
    headings = ["search", "luck", "", "full trainings", "truly the best of its own", "true regret"]
    more = ["less that with repeats", "said less true", "wrong claims that it is better than the others"]
    paper.table([*headings, *more], rows)
    paper.save("repeats", "The trial called best, with and without repeats")


if __name__ == "__main__":
    main()
