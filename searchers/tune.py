"""A search for anybody's `ray.tune.Tuner`, with any trainable: a searcher and a scheduler that decide as one.

    searcher = Searcher(ASHA(max_trials=50, max_length=81, num_rungs=4, divisor=3), sampler="tpe", seed=0)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=-1, search_alg=searcher, scheduler=Scheduler(searcher)
        ),
    )

Tune asks the `Searcher` for configurations and the `Scheduler` about each result. Both pass everything to the
searcher's `TuneTrials`. The scheduler has no state, for Tune does not save a scheduler's. Tune saves the searcher's
with its own, and pickles both together, as given, when the `Tuner` is made: `Tuner.restore` has the same pair.

This is Tune's API for searchers and schedulers; it has no internals of Tune.
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
from searchers.events import Decision
from searchers.journal import Journal
from searchers.method import Method
from searchers.objectives import Objectives
from searchers.random_search import Grid
from searchers.samplers import FirstPoints, GridSampler, Sampler, named_sampler
from searchers.search import Record, Search
from searchers.space import Space
from searchers.space import parse as parse_space
from searchers.tune_trials import TuneTrials

_UNLIMITED = 1_000_000_000
"""At least; Tune replaces `num_samples=-1` by a number like this."""
_OBJECT = "__ref_ph"
"""Tune replaces objects in a `param_space` by pairs of this and a number."""
_DECISIONS: dict[Decision, str] = {
    "continue": TrialScheduler.CONTINUE,
    "pause": TrialScheduler.PAUSE,
    "stop": TrialScheduler.STOP,
}


class Searcher(TuneSearcher):  # type: ignore[misc]  # Ray's classes are untyped here
    """Tune's `search_alg`: gives a search method's trials their hyperparameters. It needs a `Scheduler`.

    The method has the number of trials, so `tune.TuneConfig` needs `num_samples=-1`.

    Args:
        method: A new one: `Single`, `RandomSearch`, `Grid`, `ASHA`, `PromotionASHA`, `AdaptiveASHA`, or your own.
        space: What to search: domains of `ray.tune`, distributions of Optuna, domains as in an experiment file, or a
            `Space`. By default, the domains in the `param_space` of the `Tuner`. `Grid` tries the points of its grid.
        sampler: Draws the hyperparameters: "random", "tpe", "gp", "cmaes" or the name of a class in `optuna.samplers`;
            or a sampler; or a class or function that is called with `(space, seed=..., rungs=...)` and returns one.
        points: Hyperparameters of the first trials, such as known good ones.
        metric, mode: The metric of the results to compare trials by, and "min" or "max", unless `tune.TuneConfig` has
            them. NaN is the worst value.
        objectives: Several metrics to optimise and constraints, in place of `metric` and `mode`; `ASHA` and the others
            that compare trials then need `pareto=True`.
        seed: The same seed gives the same hyperparameters, except where a sampler learns from results that differ.
        time_attr: The entry of the results that counts a trial's length, in the unit of the method's `max_length`. A
            trial ends with its first result at `max_length` or later.

    Raises:
        FieldError: An argument is invalid. What depends on the `Tuner` is checked by `Tuner.fit()`.
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
            what = (
                "needs pareto=True to rank trials by objectives" if objectives else "has pareto=True, but no objectives"
            )
            raise FieldError([("method", f"{type(method).__name__} {what}")])
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
        """The search, with a view of each trial in `search.trials`; None before Tune has asked for the first one."""
        return None if self._trials is None else self._trials.search

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Called by Tune: take the metric of `tune.TuneConfig`, and the space of the `Tuner` if there is no other."""
        self._compare_by(metric, mode)
        if self._space is not None:
            return False  # Tune raises an error if there are domains in `config` too
        domains = from_ray_tune(_domains(config))
        self._space = parse_space(domains)
        self._records.append({"event": "space", "hyperparameters": domains})
        return True

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Called by Tune for `max_concurrent_trials`, which it would itself count with the paused trials."""
        self._max_concurrent = max_concurrent
        return True

    def suggest(self, trial_id: str) -> dict[str, object] | str | None:
        """Called by Tune: the next trial's hyperparameters; None if there is none now, `FINISHED` after the last.

        Raises:
            FieldError: What the searcher and Tune were given does not go together, or the sampler found no point.
        """
        trials = self._started()
        hparams = trials.suggest(trial_id)
        return str(self.FINISHED) if trials.search.done else hparams

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Called by Tune, but not with all results: the scheduler gets those."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Called by Tune: the trial ended by itself, by an error or, without a result, while it was not running."""
        if self._trials is not None:
            self._trials.end(
                trial_id, result or {}, "errored" if error else "canceled" if result is None else "completed"
            )

    def save(self, checkpoint_path: str) -> None:
        """Called by Tune: write the search's journal, with Tune's ids of its trials, as lines of JSON."""
        lines = [json.dumps(record, allow_nan=False, separators=(",", ":")) for record in self._records]
        Path(checkpoint_path).write_text("".join(f"{line}\n" for line in lines))

    def restore(self, checkpoint_path: str) -> None:
        """Called by `Tuner.restore`: continue the search that was saved.

        Raises:
            JournalError: It is another search, or the file is damaged.
        """
        self._records = Journal.read(checkpoint_path)
        for record in self._records:
            if record["event"] == "space":
                self._space = parse_space(record["hyperparameters"])  # type: ignore[arg-type]
        self._trials = self._replayed()

    def _compare_by(self, metric: str | None, mode: str | None) -> None:
        if self._trials is not None:
            what = "the searcher has run already; make a new one, or continue with Tuner.restore()"
            raise FieldError([("tune.TuneConfig.search_alg", what)])
        for name, mine, given in (("metric", self._metric, metric), ("mode", self._mode, mode)):
            if given and mine and given != mine:
                what = f"is {given!r}, but the searcher has {mine!r}; name one of them"
                raise FieldError([(f"tune.TuneConfig.{name}", what)])
        self._metric, self._mode = metric or self._metric, mode or self._mode

    def _started(self) -> TuneTrials:
        if self._trials is None:
            faults = [
                (f"tune.TuneConfig.{name}", "must be given, there or to the searcher")
                for name, given in (("metric", self._metric), ("mode", self._mode))
                if not given
            ]
            if self._num_samples is None:
                faults.append(("tune.TuneConfig.scheduler", "must be a searchers.tune.Scheduler of this searcher"))
            elif self._num_samples < _UNLIMITED:
                # Where it could not restore its state, Tune starts again, with one sample.
                what = f"must be -1, for the search method has the number of trials; got {self._num_samples}"
                restored = "if this is Tuner.restore(), Tune found no state to continue from, and its log says why"
                faults.append(("tune.TuneConfig.num_samples", f"{what}; {restored}"))
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
                raise FieldError([("Grid.points", f"must be {len(grid)}, as the space has them, got {points}")])
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
    """Tune's `scheduler`: stops, pauses and resumes trials as the search of its searcher decides.

    A method that pauses trials, such as `PromotionASHA`, needs a trainable that saves checkpoints.

    Args:
        searcher: The one in `tune.TuneConfig(search_alg=...)`.
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
        """Called by Tune for a new trial, one of before `Tuner.restore`, and one that starts again since it failed."""
        self._trials.add(trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Tune for each result, except one that ends the trial by itself: CONTINUE, PAUSE or STOP."""
        return _DECISIONS[self._trials.report(trial.trial_id, result)]

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Called by Tune in each of its steps: a paused trial to resume. It starts new ones by itself."""
        return self._trials.next_to_resume(tune_controller.stop_trial)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Called by Tune, as is the searcher's."""

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Called by Tune for each failure; for the last one, the searcher's `on_trial_complete` is too."""

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Called by Tune, as is the searcher's `on_trial_complete`."""

    def debug_string(self) -> str:
        """Called by Tune: a line for its status."""
        states = self._searcher.search.states if self._searcher.search is not None else {}
        shown = "".join(f", {count} {state}" for state, count in sorted(states.items()) if count)
        return f"Using {type(self._searcher._method).__name__} of searchers{shown}"


def _domains(config: Mapping[str, Any]) -> dict[str, Any]:
    """The domains of a `param_space`, without its constants: those may be of any type, and stay with Tune.

    Raises:
        SpaceError: A domain is in a list, or has objects.
    """
    _, domains, grids = parse_spec_vars(dict(config))
    found: dict[str, Any] = {}
    for path, domain in (*domains, *grids):
        if not all(isinstance(name, str) for name in path):
            what = "is in a list, and can't be searched there; use a mapping, with a name for each"
            raise SpaceError([(".".join(map(str, ("hyperparameters", *path))), what)])
        if _OBJECT in repr(getattr(domain, "categories", "")):
            what = "has objects to choose from; give their names, and look them up in the trainable"
            raise SpaceError([(".".join(("hyperparameters", *path)), what)])
        *outer, name = path
        inner = found
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[name] = domain
    return found
