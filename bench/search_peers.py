"""Searches of other libraries, for search_quality.py, in simulations.

Each is called as its own driver calls it, event by event and without processes. A library is imported when a search
needs it, so that a missing one only drops its ways. Installed by `pip install --no-deps`, since their pins contradict
each other: syne_tune, dehb, hpbandster, ConfigSpace, smac and neural-pipeline-search, then what they import.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from searchers import Action, Create, Event, Exited, Pause, Reported, Resume, Space, Stop
from searchers.domains import Categorical, build, parameters
from searchers.numeric_domains import Int, Log

if TYPE_CHECKING:
    import optuna

DIVISOR = 3


class Problem(Protocol):
    """A search problem.

    Attributes:
        seed: The seed of the search.
        space: The space to draw from.
        rungs: Lengths at which trials report, ascending; the last is that of a full training.
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


class Peer:
    """Runs as many trials as workers, without end; `continues` decides whether a trial continues."""

    def __init__(self, problem: Problem, workers: int) -> None:
        self.rungs, self._created = problem.rungs, workers

    def start(self) -> list[Action]:
        return [Create(trial=trial) for trial in range(self._created)]

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, Reported) and not self.continues(event):
            return [Stop(trial=event.trial)]
        return [self._next()] if isinstance(event, Exited) else []

    def continues(self, report: Reported) -> bool:
        return True

    def _next(self) -> Action:
        self._created += 1
        return Create(trial=self._created - 1)


# ---------------------------------------------------------------------------------------------------------- Ray, Optuna
@dataclass(frozen=True)
class TuneTrial:
    """The part of a Tune trial that its scheduler needs."""

    trial_id: str


class RayASHA(Peer):
    """Ray Tune's scheduler itself, called as Tune calls it."""

    def __init__(self, problem: Problem, workers: int) -> None:
        from ray.tune.schedulers import AsyncHyperBandScheduler

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
        return bool(decision == self._scheduler.CONTINUE or report.step >= self.rungs[-1])


class RayOptuna:
    """Ray Tune's OptunaSearch itself, called as Tune calls it: it sees a stopped trial as complete."""

    def __init__(self, problem: Problem) -> None:
        from ray.tune.search.optuna import OptunaSearch

        from searchers.optuna_space import to_optuna

        self._space, self._distributions = problem.space, to_optuna(problem.space)
        self._search = OptunaSearch(space=self._suggest, metric="loss", mode="min", seed=problem.seed)
        self._last: dict[int, dict[str, Any]] = {}

    def _suggest(self, trial: optuna.Trial) -> None:
        from searchers.optuna_space import from_optuna_trial

        from_optuna_trial(self._space.root, trial, self._distributions)

    def ask(self, trial: int) -> dict[str, object]:
        return point(self._space, self._search.suggest(str(trial)))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        match event:
            case Reported(trial=trial, step=step, value=value):
                self._last[trial] = {"training_iteration": int(step), "loss": value}
                self._search.on_trial_result(str(trial), self._last[trial])
            case Exited(trial=trial):
                self._search.on_trial_complete(str(trial), self._last.pop(trial))


class Optuna(Peer):
    """A study of Optuna with TPE: method and sampler in one, as its `optimize` does it.

    Args:
        problem, workers: as for `Peer`.
        pruner: of `optuna.pruners`, with the arguments that depend on the problem.
    """

    def __init__(self, problem: Problem, workers: int, pruner: str) -> None:
        import optuna

        from searchers.optuna_space import to_optuna

        super().__init__(problem, workers)
        halving = {"min_resource": self.rungs[0], "reduction_factor": DIVISOR}
        arguments = {
            "SuccessiveHalvingPruner": halving,
            "HyperbandPruner": {**halving, "max_resource": self.rungs[-1]},
            "NopPruner": {},
        }
        # Hyperband derives a trial's bracket from the study's name.
        self._study = optuna.create_study(
            study_name=str(problem.seed),
            sampler=optuna.samplers.TPESampler(seed=problem.seed),
            pruner=getattr(optuna.pruners, pruner)(**arguments[pruner]),
        )
        self._space, self._distributions = problem.space, to_optuna(problem.space)
        self._trials: dict[int, optuna.Trial] = {}
        self._last: dict[int, float] = {}

    def ask(self, trial: int) -> dict[str, object]:
        from searchers.optuna_space import from_optuna_trial

        self._trials[trial] = self._study.ask()
        return from_optuna_trial(self._space.root, self._trials[trial], self._distributions)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        if isinstance(event, Exited):
            from optuna.trial import TrialState

            trial = self._trials.pop(event.trial)
            if event.reason == "stopped":
                self._study.tell(trial, state=TrialState.PRUNED)  # with its last value, by Optuna's rule
            else:
                self._study.tell(trial, self._last.pop(event.trial))

    def continues(self, report: Reported) -> bool:
        assert report.value is not None
        trial = self._trials[report.trial]
        self._last[report.trial] = report.value
        trial.report(report.value, int(report.step))
        return report.step >= self.rungs[-1] or not trial.should_prune()


# ---------------------------------------------------------------------------- Syne Tune, DEHB, HpBandSter, SMAC, NePS
def point(space: Space, params: Mapping[str, Any]) -> dict[str, object]:
    """The point with these flat parameters: a category by its index, numbers rounded to their domains.

    Parameters of other branches of a conditional space are ignored.
    """

    def value_of(name: str, domain: Any) -> Any:
        if isinstance(domain, Categorical):
            return int(params[name])
        low, high = domain.bounds if isinstance(domain, Log) else (domain.minval, domain.maxval)
        return domain.nearest(min(max(params[name], low), high))

    found = build(space.root, value_of)
    assert isinstance(found, dict)
    return found


def flat(space: Space, category: Callable[..., Any], number: Callable[..., Any]) -> dict[str, Any]:
    """The space in the terms of a peer.

    Args:
        category: given a name and the number of categories.
        number: given a name, the ends, whether it is an integer, and whether its scale is logarithmic.
    """
    found = {}
    for each in parameters(space.root):
        match each.domain:
            case Categorical(vals=vals):
                found[each.name] = category(each.name, len(vals))
            case Log(bounds=(low, high)):
                found[each.name] = number(each.name, low, high, False, True)
            case domain:
                integer = isinstance(domain, Int)
                log = isinstance(domain, Int) and domain.log
                found[each.name] = number(each.name, domain.minval, domain.maxval, integer, log)
    return found


class SyneTune(Peer):
    """A scheduler of Syne Tune with its searcher: method and sampler in one, as its `Tuner` does it."""

    def __init__(self, problem: Problem, workers: int, name: str) -> None:
        from syne_tune import config_space
        from syne_tune.optimizer import baselines

        kinds = {  # by whether it is an integer, and logarithmic
            (False, False): config_space.uniform,
            (False, True): config_space.loguniform,
            (True, False): config_space.randint,
            (True, True): config_space.lograndint,
        }
        super().__init__(problem, workers)
        self._space = problem.space
        self._scheduler = getattr(baselines, name)(
            flat(
                problem.space,
                lambda name, count: config_space.choice(list(range(count))),
                lambda name, low, high, *kind: kinds[kind](low, high),
            ),
            metric="loss",
            time_attr="step",
            max_t=self.rungs[-1],
            grace_period=self.rungs[0],
            reduction_factor=DIVISOR,
            random_seed=problem.seed,
        )
        self._trials: dict[int, Any] = {}

    def ask(self, trial: int) -> dict[str, object]:
        from syne_tune.backend.trial_status import Trial

        config = self._scheduler.suggest().config
        self._trials[trial] = Trial(trial, config, datetime.min)
        self._scheduler.on_trial_add(self._trials[trial])
        return point(self._space, config)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass

    def continues(self, report: Reported) -> bool:
        trial = self._trials[report.trial]
        decision = self._scheduler.on_trial_result(trial, {"loss": report.value, "step": int(report.step)})
        if decision != "STOP":
            return True
        # Also at `max_t`, where the trial ends by itself here.
        self._scheduler.on_trial_remove(self._trials.pop(report.trial))
        return report.step >= self.rungs[-1]


class Evaluations(Peer):
    """Method and sampler of a library that evaluates points at a rung, each time from the beginning of training."""

    def __init__(self, problem: Problem, workers: int) -> None:
        import ConfigSpace

        super().__init__(problem, workers)
        self.space = ConfigSpace.ConfigurationSpace(seed=problem.seed)
        kinds = {True: ConfigSpace.UniformIntegerHyperparameter, False: ConfigSpace.UniformFloatHyperparameter}
        self.space.add(
            *flat(
                problem.space,
                lambda name, count: ConfigSpace.CategoricalHyperparameter(name, list(range(count))),
                lambda name, low, high, integer, log: kinds[integer](name, low, high, log=log),
            ).values()
        )
        self._problem, self._jobs = problem, dict[int, tuple[Any, int]]()

    def ask(self, trial: int) -> dict[str, object]:
        job, config, rung = self.job()
        self._jobs[trial] = job, rung
        return point(self._problem.space, config)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass

    def continues(self, report: Reported) -> bool:
        job, rung = self._jobs[report.trial]
        if report.step < self.rungs[rung]:
            return True
        assert report.value is not None
        self.finish(job, report.value)
        return report.step >= self.rungs[-1]

    def job(self) -> tuple[Any, Mapping[str, Any], int]:
        """The next job, its configuration, and the number of the rung to evaluate it at."""
        raise NotImplementedError

    def finish(self, job: Any, loss: float) -> None:
        raise NotImplementedError


class Dehb(Evaluations):
    """DEHB, by its `ask` and `tell`."""

    def __init__(self, problem: Problem, workers: int) -> None:
        from dehb import DEHB
        from loguru import logger

        super().__init__(problem, workers)
        self._log = tempfile.TemporaryDirectory()
        top = len(self.rungs) - 1
        self._dehb = DEHB(
            f=None,
            cs=self.space,
            min_fidelity=DIVISOR**-top,
            max_fidelity=1,
            eta=DIVISOR,
            n_workers=1,
            seed=problem.seed,
            save_freq="end",
            output_path=self._log.name,
        )
        logger.remove()  # it also logs to a file
        self._rungs = {float(fidelity): rung for rung, fidelity in enumerate(self._dehb.fidelities)}

    def job(self) -> tuple[Any, Mapping[str, Any], int]:
        job = self._dehb.ask()
        return job, job["config"], self._rungs[float(job["fidelity"])]

    def finish(self, job: Any, loss: float) -> None:
        self._dehb.tell(job, {"fitness": loss, "cost": job["fidelity"]})


class Bohb(Evaluations):
    """HpBandSter's BOHB: its iterations and its model, called as its `Master` calls them."""

    def __init__(self, problem: Problem, workers: int) -> None:
        import numpy as np
        from hpbandster.optimizers.config_generators.bohb import BOHB

        super().__init__(problem, workers)
        np.random.seed(problem.seed)  # its model draws from NumPy's global generator
        self._model = BOHB(self.space)
        count = len(self.rungs)
        self._master = SimpleNamespace(
            max_SH_iter=count, eta=DIVISOR, budgets=np.arange(count), config_generator=self._model
        )
        self._iterations: list[Any] = []

    def job(self) -> tuple[Any, Mapping[str, Any], int]:
        from hpbandster.core.dispatcher import Job
        from hpbandster.optimizers import BOHB

        for iteration in self._iterations:
            if not iteration.is_finished and (run := iteration.get_next_run()) is not None:
                break
        else:
            number = len(self._iterations)
            iteration = BOHB.get_next_iteration(self._master, number, {"result_logger": None})
            self._iterations.append(iteration)
            run = iteration.get_next_run()
        key, config, rung = run
        job = Job(key, config=config, budget=rung)
        job.timestamps = {"submitted": 0, "started": 0, "finished": 0}
        return (iteration, job), config, int(rung)

    def finish(self, job: Any, loss: float) -> None:
        iteration, done = job
        done.result = {"loss": loss, "info": {}}
        iteration.register_result(done)
        self._model.new_result(done)


class Smac(Evaluations):
    """SMAC's multi-fidelity facade: Hyperband with a random forest, by its `ask` and `tell`."""

    TRIALS = 150
    """About as many evaluations as a search has time for; a quarter of them are SMAC's random initial design."""

    def __init__(self, problem: Problem, workers: int) -> None:
        from smac import MultiFidelityFacade, Scenario

        super().__init__(problem, workers)
        self._log = tempfile.TemporaryDirectory()
        scenario = Scenario(
            self.space,
            output_directory=Path(self._log.name),
            deterministic=True,
            n_trials=self.TRIALS,
            min_budget=self.rungs[0],
            max_budget=self.rungs[-1],
            seed=problem.seed,
        )
        self._smac = MultiFidelityFacade(scenario, logging_level=False)

    def job(self) -> tuple[Any, Mapping[str, Any], int]:
        info = self._smac.ask()
        return info, info.config, self.rungs.index(round(info.budget))

    def finish(self, job: Any, loss: float) -> None:
        from smac.runhistory import TrialValue

        self._smac.tell(job, TrialValue(cost=loss), save=False)


class Neps(Peer):
    """NePS's choice for a space with a fidelity and without priors: Hyperband, by its `ask` and `tell`.

    A promoted configuration continues from its checkpoint. Its freeze-thaw search, `ifbo`, would download its model.
    """

    def __init__(self, problem: Problem, workers: int) -> None:
        import neps
        import torch

        super().__init__(problem, 0)
        torch.manual_seed(problem.seed)  # it draws from PyTorch's global generator
        self._space, self._workers = problem.space, workers
        kinds = {True: neps.HPOInteger, False: neps.HPOFloat}
        elements = flat(
            problem.space,
            lambda name, count: neps.HPOCategorical(list(range(count))),
            lambda name, low, high, integer, log: kinds[integer](low, high, log=log),
        )
        step = neps.HPOInteger(self.rungs[0], self.rungs[-1], is_fidelity=True)
        self._neps = neps.AskAndTell(neps.algorithms.hyperband(neps.SearchSpace({**elements, "step": step})))
        self._jobs: dict[int, Any] = {}  # by trial
        self._trials: dict[str, int] = {}  # by the name that a job has in NePS

    def start(self) -> list[Action]:
        return [self._next() for _ in range(self._workers)]

    def ask(self, trial: int) -> dict[str, object]:
        return point(self._space, self._jobs[trial].config)

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass

    def on(self, event: Event) -> list[Action]:
        if not isinstance(event, Reported):
            return super().on(event)
        job = self._jobs[event.trial]
        if event.step < job.config["step"]:
            return []
        assert event.value is not None
        self._neps.tell(job, event.value)
        return [] if event.step >= self.rungs[-1] else [Pause(trial=event.trial), self._next()]

    def _next(self) -> Action:
        job = self._neps.ask()
        action = super()._next() if (earlier := job.metadata.previous_trial_id) is None else None
        trial = self._created - 1 if action else self._trials[earlier]
        self._jobs[trial], self._trials[job.id] = job, trial
        return action or Resume(trial=trial)
