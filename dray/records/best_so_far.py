"""The best value so far as a small curve over time, for lists."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from dray.records.trial_record import TrialRecord
from searchers.views import NEVER_BEST

POINTS = 24


class BestSoFar:
    """The improvements of a search's best value: found in all trials at the first look, and then added as they come."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float, int]] | None = None  # time, loss (smaller is better), trial
        self._trials: dict[int, float] = {}  # those that have improved it, and how far

    def reset(self) -> None:
        """The next look goes through all trials."""
        self._found = None

    def validated(self, trial: TrialRecord) -> None:
        """Take a trial's newest validation."""
        if self._found is None or not trial.is_eligible or trial.rank is None:
            return
        if trial.rank[1] > self._trials.get(trial.id, math.inf):  # it has restarted, and trained worse this time
            self.reset()
        elif not self._found or trial.rank[1] < self._found[-1][1]:
            at = trial.times[trial.at.index(trial.rank[2])]
            self._add(max(at, self._found[-1][0] if self._found else at), trial.rank[1], trial.id)

    def exited(self, trial: TrialRecord) -> None:
        """A trial that has failed is never the best, also in retrospect."""
        if trial.id in self._trials and trial.state in NEVER_BEST:
            self.reset()

    def _add(self, at: float, loss: float, trial: int) -> None:
        assert self._found is not None
        self._found.append((at, loss, trial))
        self._trials[trial] = loss

    def curve(self, trials: Iterable[TrialRecord], sign: int, last: float | None) -> list[float]:
        """The best value at up to `POINTS` equal steps of time, from the first validation to `last`."""
        if self._found is None:
            self._find(trials, sign)
        assert self._found is not None
        if not self._found:
            return []
        times, losses = [each[0] for each in self._found], [each[1] for each in self._found]
        begin, end = times[0], max(last or 0.0, times[-1])
        if begin == end:
            shown = losses[-POINTS:]
        else:
            steps = (begin + (end - begin) * step / (POINTS - 1) for step in range(POINTS))
            shown = [losses[bisect_right(times, at) - 1] for at in steps]
            shown[-1] = losses[-1]
        return [float(f"{sign * loss:.4g}") for loss in shown]

    def _find(self, trials: Iterable[TrialRecord], sign: int) -> None:
        points: list[tuple[float, float, int]] = []
        for trial in trials:
            if not trial.is_eligible or trial.rank is None:
                continue
            if len(trial.measured) == 1:
                losses = ((at, sign * value) for at, value in zip(trial.times, trial.values, strict=True))
                points += [(at, loss, trial.id) for at, loss in losses if math.isfinite(loss)]
            else:  # constraints: only its best validation
                points.append((trial.times[trial.at.index(trial.rank[2])], trial.rank[1], trial.id))
        self._found, self._trials, best = [], {}, math.inf
        for at, loss, number in sorted(points):
            if loss < best:
                self._add(at, loss, number)
                best = loss
