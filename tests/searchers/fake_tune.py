"""A fake of Ray Tune that calls a searcher and a scheduler like `ray.tune.execution.TuneController`, step by step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from searchers import (
    ASHA,
    AdaptiveASHA,
    Auto,
    Journal,
    Method,
    PromotionASHA,
    RandomSearch,
    Single,
    TrialView,
    parse_space,
)
from searchers.search import Record
from searchers.tune import Scheduler, Searcher

METRIC, MODE = "loss", "min"
SPEC = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "layers": {"type": "int", "minval": 1, "maxval": 4},
}
SPACE = parse_space(SPEC)
LENGTH = 9
METHODS: dict[str, Callable[[], Method]] = {
    "single": lambda: Single(max_length=LENGTH),
    "random": lambda: RandomSearch(max_trials=7, max_concurrent_trials=3),
    "random with a length": lambda: RandomSearch(max_trials=5, max_length=LENGTH),
    "asha": lambda: ASHA(max_trials=18, max_length=LENGTH, num_rungs=3, divisor=3, max_concurrent_trials=5),
    "promotion": lambda: PromotionASHA(
        max_trials=18, max_length=LENGTH, num_rungs=3, divisor=3, max_concurrent_trials=5
    ),
    "promotion, one at a time": lambda: PromotionASHA(
        max_trials=8, max_length=LENGTH, num_rungs=3, divisor=2, max_concurrent_trials=1
    ),
    "auto": lambda: Auto(max_trials=18, max_length=LENGTH, max_concurrent_trials=5),
    "adaptive": lambda: AdaptiveASHA(max_trials=15, max_length=LENGTH, divisor=3, max_concurrent_trials=6),
    "adaptive, promotion": lambda: AdaptiveASHA(
        max_trials=15, max_length=LENGTH, divisor=3, variant="promotion", max_concurrent_trials=6
    ),
}


@dataclass(eq=False)
class FakeTrial:
    """A Tune trial, which saves a checkpoint when it is paused, and with every second result."""

    trial_id: str
    config: dict[str, Any]
    status: str = "PENDING"
    step: int = 0
    saved: int | None = None
    last_result: dict[str, Any] = field(default_factory=dict)
    is_saving: bool = False  # before it is paused
    ran: int = 0  # results returned so far

    @property
    def checkpoint(self) -> int | None:
        return self.saved

    @property
    def has_ended(self) -> bool:
        return self.status in ("TERMINATED", "ERROR")

    def set_status(self, status: str) -> None:
        self.status = status


class FakeTune:
    """One run of a `Tuner`.

    Args:
        workers: Number of concurrent trials.
        value: The metric of a trial with this configuration at this step.
        length: Number of steps after which a trial ends by itself.
        seed: Seed for the order of results and for failures.
        failures: The probability of a failure instead of a result; a quarter of them end the trial.
        restored: The searcher's state and the trials, as saved by the previous run.
    """

    def __init__(
        self,
        searcher: Searcher,
        scheduler: Scheduler,
        *,
        workers: int,
        value: Callable[[Mapping[str, Any], int], float],
        length: int = 1000,
        seed: int = 0,
        failures: float = 0.0,
        restored: tuple[Path, list[FakeTrial]] | None = None,
    ) -> None:
        self.searcher, self.scheduler = searcher, scheduler
        self._workers, self._value, self._length, self._failures = workers, value, length, failures
        self._rng = Random(seed)
        self._ids = (f"{seed}-{number}" for number in range(10**9))
        self._is_finished = False
        self.trials: list[FakeTrial] = []
        # `tune.run` does this before it creates a controller; after `Tuner.restore` with another number.
        scheduler.set_search_properties(METRIC, MODE, num_samples=2**63 - 1 if restored is None else 1)
        if restored is None:
            return
        state, trials = restored
        searcher.restore(str(state))
        for trial in trials:
            if not trial.has_ended:
                trial.status, trial.is_saving = "PENDING", False
                trial.step = trial.saved or 0
            self._add(trial)

    def run(self) -> Iterator[None]:
        """Run until all trials have ended, yielding after each step."""
        for _ in range(20_000):
            if self._is_finished and all(trial.has_ended for trial in self.trials):
                return
            self.step()
            yield
        raise AssertionError("the search does not end")

    def snapshot(self) -> list[FakeTrial]:
        """Return the trials as Tune would save them now."""
        return copy.deepcopy(self.trials)

    def step(self) -> None:
        if not self._is_finished and not any(trial.status == "PENDING" for trial in self.trials):
            tune_id = next(self._ids)
            config = self.searcher.suggest(tune_id)
            if config == self.searcher.FINISHED:
                self._is_finished = True
            elif config is not None:
                assert isinstance(config, dict)
                self._add(FakeTrial(trial_id=tune_id, config=config))
        chosen = self.scheduler.choose_trial_to_run(self)
        if chosen is not None:
            assert chosen.status == "PAUSED"
            chosen.status, chosen.step = "PENDING", chosen.saved
        for trial in self.trials:
            if trial.status == "PENDING" and len(self._of("RUNNING")) < self._workers:
                trial.status = "RUNNING"
        if running := self._of("RUNNING"):
            self._continue(self._rng.choice(running))

    def stop_trial(self, trial: FakeTrial) -> None:
        if trial.status == "RUNNING":
            trial.last_result["done"] = True
            self.scheduler.on_trial_complete(self, trial, dict(trial.last_result))
            self.searcher.on_trial_complete(trial.trial_id, result=dict(trial.last_result))
        else:
            self.scheduler.on_trial_remove(self, trial)
            self.searcher.on_trial_complete(trial.trial_id)
        trial.status = "TERMINATED"

    def _of(self, status: str) -> list[FakeTrial]:
        return [trial for trial in self.trials if trial.status == status]

    def _add(self, trial: FakeTrial) -> None:
        self.scheduler.on_trial_add(self, trial)
        self.trials.append(trial)

    def _continue(self, trial: FakeTrial) -> None:
        if self._rng.random() < self._failures:
            self._fail(trial)
        elif trial.is_saving:
            trial.saved, trial.is_saving, trial.status = trial.step, False, "PAUSED"
        else:
            self._report(trial)

    def _fail(self, trial: FakeTrial) -> None:
        trial.is_saving = False
        self.scheduler.on_trial_error(self, trial)
        if self._rng.random() < 0.25:
            self.searcher.on_trial_complete(trial.trial_id, error=True)
            trial.status = "ERROR"
        else:  # max_failures=-1
            trial.status, trial.step = "PENDING", trial.saved or 0
            self.scheduler.on_trial_add(self, trial)

    def _report(self, trial: FakeTrial) -> None:
        if trial.step == self._length:  # the function returns, and Tune repeats its last result
            self.stop_trial(trial)
            return
        trial.step += 1
        trial.ran += 1
        result = {"training_iteration": trial.step, METRIC: self._value(trial.config, trial.step)}
        decision = self.scheduler.on_trial_result(self, trial, dict(result))
        if decision != "STOP":
            self.searcher.on_trial_result(trial.trial_id, dict(result))
        trial.last_result = result
        if trial.step % 2 == 0:
            trial.saved = trial.step
        if decision == "STOP":
            self.stop_trial(trial)
        elif decision == "PAUSE":
            trial.is_saving = True
        else:
            assert decision == "CONTINUE"


def value(config: Mapping[str, Any], step: float) -> float:
    """Return a value that decreases with the steps, to different limits; NaN for some trials."""
    quality = abs(math.log10(config["lr"]) + 2.5) + 0.1 * config["layers"]
    return math.nan if quality > 1.6 else quality + 1 / step


def trials_of(method: Any) -> int:
    return int(method.max_trials)


def pair(method: Method, space: Any = SPEC, **arguments: Any) -> tuple[Searcher, Scheduler]:
    searcher = Searcher(method, space, **arguments)
    return searcher, Scheduler(searcher)


def begun(method: Method, space: Any = SPEC, **arguments: Any) -> tuple[Searcher, Scheduler]:
    """Return a pair that has received the settings of `tune.TuneConfig`."""
    searcher, scheduler = pair(method, space, **arguments)
    assert scheduler.set_search_properties("loss", "min", num_samples=2**63 - 1)
    return searcher, scheduler


def suggested(searcher: Searcher, scheduler: Scheduler, number: int) -> list[FakeTrial]:
    """Start this many trials."""
    trials = []
    for each in range(number):
        config = searcher.suggest(f"t{each}")
        assert isinstance(config, dict)
        trials.append(FakeTrial(trial_id=f"t{each}", config=config))
        scheduler.on_trial_add(None, trials[-1])
        trials[-1].status = "RUNNING"
    return trials


def report(scheduler: Scheduler, trial: FakeTrial, step: int, loss: float | None = 1.0) -> str:
    trial.last_result = {"training_iteration": step, METRIC: loss}
    return scheduler.on_trial_result(None, trial, dict(trial.last_result))


def journal(searcher: Searcher, tmp_path: Path) -> list[Record]:
    """Return the searcher's saved state without Tune's own records."""
    searcher.save(str(tmp_path / "state"))
    return [each for each in Journal.read(tmp_path / "state") if each["event"] not in ("space", "suggested")]


def views(searcher: Searcher) -> list[TrialView]:
    assert searcher.search is not None
    return list(searcher.search.trials.values())
