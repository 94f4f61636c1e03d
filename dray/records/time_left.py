"""How long a running experiment still takes, from its files alone: the list, the commands and the page say the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dray.records.forecast import FIRST_S, Forecast
from dray.records.trial_record import TrialRecord

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig


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


def of_budget(budget: Mapping[str, Mapping[str, float]] | None, per_s: Mapping[str, float]) -> float:
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
