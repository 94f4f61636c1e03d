"""The trials of an experiment that `ExperimentReader` has read: ranked, and in words."""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dray.records.repeats import Finalist, best_run, compared, summary
from dray.records.trial_record import TrialRecord, in_order
from dray.text import counted, shown, some
from dray.training.units import amount
from searchers.intervals import Interval
from searchers.pareto import pareto_order
from searchers.views import FAILED_STATES, NEVER_BEST, num_reached

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig
    from dray.records.directory import ExperimentDirectory

_SHOWN = 8
ENOUGH = 3


def deciding_rung(reached: Iterable[int]) -> int:
    """The highest rung that at least `ENOUGH` trials have reached; only a trial that has reached it can be the best.

    The lowest value of many short, noisy curves is luck, and the curve of an overfitting model rises again.

    Args:
        reached: for each trial, the number of rungs that it has reached.

    Returns:
        The rung's number, from 1; 0 if every trial can be the best.

    >>> deciding_rung([1, 2, 3, 2, 1])
    2
    """
    furthest = heapq.nlargest(ENOUGH, reached)
    return furthest[-1] if len(furthest) == ENOUGH else 0


class RankedTrials:
    """The half of `ExperimentReader` that asks; see there for the attributes."""

    lock: threading.RLock
    directory: ExperimentDirectory
    version: int
    metric: str
    sign: int
    is_pareto: bool

    def __init__(self, repeat: Mapping[str, Any] | None) -> None:
        """``repeat`` is the config's section."""
        self._repeat = repeat

    def _begin_trials(self) -> None:
        self.trials: dict[int, TrialRecord] = {}
        self._extended: list[Mapping[str, Any]] = []
        self._config: ExperimentConfig | None = None
        self._rungs: tuple[float, ...] | None = None
        self._repeats: dict[int, dict[int, TrialRecord]] = {}  # by trial and seed, those of the present length
        self._ranked: tuple[int, list[TrialRecord], dict[int, int], list[Finalist]] = (-1, [], {}, [])
        self._started: list[TrialRecord] = []  # not compared yet
        self._texts: dict[str, str] = {}
        self._varying: set[str] = set()

    @property
    def config(self) -> ExperimentConfig:
        """The config, with the budget that the search was last extended to."""
        from dray.config.search import as_extended

        if self._config is None:
            self._config = as_extended(self.directory.config(), self._extended)
        return self._config

    @property
    def rungs(self) -> tuple[float, ...]:
        """The rungs of the search, in the searcher's unit; () if they are not known."""
        if self._rungs is None:
            from dray.config.search import rungs_of

            try:
                self._rungs = rungs_of(self.config)
            except ValueError:  # a record of an extension is damaged
                self._rungs = ()
        return self._rungs

    def _note_repeat(self, trial: TrialRecord) -> None:
        if trial.repeat is not None:
            self._repeats.setdefault(trial.repeat.trial, {})[trial.repeat.seed] = trial

    @property
    def states(self) -> Counter[str]:
        """The number of trials in each state."""
        return Counter(trial.state for trial in self.trials.values())

    @property
    def num_failed(self) -> int:
        states = self.states
        return sum(states[state] for state in FAILED_STATES)

    def ranked(self) -> list[TrialRecord]:
        """The trials that have validated, best first: those that have reached the `deciding_rung`, then the others, by
        their best validations. Once repeats were compared, their trials precede those that the repeats passed over,
        whose values are the luck of one seed; see `_contenders`. The repeats follow, and then failed trials. Trials
        with invalid hyperparameters are left out. With several metrics, the order is by violation of the constraints,
        front, and first objective."""
        with self.lock:
            if self._ranked[0] != self.version:
                there = [each for each in self.trials.values() if each.losses and each.state != "INVALID_HP"]
                fronts: dict[int, int] = {}
                if self.is_pareto:
                    order = pareto_order({each.id: each.losses for each in there if each.state not in NEVER_BEST})
                    fronts = {trial: front for trial in order if (front := order.front_of(trial)) is not None}

                finalists = compared(self._repeats, self.sign)
                contenders, trained = self._contenders(there, finalists), self._trained_far_enough(there)

                def place(each: TrialRecord) -> tuple[bool, float, float, bool, tuple[float, int], bool, float, int]:
                    assert each.rank is not None
                    return (
                        each.state in FAILED_STATES,
                        each.rank[0],
                        fronts.get(each.id, math.inf),
                        each.repeat is not None,
                        contenders.get(each.id, (math.inf, 0)),
                        each.id not in trained,
                        each.rank[1],
                        each.id,
                    )

                with no_collections():
                    self._ranked = self.version, sorted(there, key=place), fronts, finalists
            return self._ranked[1]

    def _contenders(self, trials: Sequence[TrialRecord], finalists: Sequence[Finalist]) -> dict[int, tuple[float, int]]:
        """The sort keys of the trials that may be the best after repeats, by trial; {} without repeats.

        Those that were repeated count by their means. One that a person added counts by its one seed if it has
        completed, and could not be among the finalists: it is a fork, or was added later. The repeats have passed over
        the others, and the best of many values of one seed is too good.
        """
        keys: dict[int, tuple[float, int]] = {}
        last, worst = 0, -math.inf
        for place, each in enumerate(finalists):
            if each.is_compared and each.mean is not None:
                worst = max(worst, self.sign * each.mean.mean)  # the seeds that all have decide on their order
                keys[each.trial] = worst, place
                last = max(last, min(each.trials.values()))
        unlucky = {each.trial for each in finalists if each.failed}
        for trial in trials if keys else ():
            is_later = trial.is_requested and (trial.source_trial is not None or trial.id > last)
            if is_later and trial.state == "COMPLETED" and trial.id not in keys and trial.id not in unlucky:
                assert trial.losses is not None
                keys[trial.id] = trial.losses.values[0], len(finalists)
        return keys

    def _trained_far_enough(self, trials: Sequence[TrialRecord]) -> set[int]:
        """Those that have reached the `deciding_rung`. With several metrics, all: the front has what is best in each,
        however short its training."""
        if self.is_pareto:
            return {trial.id for trial in trials}
        is_longer = any(record.get("max_length") is not None for record in self._extended)
        reached = {
            trial.id: num_reached(self.rungs, trial.last_step, is_complete=trial.state == "COMPLETED" and not is_longer)
            for trial in trials
            if trial.is_eligible and trial.repeat is None
        }
        rung = deciding_rung(reached.values())
        return {trial for trial, rungs in reached.items() if rungs >= rung}

    def value_of(self, trial: TrialRecord) -> float | None:
        """The value that ranks a trial: the mean of its repeats if they have been compared, else its own best."""
        mean = self.mean_of_repeats(trial.id)
        return trial.best_metric if mean is None else mean.mean

    def valued_by(self, trial: TrialRecord) -> str:
        """What `value_of` returns: "mean of 3 seeds", or "one seed"."""
        mean = self.mean_of_repeats(trial.id)
        return "one seed" if mean is None else f"mean of {counted(mean.runs, 'seed')}"

    def finalists(self) -> list[Finalist]:
        """The trials that were trained again with other seeds, best first; those not compared yet follow."""
        self.ranked()
        return self._ranked[3]

    def best_run(self, trial: int) -> TrialRecord:
        """The run of a trial whose checkpoint is the best: the trial, or one of its repeats."""
        return best_run(self.trials[trial], self.finalists(), self.trials)

    def repeats_summary(self) -> str:
        """Whether the best finalist can be distinguished from the others, in words; "" if nothing is repeated."""
        if self._repeat is not None and not self.finalists():
            return "no trial yet, since repeats begin when all trials have ended"
        told, best = summary(self.finalists()), self.best()
        if best is None or not self.finalists() or not self.finalists()[0].is_compared or self.mean_of_repeats(best.id):
            return told
        value = shown(self.value_of(best))
        return f"{told}; trial {best.id}, not trained again, is ahead with {value} from one seed"

    def mean_of_repeats(self, trial: int) -> Interval | None:
        """The mean of a trial's repeats; None if they have not been compared."""
        return next((each.mean for each in self.finalists() if each.trial == trial and each.is_compared), None)

    def fronts(self) -> dict[int, int]:
        """With several metrics, the front of each trial that keeps every limit and did not fail; 1 is the Pareto
        front."""
        self.ranked()
        return self._ranked[2]

    def front(self) -> list[int]:
        """The Pareto front, the best in the first objective first; [] with one metric."""
        fronts = self.fronts()
        return [trial.id for trial in self.ranked() if fronts.get(trial.id) == 1] if fronts else []

    def eligible(self) -> list[TrialRecord]:
        """The trials that can be the best, best first: they did not fail, and keep every limit."""
        return [trial for trial in self.ranked() if trial.is_eligible]

    def best(self) -> TrialRecord | None:
        """The best eligible trial; with several metrics, the best in the first objective."""
        return next((trial for trial in self.ranked()[:1] if trial.is_eligible), None)

    def lowest(self) -> TrialRecord | None:
        """The eligible trial with the best single validation, however short its training; None if it is the best one,
        or if there are several metrics."""
        own = [trial for trial in self.eligible() if trial.repeat is None]
        lowest = min(own, key=lambda trial: (trial.rank, trial.id), default=None)
        return None if lowest is None or self.is_pareto or lowest is self.best() else lowest

    @property
    def varying(self) -> list[str]:
        """Dotted names of the hyperparameters that differ between trials, or that only some trials have, in the
        config's order."""
        with self.lock:
            for trial in self._started:
                drawn = {name: str(value) for name, value in trial.hparams.items()}
                if self._texts:
                    self._varying |= {name for name, text in drawn.items() if self._texts.get(name) != text}
                    self._varying |= self._texts.keys() - drawn.keys()
                self._texts = {**drawn, **self._texts}
            self._started.clear()
            return in_order(sorted(self._varying), self.config.hyperparameters)

    @property
    def hparam_names(self) -> list[str]:
        """Dotted names of all sampled hyperparameters, in the config's order."""
        names = dict.fromkeys(name for trial in self.trials.values() for name in trial.hparams)
        return in_order(names, self.config.hyperparameters)

    # ------------------------------------------------------------------ in words
    def state_summary(self) -> str:
        """ "2 completed, 1 with invalid hyperparameters": the number of trials in each state."""
        words = {"INVALID_HP": "with invalid hyperparameters", "OUT_OF_MEMORY": "out of memory"}
        return ", ".join(f"{count:,} {words.get(state, state.lower())}" for state, count in self.states.most_common())

    def next_summary(self) -> str:
        """ "2 trials would begin; trials 4, 7 would continue to 16 epochs": what an experiment that has ended would do
        next."""
        ends: dict[float, list[int]] = {}
        for trial in self.trials.values():
            if trial.state == "RUNNING":
                end = next((rung for rung in self.rungs if rung > trial.last_step), -1)
                ends.setdefault(end, []).append(trial.id)
        pending = self.states["PENDING"]
        parts = [f"{counted(pending, 'trial')} would begin"] if pending else []
        for end, trials in sorted(ends.items()):
            to = f" to {amount(f'{end:g}', self.config.searcher.unit)}" if end > 0 else ""
            parts.append(f"trial{'s' * (len(trials) > 1)} {some(trials, _SHOWN)} would continue{to}")
        return "; ".join(parts)

    def failure_summary(self) -> str:
        """ "2 of 3 trials failed"; "" if none did."""
        failed = self.num_failed
        return f"{failed} of {counted(len(self.trials), 'trial')} failed" if failed else ""

    def divergence_summary(self) -> str:
        """ "2 trials diverged: NaN since batch 40 (trial 3), 100 (trial 7)"; "" if none did."""
        since = self.nan_since()
        each = [f"{batches} (trial {trial})" for trial, batches in since.items()]
        return f"{counted(len(since), 'trial')} diverged: NaN since batch {some(each, _SHOWN)}" if since else ""

    def straggler_summary(self) -> str:
        """ "trial 3: rank 1 on gpu-7 takes 38% longer per step ..."; "" if no rank is slow."""
        return some([f"trial {each.id}: {each.straggler}" for each in self.trials.values() if each.straggler], _SHOWN)

    def nan_since(self) -> dict[int, int]:
        """For each diverged trial, the batch since which a loss is NaN or infinite."""
        return {trial.id: trial.nan_since for trial in self.trials.values() if trial.nan_since is not None}

    def no_best_reason(self) -> str:
        """The reason why no trial is the best although some have validated; "" if there is a best one, or none has
        validated."""
        if not (there := self.ranked()) or self.best() is not None:
            return ""
        closest = f"trial {there[0].id} ({self.metric} {there[0].best_metric:.4g})"
        if there[0].state not in FAILED_STATES:
            return f"no best trial, because none that validated keeps every constraint; the closest is {closest}"
        return f"no best trial, because every trial that validated failed; the best of these is {closest}"


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Pause Python's garbage collector while many objects are made, none of which is garbage. It would take two fifths
    of the time in which 10,000 trials are read, and now and then 0.1 s when they are sorted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
