"""What a search finds for its time: dray's methods and samplers, a plain transcription of the rule, Ray's and Optuna's.

Each search is simulated (`searchers.simulate`) on problems in closed form (search_problems.py), divisor 3, rungs 1, 3,
9, 27, 81. Figure: the normalised regret of the incumbent, 0 for the best configuration of the space and 1 for the
median random one, when the time is over; the incumbent is the trial with the smallest loss reported so far. Everything
is paired: one seed is one problem, with the same speeds of workers and, for those that propose at random, the same
configurations with the same noise. Intervals are of 95 of 100 resamples of the seeds. Nothing was tuned on seeds from
200 on.

    python bench/search_quality.py [--seeds 60] [--regimes base crossing] [--ways ...] [--keep FILE] [--save]
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import optuna
from _measure import Paper, machine, verdict
from ray.tune.schedulers import AsyncHyperBandScheduler
from ray.tune.search.optuna import OptunaSearch
from search_problems import DECAY, DROPOUT, LR, OPTIMIZERS, REGIMES, SPACE, WARMUP, WIDTH, CurveProblem, Regime

from searchers import ASHA, Action, Create, Event, Exited, RandomSearch, Reported, Search, Stop, parse_space
from searchers.adaptive_asha import AdaptiveASHA
from searchers.optuna_sampler import OptunaSampler
from searchers.promotion import PromotionASHA
from searchers.simulate import Curve, simulate

FIRST_SEED = 200
DIVISOR, NUM_RUNGS, MAX_LENGTH = 3, 5, 81
RUNGS = tuple(DIVISOR**r for r in range(NUM_RUNGS))
JITTER = 0.1
ENDLESS = 100_000  # trials: time is what ends a search

SAME = 0.006
"""ASHA with random proposals is to be within this of the plain rule."""
REACH, AIM = 0.09, 0.08
"""The regret that ASHA with TPE is to reach, and the one to aim at."""


# ------------------------------------------------------------------------------------------------------- the contenders
class Decides(Protocol):
    """The part of a method that a simulation needs."""

    def start(self) -> list[Action]: ...
    def on(self, event: Event) -> list[Action]: ...


class Proposes(Protocol):
    """A sampler."""

    def ask(self, trial: int) -> dict[str, Any]: ...
    def tell(self, event: Event, hparams: Mapping[str, object]) -> None: ...


class Draws:
    """Random configurations: trial n of one seed gets the same one from every way."""

    def __init__(self, problem: CurveProblem) -> None:
        self._problem = problem

    def ask(self, trial: int) -> dict[str, Any]:
        return self._problem.sample(np.random.default_rng([self._problem.seed, trial]))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Nothing is learned."""


class Peer:
    """As many trials as workers, without end; `continues` decides whether a trial continues."""

    rungs = RUNGS

    def __init__(self, workers: int) -> None:
        self._created = workers

    def start(self) -> list[Action]:
        return [Create(trial=trial) for trial in range(self._created)]

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, Reported) and not self.continues(event):
            return [Stop(trial=event.trial)]
        if isinstance(event, Exited):
            self._created += 1
            return [Create(trial=self._created - 1)]
        return []

    def continues(self, report: Reported) -> bool:
        return True


class PlainRule(Peer):
    """The stopping rule transcribed literally: a sorted list for each rung."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._values: list[list[float]] = [[] for _ in RUNGS]

    def continues(self, report: Reported) -> bool:
        rung = RUNGS.index(int(report.step))
        values, value = self._values[rung], report.value
        assert value is not None
        index = bisect_left(values, value)
        values.insert(index, value)
        return rung == len(RUNGS) - 1 or index < max(len(values) // DIVISOR, 1)


@dataclass(frozen=True)
class TuneTrial:
    """The part of a Tune trial that its scheduler needs."""

    trial_id: str


class RayASHA(Peer):
    """Ray Tune's scheduler itself, called as Tune calls it."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="step", metric="loss", mode="min", max_t=MAX_LENGTH, grace_period=1, reduction_factor=DIVISOR
        )
        self._last: dict[int, dict[str, Any]] = {}

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        if isinstance(event, Exited):
            self._scheduler.on_trial_complete(None, TuneTrial(str(event.trial)), self._last.pop(event.trial))
        return actions

    def continues(self, report: Reported) -> bool:
        trial, new = TuneTrial(str(report.trial)), report.trial not in self._last
        if new:
            self._scheduler.on_trial_add(None, trial)
        self._last[report.trial] = {"step": report.step, "loss": report.value}
        decision = self._scheduler.on_trial_result(None, trial, self._last[report.trial])
        # Its STOP at max_t is what ends a trial there; here trials end by themselves.
        return bool(decision == AsyncHyperBandScheduler.CONTINUE or report.step >= MAX_LENGTH)


class RayOptuna:
    """Ray Tune's OptunaSearch itself, called as Tune calls it: it sees a stopped trial as complete."""

    def __init__(self, seed: int) -> None:
        self._search = OptunaSearch(space=distributions(), metric="loss", mode="min", seed=seed)
        self._last: dict[int, dict[str, Any]] = {}

    def ask(self, trial: int) -> dict[str, Any]:
        found: dict[str, Any] = self._search.suggest(str(trial))
        return dict(found)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        match event:
            case Reported(trial=trial, step=step, value=value):
                self._last[trial] = {"training_iteration": int(step), "loss": value}
                self._search.on_trial_result(str(trial), self._last[trial])
            case Exited(trial=trial):
                self._search.on_trial_complete(str(trial), self._last.pop(trial))


class Optuna(Peer):
    """A study of Optuna with TPE, and its pruner or none: method and sampler in one, as its `optimize` does it."""

    def __init__(self, workers: int, seed: int, *, prune: bool) -> None:
        super().__init__(workers)
        pruner = (
            optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=DIVISOR)
            if prune
            else optuna.pruners.NopPruner()
        )
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
        self._trials: dict[int, optuna.Trial] = {}
        self._last: dict[int, float] = {}

    def ask(self, trial: int) -> dict[str, Any]:
        self._trials[trial] = self._study.ask(distributions())
        return dict(self._trials[trial].params)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        if isinstance(event, Exited):
            trial = self._trials.pop(event.trial)
            if event.reason == "stopped":
                self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)  # with its last value, by Optuna's rule
            else:
                self._study.tell(trial, self._last.pop(event.trial))

    def continues(self, report: Reported) -> bool:
        assert report.value is not None
        trial = self._trials[report.trial]
        self._last[report.trial] = report.value
        trial.report(report.value, int(report.step))
        return report.step >= MAX_LENGTH or not trial.should_prune()


def distributions() -> dict[str, optuna.distributions.BaseDistribution]:
    """The problems' space, as an Optuna user would write it."""
    real, whole = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
    return {
        "lr": real(*LR, log=True),
        "weight_decay": real(*DECAY, log=True),
        "width": whole(*WIDTH),
        "dropout": real(*DROPOUT),
        "warmup": real(*WARMUP),
        "optimizer": optuna.distributions.CategoricalDistribution(OPTIMIZERS),
    }


def _asha(workers: int, kind: type[ASHA] = ASHA) -> ASHA:
    return kind(
        max_trials=ENDLESS,
        max_length=MAX_LENGTH,
        num_rungs=NUM_RUNGS,
        divisor=DIVISOR,
        max_concurrent_trials=workers,
    )


def _promotion(workers: int) -> ASHA:
    return _asha(workers, PromotionASHA)


def _adaptive(workers: int) -> AdaptiveASHA:
    return AdaptiveASHA(
        max_trials=ENDLESS,
        max_length=MAX_LENGTH,
        divisor=DIVISOR,
        max_rungs=NUM_RUNGS,
        max_concurrent_trials=workers,
    )


def _random(workers: int) -> RandomSearch:
    return RandomSearch(max_trials=ENDLESS, max_length=MAX_LENGTH, max_concurrent_trials=workers)


def _tpe(seed: int) -> OptunaSampler:
    return OptunaSampler(parse_space(SPACE), seed=seed, rungs=RUNGS)


def _one(both: Optuna) -> tuple[Optuna, Optuna]:
    return both, both


Make = Callable[[CurveProblem, int], tuple[Decides, Proposes]]

WAYS: dict[str, tuple[str, Make]] = {
    "random": ("random, full trainings", lambda problem, workers: (_random(workers), Draws(problem))),
    "rule": ("the stopping rule, transcribed; random", lambda problem, workers: (PlainRule(workers), Draws(problem))),
    "stopping": ("dray's ASHA, stopping; random", lambda problem, workers: (_asha(workers), Draws(problem))),
    "promotion": ("dray's ASHA, promotion; random", lambda problem, workers: (_promotion(workers), Draws(problem))),
    "adaptive": ("dray's adaptive ASHA; random", lambda problem, workers: (_adaptive(workers), Draws(problem))),
    "ray": ("Ray's ASHA; random", lambda problem, workers: (RayASHA(workers), Draws(problem))),
    "dray-tpe": ("dray's ASHA with TPE", lambda problem, workers: (_asha(workers), _tpe(problem.seed))),
    "promotion-tpe": (
        "dray's ASHA, promotion, with TPE",
        lambda problem, workers: (_promotion(workers), _tpe(problem.seed)),
    ),
    "ray-tpe": ("Ray's ASHA with OptunaSearch", lambda problem, workers: (RayASHA(workers), RayOptuna(problem.seed))),
    "optuna-tpe": (
        "Optuna's TPE with SuccessiveHalvingPruner",
        lambda problem, workers: _one(Optuna(workers, problem.seed, prune=True)),
    ),
    "full-tpe": (
        "Optuna's TPE, full trainings",
        lambda problem, workers: _one(Optuna(workers, problem.seed, prune=False)),
    ),
}
PEERS = ("ray-tpe", "optuna-tpe", "full-tpe")
CHECKED = ("base", "crossing")


# ----------------------------------------------------------------------------------------------------------- one search
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of one search: the regret of its incumbent, the trials that it began, its CPU seconds."""

    regret: float
    trials: int
    cpu_s: float


def search(make: Make, regime: Regime, seed: int) -> Found:
    """Simulate one."""
    problem = CurveProblem(seed, crossing=regime.crossing, noise=regime.noise, max_t=MAX_LENGTH)
    method, sampler = make(problem, regime.workers)
    whole = Search(
        method,  # type: ignore[arg-type]  # peers have no more of a method than is needed here
        parse_space(SPACE),
        seed=seed,
        smaller_is_better=True,
        log=lambda record: None,
        sampler=sampler,
    )
    began = time.process_time()
    simulate(
        whole,
        regime.workers,
        lambda config: Curve(problem.curve(config), problem.cost(config)),
        start_cost=regime.start_cost,
        resume_cost=regime.resume_cost,
        noise=regime.noise,
        jitter=JITTER,
        until=regime.trainings * MAX_LENGTH,
        seed=seed,
    )
    cpu_s = time.process_time() - began
    best = min((view for view in whole.trials.values() if view.best is not None), key=lambda view: view.best or 0.0)
    assert best.hparams is not None
    return Found(regret=problem.regret(best.hparams), trials=len(whole.trials), cpu_s=cpu_s)


# -------------------------------------------------------------------------------------------------------------- figures
def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where 95 of 100 resamples put the mean.

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


def report(paper: Paper, found: Mapping[tuple[str, str], Mapping[int, Found]], seeds: Sequence[int]) -> None:
    """Print the tables and the verdicts."""
    regimes = list(dict.fromkeys(regime for regime, _ in found))
    for regime in regimes:
        rows = []
        ways = {way: by_seed for (of, way), by_seed in found.items() if of == regime}
        for way, by_seed in ways.items():
            regrets = [by_seed[seed].regret for seed in seeds]
            row = [way, WAYS[way][0], shown(regrets)]
            for other in ("stopping", "dray-tpe"):
                pairs = [by_seed[seed].regret - ways[other][seed].regret for seed in seeds] if other in ways else []
                row.append(shown(pairs, "+") if pairs and other != way else "-")
            trials = fmean(by_seed[seed].trials for seed in seeds)
            cpu_s = fmean(by_seed[seed].cpu_s for seed in seeds)
            rows.append([*row, f"{trials:.0f}", f"{cpu_s:.1f}"])
        paper.say(f"\n## {regime}\n\n{REGIMES[regime]}\n")
        head = ["way", "what", "regret", "more than stopping", "more than dray-tpe", "trials", "CPU s"]
        paper.table(head, rows)

    rows = []
    for regime in (regime for regime in CHECKED if regime in regimes):
        ways = {way: by_seed for (of, way), by_seed in found.items() if of == regime}
        if {"stopping", "rule"} <= set(ways):
            apart = [ways["stopping"][seed].regret - ways["rule"][seed].regret for seed in seeds]
            low, high = interval(apart)
            within = verdict(low >= -SAME and high <= SAME)
            rows.append([regime, "ASHA, random: more than the plain rule", shown(apart, "+"), f"+-{SAME}", within])
        if "dray-tpe" in ways:
            ours = [ways["dray-tpe"][seed].regret for seed in seeds]
            aimed = f"<= {REACH:.2f}, aim {AIM:.2f}"
            rows.append([regime, "ASHA with TPE", shown(ours), aimed, verdict(fmean(ours) <= REACH)])
            for peer in (peer for peer in PEERS if peer in ways):
                less = [ways[peer][seed].regret - ways["dray-tpe"][seed].regret for seed in seeds]
                what = f"ASHA with TPE: less than {WAYS[peer][0]}"
                rows.append([regime, what, shown(less, "+"), "interval > 0", verdict(interval(less)[0] > 0)])
    if rows:
        paper.say("\n## Targets\n")
        paper.table(["regime", "what", "figure", "target", ""], rows)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60, help="problems of each regime (default 60)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of the problems (default 200)")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(CHECKED), help="default: base crossing")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways (default: all)")
    parser.add_argument("--keep", type=Path, help="keep every search's figure here, and continue from those it has")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found: dict[tuple[str, str], dict[int, Found]] = {(r, w): {} for r in options.regimes for w in options.ways}
    if options.keep and options.keep.exists():
        for line in options.keep.read_text().splitlines():
            regime, way, seed, fields = json.loads(line)
            if (regime, way) in found:
                found[regime, way][seed] = Found(**fields)
    paper, began = Paper(), time.monotonic()
    paper.say(f"{machine()}\nOptuna {optuna.__version__}. Seeds {seeds[0]} to {seeds[-1]}.")
    for seed in seeds:
        for (regime, way), by_seed in found.items():
            if seed not in by_seed:
                by_seed[seed] = search(WAYS[way][1], REGIMES[regime], seed)
                _note(options.keep, [regime, way, seed, by_seed[seed]])
        means = " ".join(f"{w} {fmean(f.regret for f in by_seed.values()):.3f}" for (_, w), by_seed in found.items())
        print(f"seed {seed}, {time.monotonic() - began:.0f} s: {means}", flush=True)
    report(paper, found, seeds)
    if options.save:
        paper.save("search_quality", "What a search finds: dray, and its peers")


def _note(path: Path | None, entry: list[Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            fields = {name: getattr(entry[-1], name) for name in Found.__slots__}
            file.write(json.dumps([*entry[:-1], fields]) + "\n")


if __name__ == "__main__":
    main()
