"""A search in virtual time: asynchronous workers, costs of starting and resuming, failures, noise.

    search ── Create, Resume ──▶ queue ──▶ a free worker ──▶ Started
      ▲                                        │  start_cost or resume_cost, then from report to report
      ├──────────── Reported ◀─────────────────┤
      └── Stop, Pause ──▶ the worker is free   └──▶ Exited("completed") after the last report

It drives the same objects as a real driver, by the same rules: hyperparameters are drawn when a trial gets its worker,
a `Pause` frees the worker and keeps what was trained, a stopped trial's `Exited` is told before its place is given
away. Nothing is predicted by formula. The next event is on top of one heap, so a million trials on ten thousand workers
take less than a minute.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from random import Random

from searchers.events import (
    Action,
    Create,
    Done,
    DoneReason,
    Event,
    Exited,
    Pause,
    Reason,
    Reported,
    Resume,
    Started,
    Stop,
    assert_never,
)
from searchers.method import Method
from searchers.search import Search, TrialView


@dataclass(frozen=True, slots=True)
class Curve:
    """How a trial learns, and how fast.

    Args:
        value: From a length of training, counted from the trial's beginning, to the searcher's metric. A trial that
            diverges may give NaN, infinities or None.
        cost: Time per unit of length, > 0.

    Raises:
        ValueError: The cost is not a finite number > 0.
    """

    value: Callable[[float], float | None]
    cost: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cost < math.inf:
            raise ValueError(f"cost: must be a finite number > 0, got {self.cost!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of a simulated search.

    Attributes:
        time: Time of the last event, or `until`.
        done: Why the search ended; None if it was cut at `until`.
        trials: Trials that were created.
        ended: How many ended, by reason.
        trained: Length trained by all trials together, including what failures lost.
        busy: Time in which workers had a trial, summed over workers; `busy / (workers * time)` is the utilisation.
        events: Number of events that the search was told.
    """

    time: float
    done: DoneReason | None
    trials: int
    ended: Mapping[Reason, int]
    trained: float
    busy: float
    events: int


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

    The same arguments give the same events. A trial's random numbers depend on `seed` and its number alone, so that two
    methods can be compared on the same draws.

    Args:
        search: A new search or method; or a `Search` that has started (replayed, extended, or cut by `until`): it goes
            on as after its driver's death, each live trial from its last report.
        workers: Trials that train at the same time, >= 1.
        trial: From hyperparameters to the trial's curve; None if they are invalid ("invalid_hp"). Called when the trial
            first gets a worker. A method alone draws none: they are then `{"trial": its number}`.
        reports: Lengths at which each trial reports, ascending; it ends by itself at the last one. By default the
            method's rungs; needed for a method that has none.
        start_cost: Time from getting a worker to the first step.
        resume_cost: The same for a trial that goes on after a `Pause` or a failure.
        failures: Rate at which a worker fails while it has a trial, per unit of time. The trial goes on, on the same
            worker, from its last report (`Started` comes again).
        max_restarts: How many failures a trial survives; at the next it exits "errored".
        noise: Standard deviation of what is added to each value.
        jitter: Relative spread of the time that a stretch of training takes and of the workers' speeds (the standard
            deviation of its logarithm).
        until: Nothing happens after this time.
        seed: Of failures, noise and jitter; hyperparameters are drawn by the search.
        watch: Called at every event: (time, event, actions that followed).

    Raises:
        ValueError: An argument is out of its range; all are named.
        RuntimeError: The method is at fault: it acts on a trial that does not exist, or all workers are idle and `Done`
            has not come.

    >>> from searchers import ASHA
    >>> asha = ASHA(max_trials=3, max_length=4, num_rungs=2, max_concurrent_trials=1)
    >>> worse_and_worse = lambda hparams: Curve(lambda step: hparams["trial"] / step)
    >>> simulate(asha, 1, worse_and_worse, start_cost=10).time  # 10 + 4, 10 + 1, 10 + 1
    36.0
    """
    method = search.method if isinstance(search, Search) else search
    steps = tuple(dict.fromkeys(method.rungs if reports is None else reports))
    world = _World(start_cost, resume_cost, failures, max_restarts, noise, jitter, until, seed)
    rules = (
        (workers >= 1, f"workers: must be >= 1, got {workers}"),
        (steps and sorted(steps)[0] > 0, f"reports: must be lengths > 0, got {reports!r} (rungs: {method.rungs!r})"),
        (list(steps) == sorted(steps), f"reports: must be ascending, got {reports!r}"),
        *(
            (value >= 0, f"{name}: must be >= 0, got {value!r}")
            for name, value in asdict(world).items()
            if name != "seed"
        ),
    )
    if faults := [fault for holds, fault in rules if not holds]:
        raise ValueError("\n".join(faults))
    return _Simulator(search, workers, trial, steps, world, watch).run()


@dataclass(frozen=True, slots=True)
class _World:
    start_cost: float
    resume_cost: float
    failures: float
    max_restarts: int
    noise: float
    jitter: float
    until: float
    seed: int


@dataclass(slots=True)
class _Trial:
    rng: Random | None
    position: float = 0.0  # length trained, as of its last report
    next: int = 0  # index of its next report
    curve: Curve | None = None
    began: bool = False
    restarts: int = 0
    due: int = -1  # number of its one valid entry in the heap or the queue
    worker: int = -1  # -1: none
    taken: float = 0.0  # when it got its worker
    since: float = 0.0  # when the stretch of training began that it is in
    rate: float = 1.0  # time for a unit of length in this stretch


@dataclass(slots=True)
class _Simulator:
    search: Search | Method
    workers: int
    make: Callable[[Mapping[str, object]], Curve | None]
    steps: tuple[float, ...]
    world: _World
    watch: Callable[[float, Event, list[Action]], None] | None

    time: float = 0.0
    done: DoneReason | None = None
    created: int = 0
    trained: float = 0.0
    busy: float = 0.0
    events: int = 0
    ended: Counter[Reason] = field(default_factory=Counter)
    trials: dict[int, _Trial] = field(default_factory=dict)  # live ones
    todo: deque[Action] = field(default_factory=deque)  # actions not carried out yet
    queue: deque[tuple[int, int]] = field(default_factory=deque)  # (number, trial) that wait for a worker
    heap: list[tuple[float, int, int, bool]] = field(default_factory=list)  # (time, number, trial, it fails)
    number: int = 0
    free: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def run(self) -> Simulation:
        world, heap, trials = self.world, self.heap, self.trials
        rng = Random(f"{world.seed}:workers")
        self.free = list(reversed(range(self.workers)))
        self.speeds = [math.exp(rng.gauss(0, world.jitter)) if world.jitter else 1.0 for _ in self.free]
        if isinstance(self.search, Search) and self.search.started:
            self.take_over(self.search)
        else:
            self.todo.extend(self.search.start())
        self.settle()
        while heap and heap[0][0] <= world.until:
            time, number, name, fails = heappop(heap)
            trial = trials.get(name)
            if trial is None or trial.due != number:  # it was stopped or paused meanwhile
                continue
            self.time = time
            if fails:
                self.fail(name, trial)
            else:
                self.report(name, trial)
            self.settle()
        running = [trial for trial in trials.values() if trial.worker >= 0]
        if running:  # cut at `until`
            self.time = world.until
            for trial in running:
                self.leave(trial)
        elif self.done is None:
            raise RuntimeError(
                f"all {self.workers} workers are idle, {len(trials)} of {self.created} trials are paused, but the "
                "method neither resumed nor stopped one, nor decided on Done; see searchers.testing.check_method"
            )
        return Simulation(
            time=self.time,
            done=self.done,
            trials=self.created,
            ended=dict(self.ended),
            trained=self.trained,
            busy=self.busy,
            events=self.events,
        )

    # ------------------------------------------------------------------------------------------- what happens to trials
    def report(self, name: int, trial: _Trial) -> None:
        assert trial.curve is not None
        due, step = trial.due, self.steps[trial.next]
        self.trained += step - trial.position
        trial.position, trial.next, trial.since = step, trial.next + 1, math.inf
        value = trial.curve.value(step)
        if trial.rng is not None and value is not None and self.world.noise:
            value += trial.rng.gauss(0, self.world.noise)
        self.tell(Reported(trial=name, step=step, value=value if isinstance(self.search, Search) else _normal(value)))
        self.carry()
        if trial.due == due and name in self.trials:  # neither stopped nor paused
            self.train(name, trial, self.time)

    def fail(self, name: int, trial: _Trial) -> None:
        """What was trained since the last report is lost."""
        self.trained += self.since_report(trial)
        trial.since = math.inf
        trial.restarts += 1
        if trial.restarts > self.world.max_restarts:
            self.exit(name, trial, "errored")
            return
        due = trial.due
        self.tell(Started(trial=name))
        self.carry()
        if trial.due == due and name in self.trials:
            self.train(name, trial, self.time + self.world.resume_cost)

    def start(self, name: int, trial: _Trial) -> None:
        """The trial gets a worker."""
        trial.worker, trial.taken, trial.since = self.free.pop(), self.time, math.inf
        due = trial.due
        self.tell(Started(trial=name))
        self.carry()
        if trial.due != due or name not in self.trials:
            return
        if trial.curve is None:
            trial.curve = self.make(self.hparams(name))
            if trial.curve is None:
                self.exit(name, trial, "invalid_hp")
                return
        cost = self.world.resume_cost if trial.began else self.world.start_cost
        trial.began = True
        self.train(name, trial, self.time + cost)

    def train(self, name: int, trial: _Trial, since: float) -> None:
        """Train from `since` on, to the next report or failure; or the trial completes."""
        if trial.next == len(self.steps):
            self.exit(name, trial, "completed")
            return
        assert trial.curve is not None
        world, rate = self.world, trial.curve.cost * self.speeds[trial.worker]
        fails = math.inf
        if trial.rng is not None:
            if world.jitter:
                rate *= math.exp(trial.rng.gauss(0, world.jitter))
            if world.failures:
                fails = self.time + trial.rng.expovariate(world.failures)
        trial.since, trial.rate = since, rate
        ends = since + (self.steps[trial.next] - trial.position) * rate
        self.number += 1
        trial.due = self.number
        heappush(self.heap, (min(ends, fails), self.number, name, fails < ends))

    def exit(self, name: int, trial: _Trial, reason: Reason) -> None:
        if trial.worker >= 0:
            self.leave(trial)
        del self.trials[name]
        self.ended[reason] += 1
        self.tell(Exited(trial=name, reason=reason))

    def leave(self, trial: _Trial) -> None:
        """The worker is free; what it trained is kept."""
        more = self.since_report(trial)
        self.trained += more
        trial.position += more
        self.busy += self.time - trial.taken
        self.free.append(trial.worker)
        trial.worker, trial.since = -1, math.inf

    def since_report(self, trial: _Trial) -> float:
        """Length trained since the last report."""
        if self.time <= trial.since:
            return 0.0
        return min((self.time - trial.since) / trial.rate, self.steps[trial.next] - trial.position)

    # ------------------------------------------------------------------------------------------ what the search decides
    def tell(self, event: Event) -> None:
        actions = self.search.on(event)
        self.events += 1
        self.todo.extend(actions)
        if self.watch is not None:
            self.watch(self.time, event, actions)

    def settle(self) -> None:
        """Carry out what was decided, and give free workers to waiting trials."""
        while True:
            self.carry()
            if not self.queue or not self.free:
                return
            number, name = self.queue.popleft()
            trial = self.trials.get(name)
            if trial is not None and trial.due == number:
                self.start(name, trial)

    def carry(self) -> None:
        """Carry out actions, also those that follow from carrying them out."""
        while self.todo:
            action = self.todo.popleft()
            match action:
                case Create(trial=name):
                    self.created += 1
                    self.trials[name] = trial = _Trial(rng=self.rng_of(name))
                    self.enqueue(name, trial)
                case Stop(trial=name):
                    self.exit(name, self.named(action), "stopped")
                case Pause():
                    trial = self.named(action)
                    trial.due = -1
                    if trial.worker >= 0:
                        self.leave(trial)
                case Resume(trial=name):
                    self.enqueue(name, self.resumed(action))
                case Done(reason=reason):
                    self.done = reason
                case _:
                    assert_never(action)

    def named(self, action: Stop | Pause | Resume) -> _Trial:
        trial = self.trials.get(action.trial)
        if trial is None:
            raise RuntimeError(f"the method decided on {action}, but that trial has ended or was never created")
        return trial

    def resumed(self, action: Resume) -> _Trial:
        name = action.trial
        if name not in self.trials and isinstance(self.search, Search) and name in self.search.trials:
            # It ended before the search was extended.
            self.trials[name] = self.taken_over(name, self.search.trials[name])
        trial = self.named(action)
        if trial.due >= 0:
            raise RuntimeError(f"the method decided on {action}, but that trial is not paused")
        return trial

    def enqueue(self, name: int, trial: _Trial) -> None:
        self.number += 1
        trial.due = self.number
        self.queue.append((self.number, name))

    # -------------------------------------------------------------------------------------------- a search, or a method
    def hparams(self, name: int) -> Mapping[str, object]:
        if isinstance(self.search, Search):
            return self.search.trials[name].hparams or {}
        return {"trial": name}

    def rng_of(self, name: int) -> Random | None:
        world = self.world
        # Made only if needed: seeding it takes longer than all else about a trial.
        return Random(f"{world.seed}:{name}") if world.noise or world.jitter or world.failures else None

    def take_over(self, search: Search) -> None:
        """The live trials of a search that has started, in order of creation."""
        for name, view in search.trials.items():
            self.created += 1
            if view.ended:
                continue
            self.trials[name] = trial = self.taken_over(name, view)
            if view.stop_requested:
                self.todo.append(Stop(trial=name))
            elif view.state != "PAUSED":
                self.enqueue(name, trial)

    def taken_over(self, name: int, view: TrialView) -> _Trial:
        """From its last report."""
        position = view.last_step or 0.0
        following = sum(step <= position for step in self.steps)
        return _Trial(rng=self.rng_of(name), position=position, next=following, began=view.hparams is not None)


def _normal(value: float | None) -> float:
    """As `Search` tells it to a method."""
    return value if value is not None and math.isfinite(value) else math.inf
