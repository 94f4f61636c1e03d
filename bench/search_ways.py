"""The methods that search_quality.py compares: dray's methods and samplers, and Ray's and Optuna's own classes.

Each is called as its own driver calls it, without processes, in a simulation; `WAYS` has them by name. A new one is one
more entry: a function of a problem and a number of workers that returns a method and a sampler.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from ray.tune.schedulers import AsyncHyperBandScheduler
from ray.tune.search.optuna import OptunaSearch

from searchers import (
    ASHA,
    Action,
    Create,
    Event,
    Exited,
    Method,
    RandomSampler,
    RandomSearch,
    Reported,
    Sampler,
    Space,
    Stop,
)
from searchers.adaptive_asha import AdaptiveASHA
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.optuna_sampler import OptunaSampler
from searchers.optuna_space import from_optuna_trial, to_optuna
from searchers.promotion import PromotionASHA

DIVISOR = 3
ENDLESS = 100_000
"""Trials: more than a search has time for."""


class Problem(Protocol):
    """A search problem.

    Attributes:
        seed: The seed of the search.
        space: The space to draw from.
        rungs: Lengths at which trials are compared, ascending; the last is that of a full training.
    """

    seed: int
    space: Space
    rungs: tuple[int, ...]

    def curve(self, config: Mapping[str, Any]) -> Callable[[float], float]:
        """The loss of a new trial after a length."""

    def cost(self, config: Mapping[str, Any]) -> float:
        """Time of a unit of length."""

    def regret(self, config: Mapping[str, Any]) -> float:
        """The regret of a configuration trained to the end: 0 for the best one, 1 for the median one."""


# ------------------------------------------------------------------------------------------------------------ the peers
class Peer:
    """Runs as many trials as workers, without end; `continues` decides whether a trial continues."""

    def __init__(self, problem: Problem, workers: int) -> None:
        self.rungs, self._created = problem.rungs, workers

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
    """The stopping rule transcribed literally: a sorted list for each rung.

    Args:
        problem, workers: as for `Peer`.
        share: how many of a number of trials at a rung continue.
    """

    def __init__(self, problem: Problem, workers: int, share: Callable[[int], int] = lambda n: n // DIVISOR) -> None:
        super().__init__(problem, workers)
        self._share = share
        self._values: list[list[float]] = [[] for _ in self.rungs]

    def continues(self, report: Reported) -> bool:
        rung = self.rungs.index(int(report.step))
        values, value = self._values[rung], report.value
        assert value is not None
        index = bisect_left(values, value)
        values.insert(index, value)
        return rung == len(self.rungs) - 1 or index < max(self._share(len(values)), 1)


@dataclass(frozen=True)
class TuneTrial:
    """The part of a Tune trial that its scheduler needs."""

    trial_id: str


class RayASHA(Peer):
    """Ray Tune's scheduler itself, called as Tune calls it."""

    def __init__(self, problem: Problem, workers: int) -> None:
        super().__init__(problem, workers)
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="step",
            metric="loss",
            mode="min",
            max_t=self.rungs[-1],
            grace_period=self.rungs[0],
            reduction_factor=DIVISOR,
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
        # In Tune, its STOP at max_t ends a trial; here, trials end by themselves.
        return bool(decision == AsyncHyperBandScheduler.CONTINUE or report.step >= self.rungs[-1])


class RayOptuna:
    """Ray Tune's OptunaSearch itself, called as Tune calls it: it sees a stopped trial as complete."""

    def __init__(self, problem: Problem) -> None:
        self._space, self._distributions = problem.space, to_optuna(problem.space)
        self._search = OptunaSearch(space=self._suggest, metric="loss", mode="min", seed=problem.seed)
        self._last: dict[int, dict[str, Any]] = {}

    def _suggest(self, trial: optuna.Trial) -> None:
        from_optuna_trial(self._space.root, trial, self._distributions)

    def ask(self, trial: int) -> dict[str, object]:
        suggested = optuna.trial.FixedTrial(self._search.suggest(str(trial)))
        return from_optuna_trial(self._space.root, suggested, self._distributions)  # type: ignore[arg-type]

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        match event:
            case Reported(trial=trial, step=step, value=value):
                self._last[trial] = {"training_iteration": int(step), "loss": value}
                self._search.on_trial_result(str(trial), self._last[trial])
            case Exited(trial=trial):
                self._search.on_trial_complete(str(trial), self._last.pop(trial))


class Optuna(Peer):
    """A study of Optuna with TPE, and a pruner: method and sampler in one, as its `optimize` does it."""

    def __init__(self, problem: Problem, workers: int, pruner: optuna.pruners.BasePruner) -> None:
        super().__init__(problem, workers)
        # Hyperband derives a trial's bracket from the study's name.
        self._study = optuna.create_study(
            study_name=str(problem.seed), sampler=optuna.samplers.TPESampler(seed=problem.seed), pruner=pruner
        )
        self._space, self._distributions = problem.space, to_optuna(problem.space)
        self._trials: dict[int, optuna.Trial] = {}
        self._last: dict[int, float] = {}

    def ask(self, trial: int) -> dict[str, object]:
        self._trials[trial] = self._study.ask()
        return from_optuna_trial(self._space.root, self._trials[trial], self._distributions)

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
        return report.step >= self.rungs[-1] or not trial.should_prune()


# -------------------------------------------------------------------------------------------------- methods, samplers
Make = Callable[[Problem, int], tuple[Method, Sampler]]


def _asha(kind: type[ASHA] | type[PromotionASHA], *, skips: bool = False) -> Callable[[Problem, int], Method]:
    return lambda problem, workers: kind(
        max_trials=ENDLESS,
        max_length=problem.rungs[-1],
        num_rungs=len(problem.rungs),
        divisor=DIVISOR,
        max_concurrent_trials=workers,
        skip_uninformative_rungs=skips,
    )


def _adaptive(problem: Problem, workers: int) -> Method:
    return AdaptiveASHA(
        max_trials=ENDLESS,
        max_length=problem.rungs[-1],
        divisor=DIVISOR,
        max_rungs=len(problem.rungs),
        max_concurrent_trials=workers,
    )


def _full(problem: Problem, workers: int) -> Method:
    return RandomSearch(max_trials=ENDLESS, max_length=problem.rungs[-1], max_concurrent_trials=workers)


def _rounded_up(problem: Problem, workers: int) -> Method:
    return PlainRule(problem, workers, lambda n: math.ceil(n / DIVISOR))


def _random(problem: Problem) -> Sampler:
    """Trial n of one seed gets the same configuration in every way."""
    return RandomSampler(problem.space, problem.seed)


def _tpe(problem: Problem) -> Sampler:
    return OptunaSampler(problem.space, seed=problem.seed, rungs=problem.rungs)


def _multi_fidelity(problem: Problem) -> Sampler:
    return MultiFidelitySampler(problem.space, seed=problem.seed, rungs=problem.rungs)


def _both(method: Callable[[Problem, int], Any], sampler: Callable[[Problem], Any]) -> Make:
    return lambda problem, workers: (method(problem, workers), sampler(problem))


def _study(pruner: Callable[[Problem], optuna.pruners.BasePruner]) -> Make:
    def make(problem: Problem, workers: int) -> tuple[Any, Any]:
        study = Optuna(problem, workers, pruner(problem))
        return study, study

    return make


def _halving(problem: Problem) -> optuna.pruners.BasePruner:
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=problem.rungs[0], reduction_factor=DIVISOR)


def _hyperband(problem: Problem) -> optuna.pruners.BasePruner:
    return optuna.pruners.HyperbandPruner(
        min_resource=problem.rungs[0], max_resource=problem.rungs[-1], reduction_factor=DIVISOR
    )


_METHODS = {
    "stopping": ("dray's ASHA, stopping", _asha(ASHA)),
    "promotion": ("dray's ASHA, promotion", _asha(PromotionASHA)),
    "stopping-skipping": ("dray's ASHA, stopping, that skips rungs", _asha(ASHA, skips=True)),
    "promotion-skipping": ("dray's ASHA, promotion, that skips rungs", _asha(PromotionASHA, skips=True)),
    "adaptive": ("dray's adaptive ASHA", _adaptive),
}
_SAMPLERS = {"random": _random, "tpe": _tpe, "multi_fidelity": _multi_fidelity}

OURS: dict[str, tuple[str, Make]] = {
    f"{method}+{sampler}": (f"{what}; {sampler}", _both(make, sample))
    for method, (what, make) in _METHODS.items()
    for sampler, sample in _SAMPLERS.items()
}
"""dray's methods with its samplers."""

WAYS: dict[str, tuple[str, Make]] = {
    "full": ("random, full trainings", _both(_full, _random)),
    "rule": ("the stopping rule, transcribed; random", _both(PlainRule, _random)),
    "ceil": ("the stopping rule with ceil(n / divisor); random", _both(_rounded_up, _random)),
    **OURS,
    "ray": ("Ray's ASHA; random", _both(RayASHA, _random)),
    "ray+tpe": ("Ray's ASHA with OptunaSearch", _both(RayASHA, RayOptuna)),
    "optuna+halving": ("Optuna's TPE with SuccessiveHalvingPruner", _study(_halving)),
    "optuna+hyperband": ("Optuna's TPE with HyperbandPruner", _study(_hyperband)),
    "optuna+full": ("Optuna's TPE, full trainings", _study(lambda problem: optuna.pruners.NopPruner())),
}
"""By name: a description, and the function that makes it."""
