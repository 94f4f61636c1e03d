"""Hyperparameters from Optuna's samplers, which are shown only trials that can be compared.

What a model-based sampler learns from matters more than the scheduler that stops its trials (measured: a normalised
regret of .09 against .15 to .27, on the same trials). So:

* Trials are compared at high fidelity: those that reached a rung of at least a fifth of the full length, each by its
  last value. A trial that was stopped earlier is told neither as complete nor as pruned: its value says how fast it
  started, and where the best start slowly, the sampler would unlearn them. Until enough trials came that far, draws
  are random.
* TPE weighs where the good trials are against where the others are. If the others were only trials that came far, TPE
  would avoid the region they came from. So the first trials, which were drawn at random, are its background, however
  they ended: they are told without a value, like running trials (regret .086 -> .078). And every fourth trial stays
  random, so that TPE is not misled for good; that costs no regret.
* Once a search is extended to a greater length, trials are compared at a higher rung, as soon as enough have reached
  it. Until then the earlier values are the best that is known.
* A trial that failed (out of memory, invalid, diverged) is told as the worst, and its point is not proposed again.
* Running trials are told as running, so that workers that ask at the same time get different answers.
* Optuna is shown a bounded number of trials: the best, the latest, and the latest failures. An ask costs the same after
  100,000 trials as after 100.

The sampler's state depends on events alone, and each ask has its own random generator, seeded by the search's seed and
the trial's number. So a search that is replayed goes on as the one that died.

Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011), for TPE; Akiba et al., "Optuna" (arXiv
1907.10902). Learning from the highest fidelity that has enough points is the idea of BOHB (Falkner et al., arXiv
1807.01774).
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import math
import sys
import warnings
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from searchers.domains import closest
from searchers.errors import FieldError
from searchers.events import Event, Exited, Reported, Started, assert_never
from searchers.optuna_space import encoded, from_optuna_trial, is_conditional, to_optuna
from searchers.optuna_storage import AskStorage, SamplerTrial, frozen
from searchers.space import Space

_SHORT = {"tpe": "TPESampler", "gp": "GPSampler", "cmaes": "CmaEsSampler"}
_FROM_TRIALS_ALONE = {"TPESampler", "GPSampler", "RandomSampler"}
"""These use only the trials' parameters and values. Others keep notes, in the `system_attrs` of study and trials."""

_FAR = 0.2
"""Trials are compared at rungs of at least this share of the full length: the top two, with a divisor from 3 to 5."""

_ENOUGH = 10
"""Trials that must have reached the higher rungs of an extended search before only those are compared; for TPE it is
`n_startup_trials`."""

_BEST, _LATEST, _RUNNING, _FAILED, _BACKGROUND = 30, 50, 16, 16, 60
"""At most so many trials of each kind are shown to Optuna."""

_RANDOM_EVERY = 4
"""Every fourth of TPE's trials is drawn at random, so that it is not misled for good."""

_ATTEMPTS, _RANDOM_ATTEMPTS = 8, 100
"""How often Optuna is asked for one trial, while the constraint refuses its points or they have failed before; then so
many random draws. If all points of a small space have failed, one of them is tried again."""


class OptunaSampler:
    """One of Optuna's samplers.

    Args:
        space: To draw from.
        seed: Any integer.
        rungs: `Method.rungs`. If there are none, trials are compared once they have completed.
        name: "tpe", "gp", "cmaes", or the name of a class in `optuna.samplers`.
        options: The sampler's arguments, e.g. {"n_startup_trials": 20}. With "tpe", `n_startup_trials` (10 by default)
            counts the trials that are compared, and `multivariate` is true by default.

    Raises:
        FieldError: There is no such sampler, it needs a package that is not installed, or it does not take these
            options. Paths begin with `searcher.sampler`.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        rungs: Sequence[float],
        name: str = "tpe",
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.space, self.seed = space, seed
        self._class, self._options = _sampler_class(name, options or {})
        self._has_notes = self._class.__name__ not in _FROM_TRIALS_ALONE
        self._startup = 0
        self._is_tpe = self._class.__name__ == "TPESampler"
        if self._is_tpe:
            self._startup = self._options.pop("n_startup_trials", 10)
            # Optuna 5's defaults, also of Optuna 4.
            self._options = {"n_startup_trials": 0, "multivariate": True, "constant_liar": True} | self._options
            if self._options["multivariate"] and is_conditional(space.root):
                self._options = {"group": True} | self._options
        self._distributions = to_optuna(space, wide_as_float=self._is_tpe)
        self._floor = self._next_floor = _floor(rungs)
        # A sampler's notes may refer to any earlier trial.
        self._pool = _Pool(best=_BEST, latest=_LATEST) if not self._has_notes else _Pool(best=0, latest=sys.maxsize)
        self._trials: dict[int, SamplerTrial] = {}  # those in the pool or in one of the next three
        self._running: dict[int, None] = {}  # in order of their start; paused ones too
        self._failed: dict[int, None] = {}
        self._background: dict[int, None] = {}  # the first ones, however they ended
        self._refused: set[str] = set()  # points that failed, as JSON
        self._store = AskStorage()
        self._study = optuna.load_study(study_name="search", storage=self._store, sampler=self._sampler("0"))
        self._asked: tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]] | None = None

    def ask(self, trial: int) -> dict[str, object]:
        """The trial's hyperparameters.

        Raises:
            SpaceError: The space's constraint cannot be met.
        """
        if len(self._pool) >= self._startup and not (self._is_tpe and trial % _RANDOM_EVERY == 0):
            for attempt in range(_ATTEMPTS):
                point = self._propose(trial, attempt)
                if self.space.allows(point) and _as_json(point) not in self._refused:
                    return point
        rng = Random(f"{self.seed}:{trial}")  # as RandomSampler draws
        for _ in range(_RANDOM_ATTEMPTS):
            point = self.space.sample(rng)
            if _as_json(point) not in self._refused:
                break
        return point

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Learn from the event."""
        match event:
            case Started(trial=trial):
                if trial not in self._trials:
                    self._trials[trial] = self._begun(trial, hparams)
                    if self._is_tpe and len(self._background) < _BACKGROUND:
                        self._background[trial] = None
                self._running[trial] = None
            case Reported(trial=trial, step=step, value=value):
                if trial in self._trials and value is not None:
                    self._trials[trial].last, self._trials[trial].step = value, step
                    if step >= self._floor:
                        self._compare(trial)
            case Exited(trial=trial, reason=reason):
                self._running.pop(trial, None)
                if trial in self._trials:
                    failed = reason in ("errored", "diverged", "invalid_hp") or self._trials[trial].last == math.inf
                    if failed and reason != "canceled":
                        self._fail(trial, hparams)
                    elif reason == "completed":
                        self._compare(trial)
                    self._forget([trial])
            case _:
                assert_never(event)
        self._asked = None  # the answer may be another one now

    def extended(self, rungs: Sequence[float]) -> None:
        """Compare trials at a fifth of the new length or beyond, as soon as enough have reached it."""
        self._next_floor = _floor(rungs)
        self._raise_floor()
        self._asked = None

    def _raise_floor(self) -> None:
        if self._next_floor == self._floor:
            return
        below = [trial for trial in self._pool.values() if self._trials[trial].step < self._next_floor]
        if len(self._pool) - len(below) < (self._startup or _ENOUGH):
            return
        self._floor = self._next_floor
        if not self._has_notes:  # notes may refer to any earlier trial
            for trial in below:
                self._pool.remove(trial)
            self._forget(below)

    def _begun(self, trial: int, hparams: Mapping[str, object]) -> SamplerTrial:
        params = encoded(self.space.root, hparams, self._distributions)
        if not self._has_notes:
            return SamplerTrial(params=params)
        # The notes that the sampler made when it proposed this point are the trial's. In a replay it is asked again.
        if self._asked is None or self._asked[0] != trial:
            self.ask(trial)
        if self._asked is not None and self._asked[1] == params:
            self._store.study_notes = self._asked[3]
            return SamplerTrial(params=params, notes=self._asked[2])
        return SamplerTrial(params=params)

    def _compare(self, trial: int) -> None:
        """Add the trial's last value to those that are compared."""
        value = self._trials[trial].last
        if value is not None and math.isfinite(value):
            self._forget(self._pool.put(trial, value))
            self._raise_floor()

    def _fail(self, trial: int, hparams: Mapping[str, object]) -> None:
        self._pool.remove(trial)
        self._refused.add(_as_json(hparams))
        self._failed[trial] = None
        if len(self._failed) > _FAILED:
            oldest = next(iter(self._failed))
            del self._failed[oldest]
            self._forget([oldest])

    def _forget(self, trials: Sequence[int]) -> None:
        """Drop the trials that nothing refers to any more."""
        for trial in trials:
            if not any(trial in kept for kept in (self._pool, self._running, self._failed, self._background)):
                self._trials.pop(trial, None)

    def _propose(self, trial: int, attempt: int) -> dict[str, object]:
        """A point from Optuna's sampler. Changes only `_asked`."""
        committed = self._store.study_notes
        self._store.study_notes = dict(committed)
        self._store.history = self._history()
        self._store.current = frozen(trial, SamplerTrial(params={}), TrialState.RUNNING, distributions={})
        self._study.sampler = self._sampler(f"{trial}:{attempt}")
        asked = self._study.ask()
        point = from_optuna_trial(self.space.root, asked, self._distributions)
        self._asked = (trial, asked.params, self._store.current.system_attrs, self._store.study_notes)
        self._store.study_notes = committed
        return point

    def _history(self) -> list[FrozenTrial]:
        """The trials that Optuna is shown, by number."""
        values = self._pool.values()
        history = [self._seen(trial, TrialState.COMPLETE, value) for trial, value in values.items()]
        if values:
            # At most as many failures as other trials: with more, some failures would count among the best.
            worst = max(values.values())
            some = itertools.islice(reversed(self._failed), len(values))
            history += [self._seen(trial, TrialState.COMPLETE, worst) for trial in some]
        latest = itertools.islice(reversed(self._running), _RUNNING)
        told = {trial.number for trial in history}
        others = dict.fromkeys(itertools.chain(latest, self._background))
        history += [self._seen(trial, TrialState.RUNNING) for trial in others if trial not in told]
        return sorted(history, key=lambda trial: trial.number)

    def _seen(self, trial: int, state: TrialState, value: float | None = None) -> FrozenTrial:
        known = self._trials[trial]
        return frozen(trial, known, state, value=value, distributions=self._distributions)

    def _sampler(self, key: str) -> BaseSampler:
        # A low-discrepancy sequence needs one seed; all others get independent random numbers for each trial.
        key = "sequence" if self._class.__name__ == "QMCSampler" else key
        return _new(self._class, self._options, seed=Random(f"{self.seed}:{key}:optuna").getrandbits(31))


def _floor(rungs: Sequence[float]) -> float:
    return min((rung for rung in rungs if rung >= _FAR * rungs[-1]), default=math.inf)


class _Pool:
    """The trials that are compared: a bounded number of the best, and of the latest."""

    def __init__(self, *, best: int, latest: int) -> None:
        self._num_best, self._num_latest = best, latest
        self._best: list[tuple[float, int]] = []
        self._latest: dict[int, float] = {}
        self._value_of_best: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._latest.keys() | self._value_of_best.keys())

    def __contains__(self, trial: int) -> bool:
        return trial in self._latest or trial in self._value_of_best

    def put(self, trial: int, value: float) -> list[int]:
        """Set the trial's value. Returns the trials that may have left the pool."""
        self.remove(trial)
        insort(self._best, (value, trial))
        self._value_of_best[trial] = value
        self._latest[trial] = value
        gone: list[int] = []
        if len(self._best) > self._num_best:
            gone.append(self._best.pop()[1])
            del self._value_of_best[gone[-1]]
        if len(self._latest) > self._num_latest:
            gone.append(next(iter(self._latest)))
            del self._latest[gone[-1]]
        return gone

    def remove(self, trial: int) -> None:
        self._latest.pop(trial, None)
        if trial in self._value_of_best:
            del self._best[bisect_left(self._best, (self._value_of_best.pop(trial), trial))]

    def values(self) -> dict[int, float]:
        return self._value_of_best | self._latest


def _as_json(point: Mapping[str, object]) -> str:
    return json.dumps(point, sort_keys=True)


def _sampler_class(name: str, options: Mapping[str, object]) -> tuple[type[BaseSampler], dict[str, Any]]:
    """The class and its options, after it has been made once with them."""
    wanted = _SHORT.get(name, name)
    known = [each for each in optuna.samplers.__all__ if _takes_seed(getattr(optuna.samplers, each))]
    if wanted not in known:
        names = sorted([*_SHORT, *known])
        told = f"must be random, or one of {', '.join(names)}, got {name!r}{closest(name, names)}"
        raise FieldError([("searcher.sampler.name", told)])
    kind: type[BaseSampler] = getattr(optuna.samplers, wanted)
    takes = [option for option in inspect.signature(kind).parameters if option != "seed"]
    unknown = [option for option in options if option not in takes]
    if unknown:
        raise FieldError(
            [
                (f"searcher.sampler.options.{option}", f"is not an option of {wanted}{closest(option, takes)}")
                for option in unknown
            ]
        )
    startup = options.get("n_startup_trials", 10)
    if not isinstance(startup, int) or isinstance(startup, bool) or startup < 0:
        raise FieldError([("searcher.sampler.options.n_startup_trials", f"must be an integer >= 0, got {startup!r}")])
    try:
        _new(kind, options, seed=0)
        if wanted == "CmaEsSampler":
            importlib.import_module("cmaes")  # Optuna imports it when it is asked
    except ImportError as error:
        raise FieldError(
            [("searcher.sampler.name", f"{name!r} needs a package that is not installed: {error}")]
        ) from error
    except (TypeError, ValueError) as error:
        raise FieldError(
            [("searcher.sampler.options", f"{wanted} does not accept {dict(options)}: {error}")]
        ) from error
    return kind, dict(options)


def _takes_seed(kind: object) -> bool:
    return isinstance(kind, type) and "seed" in inspect.signature(kind).parameters


def _new(kind: type[BaseSampler], options: Mapping[str, object], *, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # the user chose it, and it comes at each ask
        return kind(**options, seed=seed)  # type: ignore[call-arg]
