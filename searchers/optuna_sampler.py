"""Hyperparameters from Optuna's samplers. `optuna_trials` selects the trials that they learn from.

* Proposals begin when enough trials can be compared. With TPE every fourth trial stays random, so that early results
  cannot mislead the sampler forever; this costs no regret.
* A point that failed is not proposed again.
* The sampler's state depends only on the events, and each proposal has its own random generator, seeded by the search's
  seed and the trial's number. A replayed search therefore continues as the original would have.

Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011), for TPE; Akiba et al., "Optuna" (arXiv
1907.10902).
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from searchers.domains import parameters
from searchers.errors import FieldError, did_you_mean
from searchers.events import Event, Exited, Reported, Started, assert_never
from searchers.memory_model import MemoryModel
from searchers.objectives import Objectives
from searchers.optuna_space import encode, from_optuna_trial, to_optuna
from searchers.optuna_trials import AskStorage, SamplerTrial, SamplerTrials, frozen
from searchers.samplers import STARTUP
from searchers.space import Space

_ALIASES = {"tpe": "TPESampler", "gp": "GPSampler", "cmaes": "CmaEsSampler", "nsga2": "NSGAIISampler"}
_WITHOUT_NOTES = {"TPESampler", "GPSampler", "RandomSampler"}
"""These use only the trials' parameters and values. Others keep notes in the `system_attrs` of the study and trials."""

_STARTUP = STARTUP["tpe"]  # TPE's default number of compared trials before the first proposal

_POPULATION = 10
"""NSGA-II's default generation size. Optuna's default of 50 is more trials than reach a high rung in most searches;
with 8 to 16 a search leaves out a fifth less of the front's hypervolume."""

_RANDOM_EVERY = 4  # every fourth trial of TPE's is random

_ATTEMPTS, _RANDOM_ATTEMPTS = 8, 100
"""Proposals and then random draws per trial, while the constraint rejects them or they have failed before. If all
points of a small space have failed, one of them is tried again."""


@dataclass(frozen=True, slots=True)
class _Proposal:
    """The last proposal of Optuna's sampler, with the notes that the sampler kept for it."""

    trial: int
    params: dict[str, Any]
    notes: dict[str, Any]
    study_notes: dict[str, Any]


class OptunaSampler:
    """One of Optuna's samplers.

    Args:
        space: The space to draw from.
        seed: Any integer.
        rungs: `Method.rungs`. Without rungs, trials are compared once they have completed.
        name: "tpe", "gp", "nsga2", "cmaes", or the name of a class in `optuna.samplers`.
        options: Arguments of Optuna's sampler, e.g. {"n_startup_trials": 20}. With "tpe", `n_startup_trials` (default
            10) counts only trials that can be compared, and `multivariate` is true by default. With "nsga2",
            `population_size` is 10 by default.
        objectives: Those of a search with several metrics, whose losses the sampler then learns from. Not with "cmaes".

    Raises:
        FieldError: The sampler does not exist, needs a package that is not installed, or does not take these options or
            objectives. Paths begin with `searcher.sampler`.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        rungs: Sequence[float],
        name: str = "tpe",
        options: Mapping[str, object] | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self.space, self.seed = space, seed
        self._class, self._options = _sampler_class(name, options or {})
        if objectives is not None:
            _check_takes(self._class, name, objectives)
        self._has_notes = self._class.__name__ not in _WITHOUT_NOTES
        self._is_tpe = self._class.__name__ == "TPESampler"
        self._startup = 0
        if self._is_tpe:
            self._startup = self._options.pop("n_startup_trials", _STARTUP)
            # Use Optuna 5's defaults with Optuna 4 too.
            self._options = {"n_startup_trials": 0, "multivariate": True, "constant_liar": True} | self._options
            if self._options["multivariate"] and any(each.parent for each in parameters(space.root)):
                self._options = {"group": True} | self._options
        elif self._class.__name__ == "NSGAIISampler":
            self._options = {"population_size": _POPULATION} | self._options
        self._distributions = to_optuna(space, wide_as_float=self._is_tpe)
        self.trials = SamplerTrials(
            rungs, enough=self._startup or _STARTUP, background=self._is_tpe, all_compared=self._has_notes
        )
        self._pareto = objectives is not None
        self._memory = MemoryModel(space)
        self._failed_points: set[str] = set()  # as JSON
        self._storage = AskStorage(1 if objectives is None else len(objectives.objectives))
        self._study = optuna.load_study(study_name="search", storage=self._storage, sampler=self._sampler("0"))
        self._proposal: _Proposal | None = None  # valid until the next event

    def ask(self, trial: int) -> dict[str, object]:
        if self.trials.num_compared >= self._startup and not (self._is_tpe and trial % _RANDOM_EVERY == 0):
            for attempt in range(_ATTEMPTS):
                rng = Random(f"{self.seed}:{trial}:{attempt}:fits")
                close = self._memory.closest(self._propose(trial, attempt), rng)
                if close is not None and self.space.allows(close) and _as_json(close) not in self._failed_points:
                    return close
        rng = Random(f"{self.seed}:{trial}")  # like RandomSampler
        for _ in range(_RANDOM_ATTEMPTS):
            point = self._memory.sample(rng)
            if _as_json(point) not in self._failed_points:
                break
        return point

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        if not self._has_notes:  # a proposal that is moved would have no notes, and count for no generation
            self._memory.tell(event, hparams)
        match event:
            case Started(trial=trial):
                self.trials.start(trial, self.trials.get(trial) or self._new_trial(trial, hparams))
            case Reported(trial=trial, step=step, losses=losses) if self._pareto:
                self.trials.report(trial, step, math.inf if losses is None else losses)
            case Reported(trial=trial, step=step, value=value):
                if value is not None:
                    self.trials.report(trial, step, value)
            case Exited(trial=trial, reason=reason):
                if self.trials.end(trial, "errored" if self._has_notes and reason == "out_of_memory" else reason):
                    self._failed_points.add(_as_json(hparams))
            case _:
                assert_never(event)
        self._proposal = None

    def extended(self, rungs: Sequence[float]) -> None:
        """Compare trials from a fifth of the new length on, once enough trials have reached it."""
        self.trials.extended(rungs)
        self._proposal = None

    def shown(self) -> list[FrozenTrial]:
        """Return the trials that Optuna's sampler would see now, ordered by number."""
        return self.trials.shown(self._distributions)

    def _new_trial(self, trial: int, hparams: Mapping[str, object]) -> SamplerTrial:
        params = encode(self.space.root, hparams, self._distributions)
        if not self._has_notes:
            return SamplerTrial(params=params)
        # The notes belong to the proposal of this point. During a replay there was none, so it is computed again.
        if self._proposal is None or self._proposal.trial != trial:
            self.ask(trial)
        if self._proposal is not None and self._proposal.params == params:
            self._storage.study_notes = self._proposal.study_notes
            return SamplerTrial(params=params, notes=self._proposal.notes)
        return SamplerTrial(params=params)

    def _propose(self, trial: int, attempt: int) -> dict[str, object]:
        """Return a point from Optuna's sampler. Changes only `_proposal`."""
        committed = self._storage.study_notes
        self._storage.study_notes = dict(committed)
        self._storage.history = self.shown()
        self._storage.current = frozen(trial, SamplerTrial(params={}), TrialState.RUNNING, distributions={})
        self._study.sampler = self._sampler(f"{trial}:{attempt}")
        proposed = self._study.ask()
        point = from_optuna_trial(self.space.root, proposed, self._distributions)
        notes = self._storage.current.system_attrs
        self._proposal = _Proposal(trial, proposed.params, notes, self._storage.study_notes)
        self._storage.study_notes = committed
        return point

    def _sampler(self, key: str) -> BaseSampler:
        # A low-discrepancy sequence needs a common seed; other samplers get independent random numbers for each trial.
        key = "sequence" if self._class.__name__ == "QMCSampler" else key
        return _new(self._class, self._options, seed=Random(f"{self.seed}:{key}:optuna").getrandbits(31))


def _as_json(point: Mapping[str, object]) -> str:
    return json.dumps(point, sort_keys=True)


def _sampler_class(name: str, options: Mapping[str, object]) -> tuple[type[BaseSampler], dict[str, Any]]:
    """Return the sampler's class and options, after creating an instance to check them."""
    class_name = _ALIASES.get(name, name)
    known = [each for each in optuna.samplers.__all__ if _takes_seed(getattr(optuna.samplers, each))]
    if class_name not in known:
        names = sorted([*_ALIASES, *known])
        raise _fault("name", f"must be random, or one of {', '.join(names)}, got {name!r}{did_you_mean(name, names)}")
    kind: type[BaseSampler] = getattr(optuna.samplers, class_name)
    takes = [option for option in inspect.signature(kind).parameters if option != "seed"]
    unknown = [option for option in options if option not in takes]
    if unknown:
        path = "searcher.sampler.options"
        raise FieldError(
            [(f"{path}.{each}", f"is not an option of {class_name}{did_you_mean(each, takes)}") for each in unknown]
        )
    startup = options.get("n_startup_trials", _STARTUP)
    if not isinstance(startup, int) or isinstance(startup, bool) or startup < 0:
        raise _fault("options.n_startup_trials", f"must be an integer >= 0, got {startup!r}")
    try:
        _new(kind, options, seed=0)
        if class_name == "CmaEsSampler":
            importlib.import_module("cmaes")  # Optuna imports it at the first proposal
    except ImportError as error:
        raise _fault("name", f"{name!r} needs a package that is not installed: {error}") from error
    except (TypeError, ValueError) as error:
        raise _fault("options", f"{class_name} does not accept {dict(options)}: {error}") from error
    return kind, dict(options)


def _check_takes(kind: type[BaseSampler], name: str, objectives: Objectives) -> None:
    if kind.__name__ == "CmaEsSampler":
        metrics = "; ".join(map(str, objectives.metrics))
        message = f"{name} takes one objective without constraints, but searcher.metrics has: {metrics}"
        raise _fault("name", f"{message}. Use tpe, gp, nsga2 or random")
    if objectives.constraints and not hasattr(FrozenTrial, "constraints"):
        message = f"{name} needs Optuna 5 for constraints, but {optuna.__version__} is installed"
        raise _fault("name", f"{message}; upgrade it, or use random")


def _fault(field: str, message: str) -> FieldError:
    return FieldError([(f"searcher.sampler.{field}", message)])


def _takes_seed(kind: object) -> bool:
    return isinstance(kind, type) and "seed" in inspect.signature(kind).parameters


def _new(kind: type[BaseSampler], options: Mapping[str, object], *, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # otherwise each proposal would warn
        return kind(**options, seed=seed)  # type: ignore[call-arg]
