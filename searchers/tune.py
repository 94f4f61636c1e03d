"""A search for any `ray.tune.Tuner` and trainable: a searcher and a scheduler that share one search.

    searcher = Searcher(ASHA(max_trials=50, max_length=81, num_rungs=4, divisor=3), sampler="tpe", seed=0)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=-1, search_alg=searcher, scheduler=Scheduler(searcher)
        ),
    )

Tune asks the `Searcher` for configurations and the `Scheduler` about each result. Both pass everything to the
searcher's `TuneTrials`. The scheduler has no state of its own, because Tune does not save it. Tune saves the searcher's
state with its own. It pickles both objects together when the `Tuner` is created, so `Tuner.restore` has the same pair.

This module uses Tune's API for searchers and schedulers, and none of its internals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher as TuneSearcher
from ray.tune.search.variant_generator import parse_spec_vars

from searchers.convert import from_optuna, from_ray_tune
from searchers.errors import FieldError, SpaceError
from searchers.events import Decision, Requested
from searchers.journal import Journal
from searchers.method import Method
from searchers.named_sampler import named_sampler
from searchers.objectives import Objectives
from searchers.random_search import Grid
from searchers.samplers import FirstPoints, GridSampler, Sampler
from searchers.search import Record, Search
from searchers.space import Space
from searchers.space import parse as parse_space
from searchers.tune_trials import TuneTrials

_UNLIMITED = 1_000_000_000  # Tune replaces `num_samples=-1` with at least this number
_OBJECT = "__ref_ph"  # Tune replaces objects in a `param_space` with pairs of this and a number
_DECISIONS: dict[Decision, str] = {
    "continue": TrialScheduler.CONTINUE,
    "pause": TrialScheduler.PAUSE,
    "stop": TrialScheduler.STOP,
}


class Searcher(TuneSearcher):  # type: ignore[misc]  # Ray's classes are untyped here
    """Tune's `search_alg`, which suggests hyperparameters for the trials of a search method. It needs a `Scheduler`.

    The method determines the number of trials, so `tune.TuneConfig` needs `num_samples=-1`.

    Args:
        method: A new `Single`, `RandomSearch`, `Grid`, `ASHA`, `PromotionASHA`, `AdaptiveASHA` or `Auto`, or your own
            method. `Auto` is meant for the sampler "multi_fidelity".
        space: Domains of `ray.tune`, Optuna distributions, domains as in an experiment file, or a `Space`. The default
            is the domains in the `param_space` of the `Tuner`. `Grid` tries the points of the space's grid.
        sampler: "random", "multi_fidelity", "tpe", "gp", "nsga2", "cmaes" or the name of a class in `optuna.samplers`;
            or a sampler; or a class or function that is called with `(space, seed=..., rungs=...)` and returns one.
        points: Hyperparameters of the first trials, such as known good ones.
        metric, mode: The entry of the results by which trials are compared, and "min" or "max", unless
            `tune.TuneConfig` has them. NaN is the worst value.
        objectives: Objectives and constraints, instead of `metric` and `mode`; methods that compare trials, such as
            `ASHA`, then need `pareto=True`.
        seed: The same seed gives the same hyperparameters, unless a sampler learns from results that differ.
        time_attr: The entry of the results that measures a trial's length, in the unit of the method's `max_length`. A
            trial ends with its first result at `max_length` or later.

    Raises:
        FieldError: An argument is invalid. Arguments that depend on the `Tuner` are checked by `Tuner.fit()`.
    """

    CKPT_FILE_TMPL = "searcher-state-{}.json"

    def __init__(
        self,
        method: Method,
        space: Space | Mapping[str, object] | None = None,
        *,
        sampler: str | Sampler | Callable[..., Sampler] = "random",
        points: Sequence[Mapping[str, object]] = (),
        metric: str | None = None,
        mode: str | None = None,
        objectives: Objectives | None = None,
        seed: int = 0,
        time_attr: str = "training_iteration",
    ) -> None:
        if mode not in (None, "min", "max"):
            raise FieldError([("mode", f"must be min or max, got {mode!r:.80}")])
        if objectives is not None:
            if metric or mode:
                raise FieldError([("objectives", "are given together with metric or mode; leave these out")])
            metric, mode = objectives.first.name, "min" if objectives.first.smaller_is_better else "max"
        super().__init__(metric=metric, mode=mode)
        self._metric, self._mode = metric, mode
        if not isinstance(method, Method):
            raise FieldError([("method", f"must be a search method, such as searchers.ASHA(...), got {method!r:.80}")])
        if getattr(method, "pareto", objectives is not None) != (objectives is not None):
            problem = "has pareto=True, but no objectives"
            if objectives:
                problem = "needs pareto=True to rank trials by objectives"
            raise FieldError([("method", f"{type(method).__name__} {problem}")])
        self._objectives = objectives
        self._method, self._sampler, self._points, self._seed = method, sampler, points, seed
        self._time_attr = time_attr
        self._space = space
        if space is not None and not isinstance(space, Space):
            self._space = parse_space(from_ray_tune(from_optuna(space)))
        self._records: list[Record] = []
        self._trials: TuneTrials | None = None
        self._num_samples: int | None = None
        self._max_concurrent: int | None = None

    @property
    def search(self) -> Search | None:
        """The search, with a view of each trial in `search.trials`; None before Tune has requested the first trial."""
        return None if self._trials is None else self._trials.search

    def request(self, request: Requested) -> int:
        """Add a trial with given hyperparameters, or stop one, while Tune runs: call it from a `ray.tune.Callback`.

        `Requested(hparams={"lr": 0.01})` adds a trial beyond the method's `max_trials`; hyperparameters that are not
        given are drawn at random. `Requested(trial=7)` stops a trial; a running one ends with its next result.

        Returns:
            The trial's number in `search.trials`.

        Raises:
            IllegalEvent: The request can't be carried out: a hyperparameter is unknown or has another type, the trial
                has ended, or the new trial is to begin from another trial's checkpoint, which Tune's trials can't.
        """
        return self._started().request(request)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Take the metric of `tune.TuneConfig` and, without a space of our own, that of the `Tuner`. Called by Tune."""
        self._compare_by(metric, mode)
        if self._space is not None:
            return False  # Tune then raises an error if `config` also has domains
        domains = from_ray_tune(_domains(config))
        self._space = parse_space(domains)
        self._records.append({"event": "space", "hyperparameters": domains})
        return True

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Set the limit on concurrent trials. Called by Tune, which would itself count paused trials too."""
        self._max_concurrent = max_concurrent
        return True

    def suggest(self, trial_id: str) -> dict[str, object] | str | None:
        """Return the next trial's hyperparameters; None if there is none now, `FINISHED` at the end. Called by Tune.

        Raises:
            FieldError: The arguments of the searcher and of Tune are incompatible, or the sampler found no point.
        """
        trials = self._started()
        hparams = trials.suggest(trial_id)
        return str(self.FINISHED) if trials.search.done else hparams

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """No-op: Tune does not call it for all results; the scheduler gets every result."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """End a trial that completed, failed or, without a result, was ended while not running. Called by Tune."""
        if self._trials is not None:
            self._trials.end(
                trial_id, result or {}, "errored" if error else "canceled" if result is None else "completed"
            )

    def save(self, checkpoint_path: str) -> None:
        """Write the search's journal, with Tune's ids of its trials, as lines of JSON. Called by Tune."""
        lines = [json.dumps(record, allow_nan=False, separators=(",", ":")) for record in self._records]
        Path(checkpoint_path).write_text("".join(f"{line}\n" for line in lines))

    def restore(self, checkpoint_path: str) -> None:
        """Continue the saved search. Called by `Tuner.restore`.

        Raises:
            JournalError: The file belongs to another search, or is damaged.
        """
        self._records = Journal.read(checkpoint_path)
        for record in self._records:
            if record["event"] == "space":
                self._space = parse_space(record["hyperparameters"])  # type: ignore[arg-type]
        self._trials = self._replayed()

    def _compare_by(self, metric: str | None, mode: str | None) -> None:
        if self._trials is not None:
            message = "the searcher has already run; create a new one, or continue with Tuner.restore()"
            raise FieldError([("tune.TuneConfig.search_alg", message)])
        for name, own, tunes in (("metric", self._metric, metric), ("mode", self._mode, mode)):
            if tunes and own and tunes != own:
                message = f"is {tunes!r}, but the searcher has {own!r}; set it in one place only"
                raise FieldError([(f"tune.TuneConfig.{name}", message)])
        self._metric, self._mode = metric or self._metric, mode or self._mode

    def _started(self) -> TuneTrials:
        if self._trials is None:
            faults = [
                (f"tune.TuneConfig.{name}", "must be set, here or in the searcher")
                for name, value in (("metric", self._metric), ("mode", self._mode))
                if not value
            ]
            if self._num_samples is None:
                faults.append(("tune.TuneConfig.scheduler", "must be a searchers.tune.Scheduler of this searcher"))
            elif self._num_samples < _UNLIMITED:
                # If Tune can't restore its state, it starts again with one sample.
                message = f"must be -1, since the search method sets the number of trials; got {self._num_samples}"
                restored = "if this is Tuner.restore(), Tune found no state to continue from; its log has the reason"
                faults.append(("tune.TuneConfig.num_samples", f"{message}; {restored}"))
            if faults:
                raise FieldError(faults)
            self._trials = self._replayed()
        return self._trials

    def _replayed(self) -> TuneTrials:
        space = parse_space({}) if self._space is None else self._space
        assert isinstance(space, Space)
        search = Search(
            self._method,
            space,
            seed=self._seed,
            smaller_is_better=self._mode == "min",
            log=self._records.append,
            sampler=self._new_sampler(space),
            objectives=self._objectives,
        )
        return TuneTrials(
            search.replay(self._records),
            self._records,
            metric=str(self._metric),
            time_attr=self._time_attr,
            max_concurrent=self._max_concurrent,
        )

    def _new_sampler(self, space: Space) -> Sampler:
        if isinstance(self._method, Grid):
            grid, points = GridSampler(space), self._method.max_trials
            if len(grid) != points:
                raise FieldError([("Grid.points", f"must be {len(grid)}, the size of the space's grid, got {points}")])
            if self._points or self._sampler != "random":
                raise FieldError([("sampler", "Grid tries each point of the space once; leave out sampler and points")])
            return grid
        sampler = self._sampler
        if isinstance(sampler, str):
            rungs = self._method.rungs
            sampler = named_sampler(sampler, space, seed=self._seed, rungs=rungs, objectives=self._objectives)
        elif isinstance(sampler, type) or not isinstance(sampler, Sampler):
            sampler = sampler(space, seed=self._seed, rungs=self._method.rungs)
        return FirstPoints(space, self._points, sampler) if self._points else sampler


class Scheduler(TrialScheduler):  # type: ignore[misc]
    """Tune's `scheduler`, which stops, pauses and resumes trials as its searcher's search decides.

    A method that pauses trials, such as `PromotionASHA`, needs a trainable that saves checkpoints.

    Args:
        searcher: The `search_alg` of the same `tune.TuneConfig`.
    """

    supports_buffered_results = False  # trials would train on while the search decides

    def __init__(self, searcher: Searcher) -> None:
        super().__init__()
        self._searcher = searcher

    @property
    def metric(self) -> str | None:
        """The metric that Tune expects in each result."""
        return self._searcher._metric

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Called by Tune when it starts: take the metric and the number of samples of `tune.TuneConfig`."""
        self._searcher._compare_by(metric, mode)
        self._searcher._num_samples = spec.get("num_samples", 1)
        return True

    @property
    def _trials(self) -> TuneTrials:
        return self._searcher._started()

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Register a trial. Called by Tune for new trials, after `Tuner.restore`, and when a failed trial restarts."""
        self._trials.add(trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Decide CONTINUE, PAUSE or STOP. Called by Tune for each result except one that completes the trial."""
        return _DECISIONS[self._trials.report(trial.trial_id, result)]

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Return a paused trial to resume. Called by Tune in each of its steps; Tune starts new trials by itself."""
        return self._trials.next_to_resume(tune_controller.stop_trial)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """No-op: Tune also calls the searcher's."""

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """No-op: for the last failure, Tune also calls the searcher's `on_trial_complete`."""

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """No-op: Tune also calls the searcher's `on_trial_complete`."""

    def debug_string(self) -> str:
        """Return a line for Tune's status."""
        states = self._searcher.search.states if self._searcher.search is not None else {}
        shown = "".join(f", {count} {state}" for state, count in sorted(states.items()) if count)
        return f"Using {type(self._searcher._method).__name__} of searchers{shown}"


def _domains(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the domains of a `param_space`. Constants may be of any type, and stay with Tune.

    Raises:
        SpaceError: A domain is in a list, or has objects as choices.
    """
    _, domains, grids = parse_spec_vars(dict(config))
    found: dict[str, Any] = {}
    for path, domain in (*domains, *grids):
        if not all(isinstance(name, str) for name in path):
            message = "is in a list, and can't be searched there; use a mapping, with a name for each"
            raise SpaceError([(".".join(map(str, ("hyperparameters", *path))), message)])
        if _OBJECT in repr(getattr(domain, "categories", "")):
            message = (
                "has objects as choices; use their names, and look them up in the trainable; for arrays, .tolist()"
            )
            raise SpaceError([(".".join(("hyperparameters", *path)), message)])
        *outer, name = path
        inner = found
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[name] = domain
    return found
