"""Population-based training (PBT): trials train side by side, and the worst continue from the best.

The source is Jaderberg et al., "Population Based Training of Neural Networks" (arXiv 1711.09846). Whenever a trial has
trained for another interval, it is compared with the latest reports of the others. If it is among the worst
`quantile`, it is stopped (exploit), and a new trial takes its place and its processes. That begins from the checkpoint
of a random trial among the best `quantile`, with hyperparameters that `Explorer` derives from that trial's (explore).
There is no synchronisation, as in Ray's PBT: trials may be compared at different lengths.

The paper leaves some points open:

* If fewer trials can run at a time than the population has, they take turns: a trial that has trained for an interval
  is paused while others wait for workers.
* A trial that diverges, is canceled, is invalid or runs out of memory is replaced like one that was stopped, if another
  has reported. One that fails is replaced only after it has reported, so that a search whose trials all fail ends.
* A requested trial takes part in the comparisons, but is not replaced. One that has completed takes no further part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import cast

from searchers.domains import Categorical, build, numbers_of
from searchers.events import (
    Action,
    Create,
    Event,
    Exited,
    Pause,
    Reported,
    Requested,
    Resume,
    Source,
    Started,
    Stop,
    assert_never,
)
from searchers.method import MAX_RUNGS, Fields, check_extension
from searchers.numeric_domains import Double, Int, Log
from searchers.objectives import loss_of
from searchers.slots import TrialSlots
from searchers.space import Space

MAX_POPULATION = 1_000  # a comparison takes time in proportion to it
_ATTEMPTS = 100


class PBT:
    """Population-based training.

    Args:
        max_length: Length of a trial, including what its ancestors trained, >= 1.
        population: Number of trials that train at a time, from 2 to `MAX_POPULATION`.
        interval: Length between two comparisons of a trial, >= 1 and <= max_length.
        quantile: Share of the population that is replaced, and from which others continue; > 0 and <= 0.5.
        seed: Seed of the choice among the best.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

    >>> pbt = PBT(max_length=4, population=2, interval=2, quantile=0.5)
    >>> pbt.rungs, pbt.start()
    ((2, 4), [Create(trial=0), Create(trial=1)])
    >>> [pbt.on(Started(trial=trial)) for trial in (0, 1)], pbt.on(Reported(trial=0, step=2, value=0.5))
    ([[], []], [])
    >>> pbt.on(Reported(trial=1, step=2, value=0.6))
    [Stop(trial=1), Create(trial=2, source=Source(trial=0, step=2, batches=None))]
    """

    def __init__(
        self, *, max_length: int, population: int, interval: int, quantile: float = 0.25, seed: int = 0
    ) -> None:
        check = Fields()
        check.integers(1, max_length=max_length, interval=interval)
        check.integers(2, population=population)
        if population > MAX_POPULATION:
            check.fault("population", f"must be at most {MAX_POPULATION}, got {population}")
        if not 0 < quantile <= 0.5:
            check.fault("quantile", f"must be > 0 and <= 0.5, got {quantile!r}")
        check.raise_faults()
        if interval > max_length:
            check.fault("interval", f"must be at most max_length, which is {max_length}, got {interval}")
        if max_length > interval * MAX_RUNGS:
            check.fault("interval", f"must be at least max_length / {MAX_RUNGS}, got {interval}")
        check.raise_faults()
        self.population, self.interval, self.quantile = population, interval, quantile
        self._seed = seed
        # The budget grows with each replacement.
        self._slots = TrialSlots(max_trials=population, max_concurrent=population)
        self._latest: dict[int, tuple[float, Source]] = {}  # value and checkpoint of each trial that is compared
        self._unproven: set[int] = set()  # those of them that have the value of the trial that they have replaced
        self._with_workers: set[int] = set()
        self._freed = 0  # workers that stopped and paused trials have left, and no other trial has taken yet
        self._set_length(max_length)

    @property
    def replaced_at_once(self) -> int:
        """Largest number of trials that are replaced while the population trains for an interval in step."""
        return _share(self.population, self.quantile)

    def _set_length(self, max_length: int) -> None:
        self._max_length = max_length
        self.rungs: tuple[int, ...] = (*range(self.interval, max_length, self.interval), max_length)

    def start(self) -> list[Action]:
        return self._slots.fill()

    def on(self, event: Event) -> list[Action]:
        """Compare a trial that has reported, and replace one that is among the worst or has failed."""
        trial = event.trial
        if not self._slots.is_live(trial):
            return []
        match event:
            case Started():
                if trial not in self._with_workers:
                    self._with_workers.add(trial)
                    self._freed = max(self._freed - 1, 0)
                return []
            case Reported(step=step, value=value):
                is_repeated = trial in self._latest and self._latest[trial][1].step == step
                if is_repeated or step >= self._max_length or not self._slots.has_slot(trial):
                    return []
                checkpoint = Source(trial=trial, step=step, batches=event.batches)
                self._latest[trial] = (loss_of(value), checkpoint)
                self._unproven.discard(trial)
                return self._exploit(trial) or self._take_turns(trial)
            case Exited(reason=reason):
                was_member = trial in self._slots.occupants
                has_reported = self._latest.pop(trial, None) is not None and trial not in self._unproven
                self._unproven.discard(trial)
                self._with_workers.discard(trial)  # another trial may have taken its workers before this event
                self._slots.end(trial, reason)
                is_lost = reason in ("diverged", "canceled") or (reason == "errored" and has_reported)
                return self._fill(trial, replaces=was_member and is_lost and bool(self._best()))
            case _:
                assert_never(event)

    def _leave(self, trial: int) -> None:
        if trial in self._with_workers:
            self._with_workers.remove(trial)
            self._freed += 1

    def _ranked(self) -> list[int]:
        return sorted(self._latest, key=lambda trial: (self._latest[trial][0], trial))

    def _best(self) -> list[int]:
        known = [trial for trial in self._ranked() if trial not in self._unproven and self._latest[trial][0] < math.inf]
        return known[: _share(len(self._slots.occupants), self.quantile) or 1]

    def _exploit(self, trial: int) -> list[Action]:
        """Replace a trial that is among the worst, whatever the trials report that have not reported yet."""
        members, value = self._slots.occupants, self._latest[trial][0]
        count = max(len(members), len(self._latest))
        is_worst = trial in self._ranked()[count - _share(count, self.quantile) :]
        if not is_worst or not any(self._latest[each][0] < value for each in self._best()):
            return []
        del self._latest[trial]
        self._slots.release(trial)
        self._leave(trial)
        return [Stop(trial=trial), *self._fill(trial, value, replaces=trial in members)]

    def _fill(self, trial: int, value: float = math.inf, *, replaces: bool) -> list[Action]:
        """Create trials for free slots, after this trial has left, from one of the best; or return `Done`.

        Until a new trial reports, it has the place of the one before it, with its last value.
        """
        self._slots.max_trials += replaces
        actions, best = self._slots.fill(), self._best()
        if not best:
            return actions
        _, source = self._latest[Random(f"{self._seed}:{trial}").choice(best)]
        for place, action in enumerate(actions):
            if isinstance(action, Create):
                actions[place] = replace(action, source=source)
                self._latest[action.trial] = (value, source)
                self._unproven.add(action.trial)
        return actions

    def _take_turns(self, trial: int) -> list[Action]:
        """Let others go first if more wait for workers than workers have become free."""
        if trial not in self._with_workers or len(self._slots.occupants - self._with_workers) <= self._freed:
            return []
        self._leave(trial)
        return [Pause(trial=trial), Resume(trial=trial)]

    def requested(self, request: Requested) -> list[Action]:
        """Create the trial, beside the population."""
        return [self._slots.create_requested(request)]

    def progress(self, trained: Mapping[int, float]) -> float:
        """Return the mean share that the population has trained; trials that have ended count as 1."""
        members = self._slots.occupants
        left = sum(1 - min(max(trained.get(trial, 0.0), 0.0), 1.0) for trial in members)
        return self._slots.progress(1 - left / self.population)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Let the population train longer; completed trials continue.

        Raises:
            MethodError: The length does not grow, or more trials are asked for.
        """
        check_extension(
            max_trials=(max_trials, "a population keeps its size"), max_length=(max_length, self._max_length)
        )
        assert max_length is not None
        self._set_length(max_length)
        completed = sorted(self._slots.completed)
        self._slots.extend(max_trials=self._slots.max_trials, max_concurrent=self.population, to_resume=completed)
        return self._slots.fill()


def _share(count: int, quantile: float) -> int:
    return min(math.ceil(count * quantile), count // 2)


class Explorer:
    """Derives hyperparameters from those of the trial whose checkpoint a new one begins from; draws others at random.

    Each hyperparameter is drawn anew with `resample_probability`. Otherwise a number is multiplied by one of `factors`,
    and kept in its range, and a category stays or becomes a neighbour in the list.

    Args:
        space: The space.
        seed: Any integer.
        resample_probability: From 0 to 1.
        factors: Numbers > 0.
    """

    def __init__(
        self, space: Space, seed: int, *, resample_probability: float = 0.25, factors: Sequence[float] = (0.8, 1.2)
    ) -> None:
        self.space, self.seed = space, seed
        self._resample_probability, self._factors = resample_probability, tuple(factors)

    def ask(self, trial: int) -> dict[str, object]:
        return self.space.sample(Random(f"{self.seed}:{trial}"))

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """No-op: draws don't depend on results."""

    def explore(self, trial: int, hparams: Mapping[str, object]) -> dict[str, object]:
        """Derive hyperparameters for a new trial. If none of `_ATTEMPTS` satisfies the constraint, return the same."""
        rng, known = Random(f"{self.seed}:{trial}"), dict(numbers_of(self.space.root, hparams))

        def value_of(name: str, domain: Categorical | Int | Double | Log) -> float:
            value = known.get(name)
            if value is None or rng.random() < self._resample_probability:  # None: outside of the space, or new
                drawn = domain.sample(rng) if not isinstance(domain, Categorical) else rng.randrange(len(domain.vals))
                return cast("float", drawn)
            if isinstance(domain, Categorical):
                return min(max(int(value) + rng.choice((-1, 0, 1)), 0), len(domain.vals) - 1)
            low, high = domain.bounds if isinstance(domain, Log) else (domain.minval, domain.maxval)
            return domain.nearest(min(max(value * rng.choice(self._factors), low), high))

        for _ in range(_ATTEMPTS):
            found = cast("dict[str, object]", build(self.space.root, value_of))
            if self.space.allows(found):
                return found
        return dict(hparams)
