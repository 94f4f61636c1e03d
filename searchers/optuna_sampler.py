"""Hyperparameters from Optuna's samplers, which see only what is comparable.

What a model-based sampler learns from matters more than which scheduler stops its trials (measured: normalised regret
.09 against .15 to .27 on the same trials). So:

* Trials are compared at high fidelity: those that came to a rung of a fifth of the full length or beyond, each with
  its last value. A trial stopped below is told neither as complete nor as pruned: its value ranks how fast it started,
  and where the best start slowly they would be unlearned. Until enough trials came that far, draws are random.
* TPE weighs where good trials are against where the others are. Were those only the ones that came far, it would shun
  the region that they came from, and try what nobody has seen survive. So the first trials, which were drawn at random,
  are its background, wherever they ended: told without a value, as trials that run are (regret .086 -> .078). And one
  draw in four stays random, lest it be misled for good; that costs no regret.
* A search that is extended to a greater length compares at a higher rung from then on, as soon as enough trials have
  come there; until then the values of before are the best that is known.
* What failed (out of memory, invalid, diverged) is told as the worst, and not proposed again.
* Trials that run are told as running, so that workers that ask at the same time get different answers.
* The study that is asked holds a bounded part: the best points, the latest, and the latest failures. An ask costs
  the same after 100,000 trials as after 100.

The sampler's state is made of events alone, and each ask has a generator of its own, seeded by the search's seed and
the trial's number. So a replayed search goes on as the one that died.

Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011), for TPE; Akiba et al., "Optuna" (arXiv
1907.10902). Learning from the highest fidelity that has enough points is the idea of BOHB (Falkner et al., arXiv
1807.01774).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
import math
import sys
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from searchers.domains import DOMAINS, Categorical, Const, Double, Int, Log, Nested, closest
from searchers.errors import FieldError
from searchers.events import Event, Exited, Reported, Started, assert_never
from searchers.space import Space

_SHORT = {"tpe": "TPESampler", "gp": "GPSampler", "cmaes": "CmaEsSampler"}
_FROM_TRIALS_ALONE = {"TPESampler", "GPSampler", "RandomSampler"}
"""These propose from trials' parameters and values. Others leave notes for themselves, in the study and its trials."""

_FAR = 0.2
"""Of the full length: at rungs from here on trials are compared. The two highest rungs, with a divisor from 3 to 5."""

_ENOUGH = 10
"""Trials that have come to the higher rungs of an extended search before only those are compared; TPE's
`n_startup_trials`, if that is given."""

_BEST, _LATEST, _RUNNING, _FAILED, _BACKGROUND = 30, 50, 16, 16, 60
"""Points that the study holds at most, of each kind."""

_RANDOM_EVERY = 4
"""Of TPE's trials every fourth is drawn at random, lest it be misled for good."""

_ATTEMPTS, _RANDOM_ATTEMPTS = 8, 100
"""Asks for one trial, where points are refused by the constraint or failed before; then random draws. Where all points
of a small space have failed, one of them is tried again."""


class OptunaSampler:
    """A sampler of Optuna's.

    Args:
        space: To draw from.
        seed: Any integer.
        rungs: Lengths at which trials are compared, ascending: `Method.rungs`. () where there are none: then trials are
            compared when they have completed.
        name: "tpe", "gp", "cmaes", or the name of a class in `optuna.samplers`.
        options: The sampler's arguments, e.g. {"n_startup_trials": 20}. With "tpe", `n_startup_trials` (10 by default)
            counts the trials that are compared, and `multivariate` is true by default.

    Raises:
        FieldError: There is no such sampler, it lacks a package, or it does not take these options; by path, below
            `searcher.sampler`.
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
            if self._options["multivariate"] and _is_conditional(space.root):
                self._options = {"group": True} | self._options
        self._distributions = to_optuna(space, wide_as_float=self._is_tpe)
        self._floor = self._next_floor = _floor(rungs)
        # What a sampler noted may refer to any trial before.
        self._pool = _Pool(best=_BEST, latest=_LATEST) if not self._has_notes else _Pool(best=0, latest=sys.maxsize)
        self._trials: dict[int, _Trial] = {}  # those that run, are in the pool, or failed lately
        self._running: dict[int, None] = {}  # in order of their start; those that are paused among them
        self._failed: dict[int, None] = {}
        self._background: dict[int, None] = {}  # the first ones, whatever became of them
        self._refused: set[str] = set()  # points that failed, as JSON
        self._store = _Store()
        self._study = optuna.load_study(study_name="search", storage=self._store, sampler=self._sampler("0"))
        self._asked: tuple[int, _Params, dict[str, Any], dict[str, Any]] | None = None

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
                    failed = reason in ("errored", "invalid_hp") or self._trials[trial].last == math.inf
                    if failed and reason != "canceled":
                        self._fail(trial, hparams)
                    elif reason == "completed":
                        self._compare(trial)
                    self._forget([trial])
            case _:
                assert_never(event)
        self._asked = None  # the answer may be another one now

    def extended(self, rungs: Sequence[float]) -> None:
        """Compare trials at a fifth of the new length or beyond, as soon as enough came there."""
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
        if not self._has_notes:  # which may refer to any trial before
            for trial in below:
                self._pool.remove(trial)
            self._forget(below)

    def _begun(self, trial: int, hparams: Mapping[str, object]) -> _Trial:
        params = encoded(self.space.root, hparams, self._distributions)
        if not self._has_notes:
            return _Trial(params=params)
        # What the sampler noted when it proposed this point belongs to the trial. In a replay it proposes it again.
        if self._asked is None or self._asked[0] != trial:
            self.ask(trial)
        if self._asked is not None and self._asked[1] == params:
            self._store.study_notes = self._asked[3]
            return _Trial(params=params, notes=self._asked[2])
        return _Trial(params=params)

    def _compare(self, trial: int) -> None:
        """The trial's last value counts, with those of the others that came as far."""
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
        """Drop what is known of those that nothing refers to any more."""
        for trial in trials:
            if not any(trial in kept for kept in (self._pool, self._running, self._failed, self._background)):
                self._trials.pop(trial, None)

    def _propose(self, trial: int, attempt: int) -> dict[str, object]:
        """What Optuna's sampler answers for this trial. Changes nothing but the note of what was asked."""
        committed = self._store.study_notes
        self._store.study_notes = dict(committed)
        self._store.history = self._history()
        self._store.current = _frozen(trial, _Trial(params={}), TrialState.RUNNING, distributions={})
        self._study.sampler = self._sampler(f"{trial}:{attempt}")
        asked = self._study.ask()
        point = _suggested(self.space.root, "", lambda name: _suggest(asked, name, self._distributions[name]))
        self._asked = (trial, asked.params, self._store.current.system_attrs, self._store.study_notes)
        self._store.study_notes = committed
        assert isinstance(point, dict)
        return point

    def _history(self) -> list[FrozenTrial]:
        """The study that is asked, by number of the trials."""
        values = self._pool.values()
        history = [self._seen(trial, TrialState.COMPLETE, value) for trial, value in values.items()]
        if values:
            # As many failures as trials that did not fail, at most: were they more, some would count among the best.
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
        return _frozen(trial, known, state, value=value, distributions=self._distributions)

    def _sampler(self, key: str) -> BaseSampler:
        # A low-discrepancy sequence is one sequence; all others get independent random numbers for each trial.
        key = "sequence" if self._class.__name__ == "QMCSampler" else key
        return _new(self._class, self._options, seed=Random(f"{self.seed}:{key}:optuna").getrandbits(31))


_Params = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Trial:
    params: _Params
    """As Optuna holds them, by their names there."""
    notes: dict[str, Any] = field(default_factory=dict)
    last: float | None = None
    """The last value reported; +inf where it was not finite."""
    step: float = 0
    """Where that was."""


def _floor(rungs: Sequence[float]) -> float:
    return min((rung for rung in rungs if rung >= _FAR * rungs[-1]), default=math.inf)


class _Pool:
    """Trials that are compared: the best ones and the latest ones, so many of each."""

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
        """The trial's value is this now. Those who may have left are returned."""
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


class _Store(BaseStorage):
    """One study that holds what it is given: `history`, and `current`, the trial that is asked for.

    Optuna's own storage in memory can't forget trials, and copies them. Samplers are asked between two events, and
    nothing of what they note (`study_notes`, the current trial's attributes) is kept unless it is taken out.
    """

    def __init__(self) -> None:
        self.history: list[FrozenTrial] = []
        self.current = _frozen(0, _Trial(params={}), TrialState.RUNNING, distributions={})
        self.study_notes: dict[str, Any] = {}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = [*self.history, self.current]
        return trials if states is None else [trial for trial in trials if trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        if trial_id == self.current._trial_id:
            return self.current
        return next(trial for trial in self.history if trial._trial_id == trial_id)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        return self.current._trial_id

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """The trial that Optuna hands out keeps its own."""

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.get_trial(trial_id).system_attrs[key] = value

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self.study_notes

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self.study_notes[key] = value

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return [StudyDirection.MINIMIZE]

    def get_study_id_from_name(self, study_name: str) -> int:
        return 0

    def get_study_name_from_id(self, study_id: int) -> str:
        return "search"

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return {}

    def get_all_studies(self) -> list[FrozenStudy]:
        raise NotImplementedError

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        raise NotImplementedError

    def delete_study(self, study_id: int) -> None:
        raise NotImplementedError

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        raise NotImplementedError

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        raise NotImplementedError

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        raise NotImplementedError

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        raise NotImplementedError


def to_optuna(space: Space, *, wide_as_float: bool = False) -> dict[str, BaseDistribution]:
    """The space as Optuna's distributions, flat: "model.layers", and "optimizer[0].momentum" in a category's own space.

    Categories are the numbers of their values, since Optuna's cannot be mappings. Constants are left out.

    Args:
        space: Any.
        wide_as_float: More than 16 steps become a continuous range, whose draws are rounded. TPE's discrete
            distributions take several times as long.
    """
    found: dict[str, BaseDistribution] = {}
    _collect(space.root, "", wide_as_float, found)
    return found


def _collect(domain: object, name: str, wide_as_float: bool, found: dict[str, BaseDistribution]) -> None:
    match domain:
        case Nested(domains=domains):
            for key, inner in domains:
                _collect(inner, _below(name, key), wide_as_float, found)
        case Categorical(vals=vals):
            found[name] = CategoricalDistribution(tuple(range(len(vals))))
            for i, val in enumerate(vals):
                _collect(val, f"{name}[{i}]", wide_as_float, found)
        case Int(minval=low, maxval=high, step=step, log=log):
            if wide_as_float and (high - low) / step > _WIDE:
                found[name] = FloatDistribution(low - step / 2, high + step / 2, log=log)
            else:
                # Optuna has no logarithmic steps; draws are rounded to ours.
                found[name] = IntDistribution(
                    low, high if log else domain.nearest(high), step=1 if log else step, log=log
                )
        case Double(minval=low, maxval=high, step=step):
            if step is not None and wide_as_float and (high - low) / step > _WIDE:
                found[name] = FloatDistribution(low - step / 2, high + step / 2)
            else:
                found[name] = FloatDistribution(low, domain.nearest(high), step=step)
        case Log(bounds=(low, high)):
            found[name] = FloatDistribution(low, high, log=True)


_WIDE = 16


def _suggested(domain: object, name: str, draw: Callable[[str], Any]) -> object:
    """A point, each number or category drawn by its name."""
    match domain:
        case Nested(domains=domains):
            return {key: _suggested(inner, _below(name, key), draw) for key, inner in domains}
        case Categorical(vals=vals):
            choice = draw(name)
            return _suggested(vals[choice], f"{name}[{choice}]", draw)
        case Int() | Double():
            return domain.nearest(draw(name))
        case Log(bounds=(low, high)):
            return domain.nearest(min(max(draw(name), low), high))
        case Const(val=val):
            return copy.deepcopy(val)
    return copy.deepcopy(domain)  # a plain category


def encoded(root: Nested, point: Mapping[str, object], distributions: Mapping[str, BaseDistribution]) -> _Params:
    """The parameters of a point, by their names in `to_optuna`: numbers, and categories by their numbers.

    What is not of the space is left out, as in a point that a user changed.

    Args:
        root: of the space.
        point: hyperparameters of it.
        distributions: `to_optuna` of the space.
    """
    params: _Params = {}
    _encode(root, "", point, params)
    for name, value in params.items():
        match distributions[name]:
            case FloatDistribution(low=low, high=high):
                params[name] = min(max(float(value), low), high)
    return params


def _encode(domain: object, name: str, value: object, params: _Params) -> None:
    match domain:
        case Nested(domains=domains) if isinstance(value, Mapping):
            for key, inner in domains:
                if key in value:
                    _encode(inner, _below(name, key), value[key], params)
        case Categorical(vals=vals):
            choice, _ = domain.find(value)
            if choice is not None:
                params[name] = choice
                _encode(vals[choice], f"{name}[{choice}]", value, params)
        case Int() | Double() | Log() if isinstance(value, int | float):
            params[name] = value


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_conditional(domain: object) -> bool:
    match domain:
        case Nested(domains=domains):
            return any(_is_conditional(inner) for _, inner in domains)
        case Categorical(vals=vals):
            return any(isinstance(val, DOMAINS) for val in vals)
    return False


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    match distribution:
        case CategoricalDistribution(choices=choices):
            return trial.suggest_categorical(name, choices)
        case IntDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_int(name, low, high, step=step, log=log)
        case FloatDistribution(low=low, high=high, step=step, log=log):
            return trial.suggest_float(name, low, high, step=step, log=log)
    raise AssertionError(f"unexpected {distribution!r}")


def _frozen(
    number: int,
    trial: _Trial,
    state: TrialState,
    *,
    distributions: dict[str, BaseDistribution],
    value: float | None = None,
) -> FrozenTrial:
    # Of a conditional space a trial has a part. A dict of its own only then: this is done for each point and ask.
    whole = len(trial.params) == len(distributions)
    own = distributions if whole else {name: distributions[name] for name in trial.params}
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=state,
        value=value,
        datetime_start=None,
        datetime_complete=None,
        params=trial.params,
        distributions=own,
        user_attrs={},
        system_attrs=trial.notes,
        intermediate_values={},
    )


def _as_json(point: Mapping[str, object]) -> str:
    return json.dumps(point, sort_keys=True)


def _sampler_class(name: str, options: Mapping[str, object]) -> tuple[type[BaseSampler], dict[str, Any]]:
    """The class, and its options, tried out."""
    wanted = _SHORT.get(name, name)
    known = [each for each in optuna.samplers.__all__ if _takes_seed(getattr(optuna.samplers, each))]
    if wanted not in known:
        names = sorted([*_SHORT, *known])
        told = f"must be random, or one of {', '.join(names)}; got {name!r}{closest(name, names)}"
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
        raise FieldError([("searcher.sampler.options", f"{wanted} refuses {dict(options)}: {error}")]) from error
    return kind, dict(options)


def _takes_seed(kind: object) -> bool:
    return isinstance(kind, type) and "seed" in inspect.signature(kind).parameters


def _new(kind: type[BaseSampler], options: Mapping[str, object], *, seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # the user chose it, and it comes at each ask
        return kind(**options, seed=seed)  # type: ignore[call-arg]
