"""Your own search method: the median rule, in place of one of dray's methods.

A method decides which trials are created, stopped, paused and resumed. The sampler draws their hyperparameters, and
the driver runs them. A method is a state machine, `searchers.Method`: events in (`Started`, `Reported`, `Exited`),
actions out (`Create`, `Stop`, `Pause`, `Resume`, `Done`). It has no threads, clock or I/O, so it can be tested
thoroughly, and simulated before anything is trained:

    from searchers import Search, parse_space
    from searchers.simulate import Curve, simulate
    from searchers.testing import check_method

    make = lambda: MedianStopping(max_trials=20, rungs=[1, 2, 4, 8])
    check_method(make, max_creations=20 + 80)            # late and repeated reports, failures, replay, ...
    simulate(make(), 8, lambda hparams: Curve(...))      # 8 workers in virtual time

    dray.Experiment({"searcher": {"name": "custom", "max_length": {"epochs": 8}, ...}, ...}, method=make()).run()

or, from the command line, with a config that names the class and its arguments, such as `digits.yaml` here:

    dray experiment create examples/own_method/digits.yaml examples

The `Search` that holds the method draws hyperparameters, negates the metric if larger is better, turns values that are
not finite into +inf, and logs every event; if the driver dies, the search is replayed from its log.

The rule: a trial stops at a rung if it is worse there than the median of all trials that reached it so far, itself
included. It is from Golovin et al., "Google Vizier" (KDD 2017), with the values at the rungs instead of running
averages.

    python median_stopping.py            # against random search and ASHA, simulated
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import cast

from searchers import (
    ASHA,
    Action,
    Create,
    Event,
    Exited,
    Method,
    MethodError,
    RandomSearch,
    Reported,
    Search,
    Stop,
    parse_space,
)
from searchers.simulate import Curve, simulate


class MedianStopping:
    """Random search that stops trials worse than the median.

    Args:
        max_trials: Trials to run, >= 1.
        rungs: Lengths at which trials are compared, ascending; the last one is a trial's full length.
        max_concurrent_trials: Maximum number of trials that run at a time.
    """

    def __init__(self, *, max_trials: int, rungs: Sequence[int], max_concurrent_trials: int = 16) -> None:
        self.rungs = tuple(rungs)
        # Random search creates the trials, counts them against the budget, and ends the search.
        self._trials = RandomSearch(max_trials=max_trials, max_concurrent_trials=max_concurrent_trials)
        self._next: dict[int, int] = {}  # the next rung of each running trial
        self._values: list[list[float]] = [[] for _ in self.rungs]  # finite ones, ascending

    def start(self) -> list[Action]:
        """The first trials."""
        return self._follow(self._trials.start())

    def on(self, event: Event) -> list[Action]:
        """Stop a trial that is worse than the median, and create one when a trial has ended."""
        actions = self._trials.on(event)  # raises IllegalEvent, before anything changes, if there is no such trial
        match event:
            case Reported(trial=trial) if trial in self._next and not self._continues(event):
                # Later reports, before the trial has stopped, are not compared.
                del self._next[trial]
                return [Stop(trial=trial)]
            case Exited(trial=trial):
                self._next.pop(trial, None)
        return self._follow(actions)

    def _continues(self, report: Reported) -> bool:
        """Whether the trial continues: it is compared once at each rung that it has crossed."""
        value = math.inf if report.value is None else report.value
        while (rung := self._next[report.trial]) < len(self.rungs) and report.step >= self.rungs[rung]:
            self._next[report.trial] = rung + 1
            values, is_last = self._values[rung], rung == len(self.rungs) - 1  # at the last rung a trial ends by itself
            if not math.isfinite(value):
                return is_last
            insort(values, value)
            if value > values[len(values) // 2] and not is_last:
                return False
        return True

    def _follow(self, actions: list[Action]) -> list[Action]:
        self._next.update((action.trial, 0) for action in actions if isinstance(action, Create))
        return actions

    def progress(self, trained: Mapping[int, float]) -> float:
        """The share of the whole search that is done, from 0 to 1."""
        return self._trials.progress(trained)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Add trials. Longer ones are not possible."""
        if max_length is not None:
            raise MethodError([("searcher.max_length", f"the rungs of this search are fixed, got {max_length!r}")])
        return self._follow(self._trials.extend(max_trials=max_trials))


def compare(seeds: int = 10) -> dict[str, tuple[float, float]]:
    """Mean best loss, and mean hours on 8 workers, of each method over several simulated searches."""

    def trial(hparams: Mapping[str, object]) -> Curve:
        """A learning rate of 1e-3 is best; others learn more slowly, to a higher loss."""
        off = abs(math.log10(cast(float, hparams["lr"])) + 3)
        return Curve(lambda epoch: 0.1 + 0.1 * off + (1 + off) / epoch, cost=0.1)

    def methods() -> dict[str, Method]:
        return {
            "random search": RandomSearch(max_trials=100, max_length=27, max_concurrent_trials=8),
            "median stopping": MedianStopping(max_trials=100, rungs=[1, 3, 9, 27], max_concurrent_trials=8),
            "ASHA": ASHA(max_trials=100, max_length=27, num_rungs=4, divisor=3, max_concurrent_trials=8),
        }

    space = parse_space({"lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1}})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods()}
    for seed in range(seeds):
        for name, method in methods().items():
            search = Search(method, space, seed=Random(seed).getrandbits(31), smaller_is_better=True, log=_forget)
            hours = simulate(search, 8, trial, noise=0.01, jitter=0.2, start_cost=0.05, seed=seed).time
            best = min(view.last for view in search.trials.values() if view.last is not None and view.last_step == 27)
            found[name].append((best, hours))
    return {name: (fmean(best for best, _ in runs), fmean(hours for _, hours in runs)) for name, runs in found.items()}


def _forget(record: Mapping[str, object]) -> None:
    """A simulation needs no journal."""


if __name__ == "__main__":
    for name, (loss, hours) in compare().items():
        print(f"{name:16} best loss {loss:.3f} in {hours:5.1f} hours")
