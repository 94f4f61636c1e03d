"""The searches that search_quality.py compares, by name; a new one is one more entry of `WAYS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from search_peers import DIVISOR, Bohb, Dehb, Neps, Optuna, Peer, Problem, RayASHA, RayOptuna, Smac, SyneTune

from searchers import (
    ASHA,
    Action,
    Event,
    Method,
    Pause,
    PromotionASHA,
    RandomSampler,
    RandomSearch,
    Reported,
    Resume,
    Sampler,
)
from searchers.multi_fidelity import MultiFidelitySampler

ENDLESS = 100_000
"""Trials: more than a search has time for."""


class OneThenTop(Peer):
    """Trains all trials to the first rung, and the best four of each round to the end.

    A round has as many trials as make their first rungs cost as much as four full trainings.
    """

    TOP = 4

    def __init__(self, problem: Problem, workers: int) -> None:
        super().__init__(problem, workers)
        self._size = self.TOP * self.rungs[-1] // self.rungs[0]
        self._round: list[tuple[float, int]] = []
        self._best: list[int] = []

    def on(self, event: Event) -> list[Action]:
        if not isinstance(event, Reported) or event.step > self.rungs[0]:
            return super().on(event)
        assert event.value is not None
        self._round.append((event.value, event.trial))
        if len(self._round) == self._size:
            self._best += [trial for _, trial in sorted(self._round)[: self.TOP]]
            self._round = []
        return [Pause(trial=event.trial), self._next()]

    def _next(self) -> Action:
        return Resume(trial=self._best.pop(0)) if self._best else super()._next()


# -------------------------------------------------------------------------------------------------- methods, samplers
Make = Callable[[Problem, int], tuple[Any, Any]]


@dataclass(frozen=True)
class Way:
    """A search: a description, the function that makes its method and sampler, and the libraries that it uses."""

    what: str
    make: Make
    libraries: tuple[str, ...] = ()

    @property
    def versions(self) -> list[str]:
        """The versions of its libraries."""
        return [f"{library} {version(library)}" for library in self.libraries]


def _asha(kind: type[ASHA] | type[PromotionASHA]) -> Callable[[Problem, int], Method]:
    return lambda problem, workers: kind(
        max_trials=ENDLESS,
        max_length=problem.rungs[-1],
        num_rungs=len(problem.rungs),
        divisor=DIVISOR,
        max_concurrent_trials=workers,
    )


def _auto(problem: Problem, workers: int) -> tuple[Method, Sampler]:
    """It chooses its rungs itself, independently of the steps at which trials report."""
    from searchers.auto import Auto

    method = Auto(max_trials=ENDLESS, max_length=problem.rungs[-1], max_concurrent_trials=workers)
    return method, MultiFidelitySampler(problem.space, seed=problem.seed, rungs=method.rungs)


def _auto_like(problem: Any, workers: int) -> tuple[Method, Sampler]:
    """The same, with first points from three earlier searches of other recorded tasks."""
    from like import Like, way

    return way(Like(3), problem.recorded.task).make(problem, workers)


def _full(problem: Problem, workers: int) -> Method:
    return RandomSearch(max_trials=ENDLESS, max_length=problem.rungs[-1], max_concurrent_trials=workers)


def _random(problem: Problem) -> Sampler:
    """Trial n of one seed gets the same configuration in every way."""
    return RandomSampler(problem.space, problem.seed)


def _tpe(problem: Problem) -> Sampler:
    from searchers.optuna_sampler import OptunaSampler

    return OptunaSampler(problem.space, seed=problem.seed, rungs=problem.rungs)


def _multi_fidelity(problem: Problem) -> Sampler:
    return MultiFidelitySampler(problem.space, seed=problem.seed, rungs=problem.rungs)


def _both(method: Callable[[Problem, int], Any], sampler: Callable[[Problem], Any]) -> Make:
    return lambda problem, workers: (method(problem, workers), sampler(problem))


def _one(make: Callable[..., Any], *arguments: Any) -> Make:
    """Method and sampler in one."""

    def made(problem: Problem, workers: int) -> tuple[Any, Any]:
        both = make(problem, workers, *arguments)
        return both, both

    return made


_RAY = ("ray", "optuna")

WAYS: dict[str, Way] = {
    "auto": Way("dray's `auto`", _auto),
    "auto+like": Way("dray's `auto` with `like`: three earlier searches of other tasks", _auto_like),
    "promotion+multi_fidelity": Way(
        "dray's ASHA, promotion; multi_fidelity", _both(_asha(PromotionASHA), _multi_fidelity)
    ),
    "stopping+tpe": Way("dray's ASHA, stopping; tpe", _both(_asha(ASHA), _tpe), ("optuna",)),
    "promotion+random": Way("dray's ASHA, promotion; random", _both(_asha(PromotionASHA), _random)),
    "stopping+random": Way("dray's ASHA, stopping; random", _both(_asha(ASHA), _random)),
    "ray+optuna": Way("Ray's ASHA with OptunaSearch", _both(RayASHA, RayOptuna), _RAY),
    "ray+random": Way("Ray's ASHA; random", _both(RayASHA, _random), _RAY[:1]),
    "optuna+hyperband": Way("Optuna's TPE with HyperbandPruner", _one(Optuna, "HyperbandPruner"), ("optuna",)),
    "optuna+halving": Way(
        "Optuna's TPE with SuccessiveHalvingPruner", _one(Optuna, "SuccessiveHalvingPruner"), ("optuna",)
    ),
    "optuna+full": Way("Optuna's TPE, full trainings", _one(Optuna, "NopPruner"), ("optuna",)),
    "syne-tune+asha": Way("Syne Tune's ASHA", _one(SyneTune, "ASHA"), ("syne_tune",)),
    "syne-tune+bohb": Way("Syne Tune's BOHB", _one(SyneTune, "BOHB"), ("syne_tune",)),
    "syne-tune+cqr": Way("Syne Tune's ASHACQR", _one(SyneTune, "ASHACQR"), ("syne_tune",)),
    "dehb": Way("DEHB", _one(Dehb), ("dehb", "ConfigSpace")),
    "bohb": Way("HpBandSter's BOHB", _one(Bohb), ("hpbandster", "ConfigSpace")),
    "smac": Way("SMAC3's multi-fidelity facade", _one(Smac), ("smac", "ConfigSpace")),
    "neps": Way("NePS's Hyperband", _one(Neps), ("neural-pipeline-search",)),
    "one-then-top": Way("the first rung for all, then the best four to the end", _both(OneThenTop, _random)),
    "full": Way("random, full trainings", _both(_full, _random)),
}
"""By name."""
