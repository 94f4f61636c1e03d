"""Whether the 90% ranges of `dray preview` hold the length, the duration and the slot-hours of simulated searches.

The searches run on learning curves that the preview knows nothing about: closed forms whose order changes during
training (search_problems.py), and recorded ones (recorded_problems.py; the kept ones too, since no search method is
changed by what is seen here). Time per epoch depends on the width of the model in the closed forms, by a factor of
four, and is the same for all recorded trials; training times and workers vary by 5% besides. The preview gets the mean
time of an epoch, like `--seconds-per-epoch`; with `--like` also the times of 16 random trials and of a start, from
another experiment for every two searches. Each search has another seed, and in the closed forms another problem. The
goal: at least 85 of 100 searches are within each range.

`auto` always has its own sampler, which learns; the others have those of `--samplers`. Recorded curves have 27 epochs.

    python bench/preview.py --like --save
    python bench/preview.py --searches 20 --methods auto --trials 64 200 --slots 4 16 --lengths 9 27 81
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import optuna
from _measure import Paper, command
from recorded_problems import KEPT, TUNE_ON, RecordedProblem, recording
from search_problems import CurveProblem

from searchers import ASHA, AdaptiveASHA, Method, PromotionASHA, RandomSearch, Search
from searchers.auto import Auto
from searchers.events import Action, Event, Reported
from searchers.named_sampler import named_sampler
from searchers.previews import Preview, Rates, expected
from searchers.simulate import Curve, simulate

GOAL = 0.85
DIVISOR = 3
START, MEASURED, JITTER = 0.5, 16, 0.05  # START is in mean epochs
EACH = 2  # searches with the rates of the same earlier experiment


class Size(NamedTuple):
    """The size of a search; the length is in epochs."""

    trials: int
    slots: int
    length: int


METHODS: dict[str, Callable[[Size], Method]] = {
    "random": lambda size: RandomSearch(max_trials=size.trials, max_length=size.length),
    "ASHA, stopping": lambda size: ASHA(max_trials=size.trials, max_length=size.length, num_rungs=3, divisor=DIVISOR),
    "ASHA, promotion": lambda size: PromotionASHA(
        max_trials=size.trials, max_length=size.length, num_rungs=3, divisor=DIVISOR
    ),
    "adaptive ASHA": lambda size: AdaptiveASHA(max_trials=size.trials, max_length=size.length, divisor=DIVISOR),
    "auto": lambda size: Auto(max_trials=size.trials, max_length=size.length),
}


@cache
def curves(seed: int, crossing: float, length: int) -> CurveProblem:
    return CurveProblem(seed, crossing=crossing, max_t=length)


def recorded(tasks: Sequence[str]) -> Callable[[int, int], RecordedProblem]:
    return lambda seed, _: RecordedProblem(recording(tasks[seed % len(tasks)]), seed)


PROBLEMS: dict[str, tuple[Callable[[int, int], CurveProblem | RecordedProblem], float]] = {
    "curves": (lambda seed, length: curves(seed, 0.25, length), 0.01),
    "crossing curves": (lambda seed, length: curves(seed, 0.75, length), 0.05),
    "noisy curves": (lambda seed, length: curves(seed, 0.5, length), 0.2),
    "recorded curves": (recorded(TUNE_ON), 0.0),
    "kept curves": (recorded(KEPT), 0.0),
}
"""By a seed and a length; and the standard deviation of the noise of a report."""
RECORDED_EPOCHS = 27


class Found(NamedTuple):
    """A simulated search."""

    trained: float
    time: float
    busy: float  # the time of all workers
    trials: list[int]  # at each rung


def search(
    method: Method, slots: int, problem: CurveProblem | RecordedProblem, noise: float, seed: int, sampler: str
) -> Found:
    reached = dict[int, float]()
    drawn = named_sampler(sampler, problem.space, seed=seed, rungs=method.rungs, options={}, objectives=None)

    def trial(hparams: Mapping[str, Any]) -> Curve:
        return Curve(problem.curve(hparams), cost=problem.cost(hparams))

    def watch(_: float, event: Event, __: list[Action]) -> None:
        if isinstance(event, Reported):
            reached[event.trial] = event.step

    found = simulate(
        Search(method, problem.space, seed=seed, smaller_is_better=True, log=lambda _: None, sampler=drawn),
        slots,
        trial,
        noise=noise,
        jitter=JITTER,
        start_cost=START,
        resume_cost=START,
        seed=seed,
        watch=watch,
    )
    trials = [sum(step >= rung for step in reached.values()) for rung in method.rungs]
    return Found(found.trained, found.time, found.busy, trials)


def measured(problem: CurveProblem | RecordedProblem, seed: int) -> Rates:
    """The rates of an earlier experiment with random trials on the same problem."""
    costs: list[float] = []

    def trial(hparams: Mapping[str, Any]) -> Curve:
        costs.append(problem.cost(hparams))
        return Curve(lambda _: 0.0)

    earlier = RandomSearch(max_trials=MEASURED, max_length=1)
    simulate(Search(earlier, problem.space, seed=-1 - seed, smaller_is_better=True, log=lambda _: None), 1, trial)
    return Rates(mean=fmean(costs), spread=stdev(map(math.log, costs)), measured=MEASURED, start=START)


def rows(
    methods: Sequence[str], samplers: Sequence[str], sizes: Sequence[Size], count: int, like: bool
) -> Iterator[list[str]]:
    for name, size in product(methods, sizes):

        def make(name: str = name, size: Size = size) -> Method:
            return METHODS[name](size)

        for sampler in ["multi_fidelity"] if name == "auto" else samplers:
            said = partial(expected, make, learns=sampler != "random", workers=size.slots)
            given = said(rates=Rates(start=START))
            for problem_name, (problem_of, noise) in PROBLEMS.items():
                problems = [problem_of(seed, size.length) for seed in range(count)]
                if isinstance(problems[0], RecordedProblem) and size.length > RECORDED_EPOCHS:
                    continue
                found = [search(make(), size.slots, each, noise, seed, sampler) for seed, each in enumerate(problems)]
                row = [name, sampler, problem_name, *map(str, size), *cells([given] * count, found)]
                if like:
                    earlier = [said(rates=measured(each, seed)) for seed, each in enumerate(problems[::EACH])]
                    row += cells([earlier[seed // EACH] for seed in range(count)], found)[1:]
                row += medians(given, found)
                print(*row, sep=", ", flush=True)
                yield row


def medians(given: Preview, found: Sequence[Found]) -> tuple[str, str]:
    """The total length and, without brackets, the trials at each rung: expected, and found."""
    total = f"{given.total:.0f}, {median(each.trained for each in found):.0f}"
    if len(given.brackets) > 1:
        return total, ""
    said = " ".join(f"{rung.trials:.0f}" for rung in given.brackets[0].rungs)
    used = " ".join(f"{fmean(each):.0f}" for each in zip(*(one.trials for one in found), strict=True))
    return total, f"{said}, {used}"


def cells(previews: Sequence[Preview], found: Sequence[Found]) -> list[str]:
    """The share of searches within the ranges of the length, the duration and the slot-hours, each with the ratio of
    the range's ends."""
    ranges = [(each.likely, each.wall_s, each.busy_s) for each in previews]
    texts = []
    for pairs, values in zip(zip(*ranges, strict=True), zip(*(each[:3] for each in found), strict=True), strict=True):
        ends = [pair[-2:] for pair in pairs if pair is not None]
        if not ends:
            texts.append("certain")
            continue
        held = fmean(low <= value <= high for (low, high), value in zip(ends, values, strict=True))
        texts.append(f"{held:.0%} ({median(high / low for low, high in ends):.1f}){'' if held >= GOAL else ' missed'}")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100, help="searches of each row (default 100)")
    parser.add_argument("--samplers", nargs="+", default=["random"], help="samplers (default random)")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS, help="default: all")
    parser.add_argument("--trials", nargs="+", type=int, default=[64], help="of a search (default 64)")
    parser.add_argument("--slots", nargs="+", type=int, default=[8], help="that train at the same time (default 8)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[27], help="of a full training (default 27)")
    parser.add_argument("--like", action="store_true", help="also from the times of an earlier experiment")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    paper = Paper()
    sizes = [Size(*each) for each in product(options.trials, options.slots, options.lengths)]
    found = list(rows(options.methods, options.samplers, sizes, options.searches, options.like))
    paper.say(
        f"`{command()}`: {options.searches} searches in each row. The share "
        f"within the 90% range (goal: {GOAL:.0%}), and in brackets the ratio of the range's ends. "
        "Last, the mean expected and the median found length, and the mean trials at each rung, expected and found.\n"
    )
    heads = ["method", "sampler", "problem", "trials", "slots", "epochs", "length", "hours", "slot-hours"]
    heads += ["hours, --like", "slot-hours, --like"] if options.like else []
    heads += ["length said, used", "trials at rungs"]
    paper.table(heads, found)
    if options.save:
        paper.save("preview", "How often the ranges of `dray preview` hold")


if __name__ == "__main__":
    main()
