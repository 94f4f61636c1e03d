"""A search in virtual time, with asynchronous workers, costs of starting and resuming, failures and noise.

The simulation drives the same objects as a real driver, by the same rules: hyperparameters are drawn when a trial gets
its worker, a `Pause` frees the worker without loss of training, and a stopped trial exits before its worker is
reassigned. Nothing is predicted by formula.

    search ── Create, Resume ──▶ queue ──▶ a free worker ──▶ Started
      ▲                                        │  start_cost or resume_cost, then from report to report
      ├──────────── Reported ◀─────────────────┤
      └── Stop, Pause ──▶ the worker is free   └──▶ Exited("completed") after the last report

Entries of the queue and the heap are numbered. Only the one with a trial's current `entry` number is valid; others are
skipped when they come up, so that a stop or a pause need not search for them. The next event is on top of the heap. A
million trials on ten thousand workers take less than a minute.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from searchers.events import (
    Action,
    Create,
    Done,
    DoneReason,
    Event,
    Exited,
    Losses,
    Measured,
    Pause,
    Reason,
    Reported,
    Resume,
    Started,
    Stop,
    assert_never,
)
from searchers.method import Method
from searchers.search import Search
from searchers.views import TrialView


@dataclass(frozen=True, slots=True)
class Curve:
    """A trial's learning curve and speed.

    Args:
        value: Maps a length of training, counted from the trial's beginning, to the searcher's metric or, for a
            `Search` with several metrics, to a tuple of them. Diverging trials may return NaN, infinities or None.
        cost: Time per unit of length, > 0.

    Raises:
        ValueError: `cost` is not a finite number > 0.
    """

    value: Callable[[float], float | Measured | None]
    cost: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cost < math.inf:
            raise ValueError(f"cost: must be a finite number > 0, got {self.cost!r}")


@dataclass(slots=True, kw_only=True)
class Simulation:
    """The outcome of a simulated search."""

    time: float = 0.0  # time of the last event, or `until`
    done: DoneReason | None = None  # None if the simulation was cut at `until`
    trials: int = 0  # number of trials created
    ended: Counter[Reason] = field(default_factory=Counter)
    trained: float = 0.0  # length trained by all trials together, including training lost in failures
    busy: float = 0.0  # summed time in which workers had a trial; `busy / (workers * time)` is the utilisation
    events: int = 0


def simulate(
    search: Search | Method,
    workers: int,
    trial: Callable[[Mapping[str, object]], Curve | None],
    *,
    reports: Sequence[float] | None = None,
    start_cost: float = 0.0,
    resume_cost: float = 0.0,
    failures: float = 0.0,
    max_restarts: int = 5,
    noise: float = 0.0,
    jitter: float = 0.0,
    until: float = math.inf,
    seed: int = 0,
    watch: Callable[[float, Event, list[Action]], None] | None = None,
) -> Simulation:
    """Run a search to its end in virtual time. Time has the unit of `Curve.cost`.

    The same arguments give the same events. A trial's random numbers depend only on `seed` and the trial's number, so
    that two methods can be compared on the same draws.

    Args:
        search: A new search or method, or a `Search` that has started (replayed, extended, or cut by `until`). The
            latter continues as after the death of its driver, each live trial from its last report.
        workers: Number of trials that train at the same time, >= 1.
        trial: Maps hyperparameters to the trial's curve, or to None if they are invalid ("invalid_hp"). Called when the
            trial first gets a worker. With a bare method, the hyperparameters are `{"trial": number}`.
        reports: Lengths at which each trial reports, ascending; the trial ends by itself at the last one. The default
            is the method's rungs; required for a method without rungs.
        start_cost: Time between getting a worker and the first step.
        resume_cost: The same for a trial that continues after a `Pause` or a failure.
        failures: Failures of a busy worker per unit of time. The trial restarts on the same worker from its last report
            (`Started` is sent again).
        max_restarts: Number of failures that a trial survives; at the next one it exits "errored".
        noise: Standard deviation of the noise added to each value.
        jitter: Standard deviation of the logarithm of training times between reports, and of the workers' speeds.
        until: The simulation stops at this time.
        seed: Seed for failures, noise and jitter; hyperparameters are drawn by the search.
        watch: Called at every event with the time, the event and the actions that followed.

    Raises:
        ValueError: At least one argument is out of range; the message names each.
        RuntimeError: The method acts on a trial that does not exist, or all workers are idle before `Done`.

    >>> from searchers import ASHA
    >>> asha = ASHA(max_trials=3, max_length=4, num_rungs=2, max_concurrent_trials=1)
    >>> worse_and_worse = lambda hparams: Curve(lambda step: hparams["trial"] / step)
    >>> simulate(asha, 1, worse_and_worse, start_cost=10).time  # 10 + 4, 10 + 1, 10 + 1
    36.0
    """
    method = search.method if isinstance(search, Search) else search
    steps = tuple(dict.fromkeys(method.rungs if reports is None else reports))
    conditions = _Conditions(start_cost, resume_cost, failures, max_restarts, noise, jitter, until)
    rules = (
        (workers >= 1, f"workers: must be >= 1, got {workers}"),
        (steps and min(steps) > 0, f"reports: must be lengths > 0, got {reports!r} (rungs: {method.rungs!r})"),
        (list(steps) == sorted(steps), f"reports: must be ascending, got {reports!r}"),
        *((value >= 0, f"{name}: must be >= 0, got {value!r}") for name, value in conditions._asdict().items()),
    )
    if faults := [fault for holds, fault in rules if not holds]:
        raise ValueError("\n".join(faults))
    return _Simulator(search, workers, trial, steps, conditions, seed, watch).run()


class _Conditions(NamedTuple):
    """Costs, failures and noise; `simulate` documents them."""

    start_cost: float
    resume_cost: float
    failures: float
    max_restarts: int
    noise: float
    jitter: float
    until: float


@dataclass(slots=True)
class _Trial:
    rng: Random | None
    position: float = 0.0  # length trained, as of the last report
    next: int = 0  # index of the next report
    curve: Curve | None = None
    has_started: bool = False
    restarts: int = 0
    entry: int = -1  # number of the valid entry in the heap or the queue; -1: none
    worker: int = -1  # -1: none
    assigned: float = 0.0  # time at which the worker was assigned
    since: float = 0.0  # time at which the training after the last report began; infinite if it has not begun
    rate: float = 1.0  # time per unit of length since then


@dataclass(slots=True)
class _Simulator:
    """A simulation. `simulate` documents the arguments."""

    search: Search | Method
    workers: int
    curve_of: Callable[[Mapping[str, object]], Curve | None]
    steps: tuple[float, ...]
    conditions: _Conditions
    seed: int
    watch: Callable[[float, Event, list[Action]], None] | None

    result: Simulation = field(default_factory=Simulation)
    trials: dict[int, _Trial] = field(default_factory=dict)  # live trials
    pending: deque[Action] = field(default_factory=deque)  # not carried out yet
    queue: deque[tuple[int, int]] = field(default_factory=deque)  # (entry, trial) waiting for a worker
    heap: list[tuple[float, int, int, bool]] = field(default_factory=list)  # (time, entry, trial, whether it fails)
    last_entry: int = 0
    free: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def run(self) -> Simulation:
        conditions, heap, trials, result = self.conditions, self.heap, self.trials, self.result
        rng = Random(f"{self.seed}:workers")
        self.free = list(reversed(range(self.workers)))
        self.speeds = [math.exp(rng.gauss(0, conditions.jitter)) if conditions.jitter else 1.0 for _ in self.free]
        if isinstance(self.search, Search) and self.search.started:
            self.adopt(self.search)
        else:
            self.pending.extend(self.search.start())
        self.assign_workers()
        while heap and heap[0][0] <= conditions.until:
            time, entry, number, fails = heappop(heap)
            trial = trials.get(number)
            if trial is None or trial.entry != entry:  # the trial was stopped or paused meanwhile
                continue
            result.time = time
            if fails:
                self.fail(number, trial)
            else:
                self.report(number, trial)
            self.assign_workers()
        running = [trial for trial in trials.values() if trial.worker >= 0]
        if running:  # cut at `until`
            result.time = conditions.until
            for trial in running:
                self.free_worker(trial)
        elif result.done is None:
            raise RuntimeError(
                f"all {self.workers} workers are idle, {len(trials)} of {result.trials} trials are paused, but the "
                "method neither resumed nor stopped one, nor decided on Done; see searchers.testing.check_method"
            )
        return result

    def report(self, number: int, trial: _Trial) -> None:
        assert trial.curve is not None
        step = self.steps[trial.next]
        self.result.trained += step - trial.position
        trial.position, trial.next, trial.since = step, trial.next + 1, math.inf
        found = trial.curve.value(step)
        metrics = tuple(self.noisy(each, trial) for each in (found if isinstance(found, tuple) else (found,)))
        first = metrics[0]
        if isinstance(self.search, Search):
            several = metrics if self.search.objectives is not None else ()
            event = Reported(trial=number, step=step, value=first, metrics=several)
        elif first is None or not math.isfinite(first):
            event = Reported(trial=number, step=step, value=math.inf)
        else:  # like the event that `Search` passes to a method
            losses = Losses((first,)) if getattr(self.search, "pareto", False) else None
            event = Reported(trial=number, step=step, value=first, losses=losses)
        if self.continues_after(event, trial):
            self.train(number, trial, self.result.time)

    def noisy(self, value: float | None, trial: _Trial) -> float | None:
        noise = self.conditions.noise
        return value if value is None or trial.rng is None or not noise else value + trial.rng.gauss(0, noise)

    def fail(self, number: int, trial: _Trial) -> None:
        """Restart a trial whose worker failed, from its last report."""
        self.result.trained += self.since_report(trial)
        trial.since = math.inf
        trial.restarts += 1
        if trial.restarts > self.conditions.max_restarts:
            self.exit(number, trial, "errored")
            return
        if self.continues_after(Started(trial=number), trial):
            self.train(number, trial, self.result.time + self.conditions.resume_cost)

    def start(self, number: int, trial: _Trial) -> None:
        trial.worker, trial.assigned, trial.since = self.free.pop(), self.result.time, math.inf
        if not self.continues_after(Started(trial=number), trial):
            return
        if trial.curve is None:
            hparams = {"trial": number} if not isinstance(self.search, Search) else self.search.trials[number].hparams
            trial.curve = self.curve_of(hparams or {})
            if trial.curve is None:
                self.exit(number, trial, "invalid_hp")
                return
        cost = self.conditions.resume_cost if trial.has_started else self.conditions.start_cost
        trial.has_started = True
        self.train(number, trial, self.result.time + cost)

    def train(self, number: int, trial: _Trial, since: float) -> None:
        """Train from `since` on to the next report or failure, or complete the trial."""
        if trial.next == len(self.steps):
            self.exit(number, trial, "completed")
            return
        assert trial.curve is not None
        conditions, rate = self.conditions, trial.curve.cost * self.speeds[trial.worker]
        fails = math.inf
        if trial.rng is not None:
            if conditions.jitter:
                rate *= math.exp(trial.rng.gauss(0, conditions.jitter))
            if conditions.failures:
                fails = self.result.time + trial.rng.expovariate(conditions.failures)
        trial.since, trial.rate = since, rate
        ends = since + (self.steps[trial.next] - trial.position) * rate
        self.last_entry += 1
        trial.entry = self.last_entry
        heappush(self.heap, (min(ends, fails), self.last_entry, number, fails < ends))

    def exit(self, number: int, trial: _Trial, reason: Reason) -> None:
        if trial.worker >= 0:
            self.free_worker(trial)
        del self.trials[number]
        self.result.ended[reason] += 1
        self.send(Exited(trial=number, reason=reason))

    def free_worker(self, trial: _Trial) -> None:
        """Free the trial's worker, without loss of training."""
        more = self.since_report(trial)
        self.result.trained += more
        trial.position += more
        self.result.busy += self.result.time - trial.assigned
        self.free.append(trial.worker)
        trial.worker, trial.since = -1, math.inf

    def since_report(self, trial: _Trial) -> float:
        """Return the length trained since the last report."""
        if self.result.time <= trial.since:
            return 0.0
        return min((self.result.time - trial.since) / trial.rate, self.steps[trial.next] - trial.position)

    def continues_after(self, event: Event, trial: _Trial) -> bool:
        """Send the trial's event, carry out all actions, and return whether the trial still runs."""
        entry = trial.entry
        self.send(event)
        self.carry_out()
        return trial.entry == entry and event.trial in self.trials

    def send(self, event: Event) -> None:
        actions = self.search.on(event)
        self.result.events += 1
        self.pending.extend(actions)
        if self.watch is not None:
            self.watch(self.result.time, event, actions)

    def assign_workers(self) -> None:
        """Carry out pending actions, and assign free workers to waiting trials."""
        while True:
            self.carry_out()
            if not self.queue or not self.free:
                return
            entry, number = self.queue.popleft()
            trial = self.trials.get(number)
            if trial is not None and trial.entry == entry:
                self.start(number, trial)

    def carry_out(self) -> None:
        """Carry out the pending actions, including those that follow from them."""
        while self.pending:
            action = self.pending.popleft()
            match action:
                case Create(trial=number, source=source):
                    self.result.trials += 1
                    trial = self.trials[number] = self.trial_at(number, 0.0 if source is None else source.step)
                    self.enqueue(number, trial)
                case Stop(trial=number):
                    self.exit(number, self.trial_of(action), "stopped")
                case Pause():
                    trial = self.trial_of(action)
                    trial.entry = -1
                    if trial.worker >= 0:
                        self.free_worker(trial)
                case Resume(trial=number):
                    self.enqueue(number, self.resumed(action))
                case Done(reason=reason):
                    self.result.done = reason
                case _:
                    assert_never(action)

    def trial_of(self, action: Stop | Pause | Resume) -> _Trial:
        trial = self.trials.get(action.trial)
        if trial is None:
            raise RuntimeError(f"the method decided on {action}, but that trial has ended or was never created")
        return trial

    def resumed(self, action: Resume) -> _Trial:
        number = action.trial
        if number not in self.trials and isinstance(self.search, Search) and number in self.search.trials:
            # The trial ended before the search was extended.
            self.trials[number] = self.from_view(number, self.search.trials[number])
        trial = self.trial_of(action)
        if trial.entry >= 0:
            raise RuntimeError(f"the method decided on {action}, but that trial is not paused")
        return trial

    def enqueue(self, number: int, trial: _Trial) -> None:
        self.last_entry += 1
        trial.entry = self.last_entry
        self.queue.append((self.last_entry, number))

    def rng_of(self, number: int) -> Random | None:
        conditions = self.conditions
        if not (conditions.noise or conditions.jitter or conditions.failures):
            return None  # seeding a generator would take longer than the rest of a trial's simulation
        return Random(f"{self.seed}:{number}")

    def adopt(self, search: Search) -> None:
        """Take over the live trials of a search that has started, in the order in which a driver that resumes it gives
        them workers."""
        self.result.trials += len(search.trials)
        self.result.done = None if search.done is None else search.done.reason
        for number, view in search.live.items():
            self.trials[number] = trial = self.from_view(number, view)
            if view.stop_requested:
                self.pending.append(Stop(trial=number))
            elif view.state != "PAUSED":
                self.enqueue(number, trial)

    def from_view(self, number: int, view: TrialView) -> _Trial:
        """Create the trial of a search that has started, at its last report."""
        trial = self.trial_at(number, view.last_step or 0.0)
        trial.has_started = view.hparams is not None
        return trial

    def trial_at(self, number: int, position: float) -> _Trial:
        following = sum(step <= position for step in self.steps) if position else 0
        return _Trial(rng=self.rng_of(number), position=position, next=following)
