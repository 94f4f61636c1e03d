"""A search's progress and remaining time, estimated from the remaining training instead of the ended trials."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dray.records.spending import Spent
from dray.records.trial_record import TrialRecord
from searchers.events import REPLACED
from searchers.previews import Preview
from searchers.views import END_STATES, TrialView

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig


FIRST_S = 5.0
"""Seconds of training before a remaining time is shown."""
_REPLACED = tuple(END_STATES[reason] for reason in REPLACED)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The training from one rung to the next: its end, its length, and the expected number of trials."""

    end: float
    length: float
    trials: float


class Remaining(NamedTuple):
    """What a search has trained and has yet to train, and the most that one of its trials has left until a rung."""

    trained: float
    left: float
    longest: float
    running: int  # number of running trials

    def seconds(self, speed: float, groups: int) -> float:
        """How long it takes, with the speed of one worker group."""
        return max(self.left / speed / max(groups, 1), self.longest / speed)


class Forecast:
    """A search's progress, in the searcher's unit of length, or in trials if the search sets no lengths.

    The remaining length to each trial's next rung is known, as is the number of trials to create. The share of trials
    that continue after a rung comes from `searchers.previews`.
    """

    def __init__(self, expected: Preview) -> None:
        rungs = [rung for bracket in expected.brackets for rung in bracket.rungs]
        self.in_trials = any(rung.length is None for rung in rungs)
        self.trials = expected.trials
        ends = [1] if self.in_trials else sorted({rung.length for rung in rungs if rung.length is not None})
        self._stages: list[_Stage] = []
        begin = 0
        for end in ends:
            arriving = self.trials if self.in_trials else sum(rung.last for rung in rungs if (rung.length or 0) >= end)
            self._stages.append(_Stage(end, end - begin, arriving))
            begin = end
        self._ends = [stage.end for stage in self._stages]
        self._trained = 0.0  # total length of ended trials
        self._valid = 0  # number of ended trials that are not replaced
        self._busy_s = 0.0  # time that trials have had workers, since the first progress
        self._last = 0.0  # time of the last update
        self._begun: tuple[float, float] | None = None  # time and total length before the first progress
        self.share = 0.0
        """Share of the search that is done, from 0 to 1; never decreases."""
        self.left_s: float | None = None
        """Seconds until the search's end; None if not known yet."""

    def rung(self, step: float) -> tuple[int, float]:
        """The number (from 1) and the length of the next rung of a trial that has trained this far."""
        place = min(bisect_right(self._ends, step), len(self._ends) - 1)
        return place + 1, self._ends[place]

    @property
    def rungs(self) -> int:
        return len(self._ends)

    def update(
        self,
        live: Iterable[TrialView | TrialRecord],
        steps: Mapping[int, float],
        groups: int,
        now: float,
        *,
        ended: Iterable[TrialView | TrialRecord] = (),
        requested: int = 0,
    ) -> None:
        """Update the estimates; `now`: time in seconds, from a monotonic clock. The others as in `remaining`."""
        self._time(self.remaining(live, steps, groups, ended=ended, requested=requested), groups, now)

    def remaining(
        self,
        live: Iterable[TrialView | TrialRecord],
        steps: Mapping[int, float],
        groups: int,
        *,
        ended: Iterable[TrialView | TrialRecord] = (),
        requested: int = 0,
    ) -> Remaining:
        """What the search has yet to train.

        Args:
            live: the trials that have not ended.
            steps: the lengths of running trials, if greater than in their last reports to the search.
            groups: number of running worker groups, each with one trial.
            ended: the trials that have ended since the last call.
            requested: number of trials created on request; the search creates the others by itself.
        """
        for view in ended:
            counts = view.state not in _REPLACED
            self._valid += counts
            self._trained += counts if self.in_trials else self._reached(view) - view.begin
        on_stage = [0] * len(self._stages)  # number of trials on each stage
        left = [0.0] * len(self._stages)  # their remaining lengths
        trained, created, waiting, running, longest = self._trained, self._valid, 0, 0, 0.0
        for view in live:
            created += 1
            step = 0.0 if self.in_trials else self._reached(view, steps.get(view.id, 0.0))
            trained += max(step - view.begin, 0.0)
            running += view.state == "RUNNING"
            waiting += view.state == "PENDING"
            place = bisect_right(self._ends, step)
            if view.state != "PAUSED" and place < len(self._stages):
                on_stage[place] += 1
                left[place] += self._ends[place] - step
                longest = max(longest, self._ends[place] - step)
        missing = max(self.trials + requested - created, 0)
        arriving: float = missing
        for number, stage in enumerate(self._stages):
            left[number] += arriving * stage.length
            if number + 1 < len(self._stages):
                arriving = (arriving + on_stage[number]) * self._stages[number + 1].trials / max(stage.trials, 1)
        total = sum(left)
        self.share = max(self.share, trained / (trained + total) if total else 1.0)
        if waiting or missing:
            # Groups are idle while the last trials run, on average for half of the longest stage.
            unused = (groups - 1) * max(stage.length for stage in self._stages if stage.trials) / 2
            total += min(unused, total)
        return Remaining(trained, total, longest, running)

    def _reached(self, view: TrialView | TrialRecord, step: float = 0.0) -> float:
        """The length that a trial has trained: the greater of its last report and `step`."""
        return min(max(view.last_step or 0.0, step), self._ends[-1])

    def _time(self, remaining: Remaining, groups: int, now: float) -> None:
        """Estimate the time from the training speed of one group in this run."""
        if self._begun is None or remaining.trained <= self._begun[1]:  # it starts up
            self._begun = now, remaining.trained
        else:
            self._busy_s += remaining.running * (now - self._last)
        self._last, gained = now, remaining.trained - self._begun[1]
        is_known = now - self._begun[0] >= FIRST_S and gained > 0 and self._busy_s > 0
        self.left_s = remaining.seconds(gained / self._busy_s, groups) if is_known else None


class TimeLeft:
    """Takes the records of a journal, and estimates the time until the search's end from the speed of all runs so far.

    The terminal's display measures the speed of its own run, which takes a while; here the first look is enough.
    """

    def __init__(self) -> None:
        self.reset()
        self._busy_s = self._at = 0.0  # time that trials have had workers, and that of the last record
        self._running: set[int] = set()

    def reset(self) -> None:
        """The search was extended: what it has to do is not known yet."""
        self._forecast: Forecast | None = None
        self._ended: list[TrialRecord] | None = None  # since the last estimate; None: all that have
        self._is_known = True

    def now(self, at: float, *, opened: bool) -> None:
        """Take the time of a journal record, before what has happened; `opened`: a driver has started."""
        if opened:
            self._running.clear()
        self._busy_s += len(self._running) * max(at - self._at, 0.0)
        self._at = max(at, self._at)

    def started(self, trial: TrialRecord) -> None:
        if trial.state == "RUNNING":
            self._running.add(trial.id)

    def exited(self, trial: TrialRecord) -> None:
        self._running.discard(trial.id)
        if self._ended is not None:
            self._ended.append(trial)

    def decided(self, trial: TrialRecord, action: str) -> None:
        """Take a decision of the search, before it has changed the trial."""
        if action == "pause":
            self._running.discard(trial.id)
        elif action == "resume" and trial.has_ended:
            self.reset()  # it has been counted as ended

    def seconds(
        self,
        config: ExperimentConfig,
        trials: Mapping[int, TrialRecord],
        live: Iterable[TrialRecord],
        requested: int,
    ) -> float | None:
        """Seconds from the last news until the search's end; None if that can't be told."""
        forecast = self._forecast_of(config)
        if forecast is None:
            return None
        news = max((trials[number].times[-1] for number in self._running if trials[number].times), default=0.0)
        busy_s = self._busy_s + len(self._running) * max(news - self._at, 0.0)
        steps = {number: _step(trials[number], config.searcher.unit) for number in self._running}
        ended = [trial for trial in trials.values() if trial.has_ended] if self._ended is None else self._ended
        self._ended = []
        groups = len(self._running)
        remaining = forecast.remaining(live, steps, groups, ended=ended, requested=requested)
        if busy_s < FIRST_S or not remaining.trained or not groups:
            return None
        return remaining.seconds(remaining.trained / busy_s, groups)

    def _forecast_of(self, config: ExperimentConfig) -> Forecast | None:
        from dray.config.search import build_method
        from dray.errors import ConfigError
        from searchers.method import MAX_TRIALS
        from searchers.previews import is_simulated, preview

        if self._forecast is None and self._is_known:
            try:
                method = build_method(config)
            except ConfigError:  # the user's own, which may not be importable here
                self._is_known = False
                return None
            # Simulating a method takes long, and one without an end has no time left.
            self._is_known = getattr(method, "max_trials", 0) != MAX_TRIALS and not is_simulated(method)
            self._forecast = Forecast(preview(method)) if self._is_known else None
        return self._forecast


def _step(trial: TrialRecord, unit: str) -> float:
    """How far a running trial is, in the searcher's unit: its metrics are newer than its reports to the search."""
    if unit == "batches":
        return trial.batches
    if unit == "records":
        size = trial.hparams.get("global_batch_size")
        return trial.batches * size if isinstance(size, int) else 0.0
    if unit == "epochs" and trial.at and trial.at[-1] and trial.epochs[-1] is not None:
        return trial.batches * trial.epochs[-1] / trial.at[-1]
    return 0.0


def of_budget(budget: Mapping[str, Spent] | None, per_s: Mapping[str, float]) -> float:
    """Seconds until a budget is spent, at the present rates; infinite without one."""
    left = [
        max(each["total"] - each["spent"], 0.0) / per_s[name]
        for name, each in (budget or {}).items()
        if per_s.get(name)
    ]
    return min(left, default=math.inf)


def rounded(seconds: float | None) -> float | None:
    """To two significant digits: it is an estimate, and does not change with each look."""
    return None if seconds is None or not math.isfinite(seconds) else float(f"{seconds:.2g}")
