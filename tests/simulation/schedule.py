"""The schedule of a simulation, drawn from its seed: the cluster, the experiments, and the faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.simulation.setup import Setup, TrialError

KINDS = (
    "cut",
    "rank",
    "group",
    "node",
    "drain",
    "driver",
    "torn",
    "handle",
    "full",
    "stop",
    "dead",
    "dead",
    "clock",
    "power",
)
"""What may go wrong: see `tests.simulation.whole.World`."""
SERVER_KINDS = (*KINDS, "server", "pause", "kill", "share", "close")
"""On a server, also what its users do."""
METHODS = ("random", "grid", "asha", "asha", "adaptive_asha", "single")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault; the later, the greater its step. `which`, from 0 to 1, selects one of the possible targets, or a
    duration."""

    step: int
    kind: str
    which: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A simulation.

    Attributes:
        nodes: number of slots of each node.
        own_cluster: whether the cluster belongs to the experiment.
        server: whether the experiments are submitted to a server.
        slow_s: latency of the slowest messages.
        late_requests: number of requests after the search is done.
        token_slots: the quota of the token that submits all experiments to the server; None: they are the server's own.
    """

    seed: int
    nodes: tuple[int, ...]
    own_cluster: bool
    server: bool
    setups: tuple[Setup, ...]
    faults: tuple[Fault, ...]
    slow_s: float
    late_requests: int = 0
    token_slots: int | None = None

    def lines(self) -> list[str]:
        """Describe the schedule."""
        cluster = f"nodes {self.nodes}, own_cluster {self.own_cluster}, server {self.server}"
        text = [f"seed {self.seed}: {cluster}, slow_s {self.slow_s}, token_slots {self.token_slots}"]
        text += [f"  experiment {number}: {setup}" for number, setup in enumerate(self.setups)]
        return [*text, *(f"  {fault}" for fault in self.faults)]

    def smaller(self) -> Iterator[Schedule]:
        """Yield schedules that are simpler by one step, the largest steps first."""
        for number in range(len(self.faults)):
            yield replace(self, faults=self.faults[:number] + self.faults[number + 1 :])
        if self.late_requests:
            yield replace(self, late_requests=self.late_requests - 1)
        for number, setup in enumerate(self.setups):
            if len(self.setups) > 1:
                yield replace(self, setups=self.setups[:number] + self.setups[number + 1 :])
            for each in setup.smaller():
                yield replace(self, setups=(*self.setups[:number], each, *self.setups[number + 1 :]))


def with_requests(schedule: Schedule) -> Schedule:
    """Add a person's requests to a schedule: some while the search runs, and some after it is done."""
    random = Random(f"requests:{schedule.seed}")
    steps = 50 + 35 * sum(dict(setup.searcher).get("max_trials", 6) for setup in schedule.setups)
    requests = [Fault(random.randrange(steps), "request", random.random()) for _ in range(random.randrange(4, 12))]
    late = 0 if schedule.server else random.choice((0, 0, 1, 2))
    faults = tuple(sorted((*schedule.faults, *requests), key=lambda fault: fault.step))
    return replace(schedule, faults=faults, late_requests=late)


def with_population(schedule: Schedule) -> Schedule:
    """Let the experiments of a schedule be population-based training."""
    random, sampler = Random(f"population:{schedule.seed}"), "pb2" if schedule.seed % 5 == 2 else "random"
    return replace(schedule, setups=tuple(_population(random, setup, sampler) for setup in schedule.setups))


def _population(random: Random, setup: Setup, sampler: str) -> Setup:
    length = random.choice((4, 8, 9))
    searcher = {
        "name": "pbt",
        "max_length": length,
        "population": random.choice((2, 3, 4, 6)),
        "interval": random.choice((1, 2, 3)),
        "quantile": random.choice((0.25, 0.5)),
        "sampler": sampler,
    }
    extensions = ((("max_length", 2 * length),),) if random.random() < 0.2 else ()
    max_slots = 1 if random.random() < 0.4 else setup.max_slots  # one trial at a time
    return replace(setup, searcher=tuple(searcher.items()), points=0, extensions=extensions, max_slots=max_slots)


def with_auto(schedule: Schedule) -> Schedule:
    """Let the experiments of a schedule be searches by `auto`, with its model."""
    random = Random(f"auto:{schedule.seed}")

    def as_auto(setup: Setup) -> Setup:
        searcher: dict[str, Any] = {
            "name": "auto",
            "max_length": random.choice((4, 9, 9, 27)),
            "max_trials": random.choice((5, 9, 12, 16)),
            "max_concurrent_trials": random.choice((1, 2, 4, 8)),
        }
        name = random.choice((None, None, None, "max_trials", "max_length"))
        extensions = () if name is None else (((name, 2 * searcher[name]),),)
        return replace(setup, searcher=tuple(searcher.items()), points=0, extensions=extensions)

    return replace(schedule, setups=tuple(map(as_auto, schedule.setups)))


def with_budgets(schedule: Schedule) -> Schedule:
    """Give each experiment a budget that is spent several times before its search is done."""
    random = Random(f"budgets:{schedule.seed}")

    def with_budget(setup: Setup) -> Setup:
        searcher = dict(setup.searcher)
        length_s = setup.batch_s * searcher["max_length"] * searcher.get("max_trials", 6) + 60
        seconds = length_s * random.uniform(0.02, 0.5)
        totals = random.choice(({"time": seconds}, {"slot_hours": seconds / 3600}))
        return replace(setup, budget=tuple(totals.items()))

    return replace(schedule, setups=tuple(map(with_budget, schedule.setups)))


def with_repeats(schedule: Schedule) -> Schedule:
    """Let the experiments of a schedule train their best trials again."""
    random = Random(f"repeats:{schedule.seed}")
    setups = [replace(each, repeat=(random.randrange(1, 4), random.randrange(1, 5))) for each in schedule.setups]
    return replace(schedule, setups=tuple(setups))


def with_alerts(schedule: Schedule) -> Schedule:
    """Let somebody be told of failed trials, of few trials without a gain, and of a budget that is nearly spent."""
    random = Random(f"alerts:{schedule.seed}")
    setups = [replace(each, notify=(random.randrange(1, 6), random.choice((0.5, 0.9)))) for each in schedule.setups]
    return replace(schedule, setups=tuple(setups))


def with_once(schedule: Schedule) -> Schedule:
    """Let programs do what can be done only once in a process."""
    setups = [
        replace(each, once=True, reuse_workers=True, errors=(), max_restarts=max(each.max_restarts, 3))
        for each in schedule.setups
    ]
    return replace(schedule, setups=tuple(setups))


def with_programs(schedule: Schedule) -> Schedule:
    """Let the code of experiments be programs that use the core API."""
    return replace(schedule, setups=tuple(replace(each, program=True) for each in schedule.setups))


def with_token(schedule: Schedule) -> Schedule:
    """Let one token submit two or three experiments to a server, perhaps with different slots per trial."""
    random, most = Random(f"token:{schedule.seed}"), sum(schedule.nodes)
    setups = tuple(_setup(random, most_trials=5, faults=bool(schedule.faults)) for _ in range(random.randrange(2, 4)))
    return replace(schedule, server=True, setups=setups, token_slots=random.randrange(1, most + 1))


OPTIONS: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "token": (with_token, "a token with a quota of slots submits them to a server"),
    "auto": (with_auto, "the searches are by auto, with its model"),
    "pbt": (with_population, "the searches are population-based training"),
    "repeats": (with_repeats, "the best trials are trained again"),
    "requests": (with_requests, "a person adds, forks and stops trials"),
    "budgets": (with_budgets, "experiments have budgets"),
    "alerts": (with_alerts, "somebody is told of failures, no gain, a budget's end"),
    "programs": (with_programs, "programs train by the core API"),
    "once": (with_once, "what programs do works only once in a process"),
}
"""What schedules may have, in the order of drawing."""
NO_FAULTS = "no_faults"


def drawn(seed: int, options: Collection[str] = ()) -> Schedule:
    """Draw the schedule of a seed, with some of the `OPTIONS`, or `NO_FAULTS`."""
    schedule = schedule_of(seed, faults=NO_FAULTS not in options)
    for name, (change, _) in OPTIONS.items():
        schedule = change(schedule) if name in options else schedule
    return schedule


def schedule_of(seed: int, *, faults: bool = True) -> Schedule:
    """Draw the schedule of a seed."""
    random = Random(f"schedule:{seed}")
    nodes = random.choice(((1,), (2,), (4,), (2, 2), (1, 1, 1), (4, 4), (3, 2)))
    server = random.random() < 0.2
    setups = tuple(
        _setup(random, most_trials=5 if server else 50, faults=faults)
        for _ in range(random.randrange(1, 4) if server else 1)
    )
    count = min(12, int(random.expovariate(0.25))) if faults else 0
    steps = 50 + 35 * sum(dict(setup.searcher).get("max_trials", 6) for setup in setups)
    kinds = SERVER_KINDS if server else KINDS
    drawn = [Fault(random.randrange(steps), random.choice(kinds), random.random()) for _ in range(count)]
    return Schedule(
        seed=seed,
        nodes=nodes,
        own_cluster=random.random() < 0.4,
        server=server,
        setups=setups,
        faults=tuple(sorted(drawn, key=lambda fault: fault.step)),
        slow_s=random.choice((0.01, 0.3, 3.0)),
    )


def _setup(random: Random, *, most_trials: int, faults: bool) -> Setup:
    trials = min(most_trials, 50 if random.random() < 0.01 else random.choice((5, 5, 5, 5, 5, 6, 6, 7, 8, 12)))
    concurrent = random.choice((1, 2, 4, 8))
    length = random.choice((4, 8, 9))
    searcher: dict[str, Any] = {"name": random.choice(METHODS), "max_length": length}
    name = searcher["name"]
    if name != "single":
        searcher["max_concurrent_trials"] = concurrent
    if name not in ("single", "grid"):
        searcher["max_trials"] = trials
    if name in ("asha", "adaptive_asha"):
        searcher["divisor"] = random.choice((2, 3, 4))
        searcher["variant"] = random.choice(("stopping", "promotion"))
    if name == "asha":
        max_rungs = 1 + int(math.log(length, searcher["divisor"]) + 1e-9)
        searcher["num_rungs"] = min(max_rungs, random.choice((2, 3)))
    if name == "adaptive_asha":
        searcher["mode"] = random.choice(("aggressive", "standard", "conservative"))
    errors = [
        TrialError(
            trial=random.randrange(trials),
            batch=random.randrange(1, length + 1),
            kind=random.choice(("error", "error", "oom", "device")),
            times=random.choice((1, 1, 2, 5)),
        )
        for _ in range(random.randrange(1, 4) if faults and random.random() < 0.4 else 0)
    ]
    extensions = []
    if random.random() < 0.2 and name in ("asha", "random"):
        extensions.append((("max_trials", trials + random.randrange(1, 5)),))
    if random.random() < 0.15 and name in ("asha", "random"):
        extensions.append((("max_length", length * 2),))
    return Setup(
        searcher=tuple(searcher.items()),
        points=trials if name == "grid" else 0,
        priority=random.choice((10, 42, 42, 50)),
        weight=random.choice((0.5, 1.0, 1.0, 3.0)),
        max_slots=random.choice((None, None, 1, 2)),
        policy=random.choice(("best", "all", "none")),
        report=random.choice((None, None, 3)),
        validate=random.choice((None, None, 3, 5)),
        checkpoint=random.choice((None, None, 3)),
        keeps=random.choice(((0, 1, 1), (0, 0, 1), (0, 0, 0), (1, 0, 1), (2, 1, 2))),
        invalid=random.choice((0.0, 0.0, 0.1)),
        diverging=random.choice((0.0, 0.0, 0.2)),
        stops_on_nan=random.random() < 0.5,
        max_restarts=random.choice((0, 2, 5)),
        reuse_workers=random.random() < 0.8,
        errors=tuple(errors),
        extensions=tuple(extensions),
        batch_s=random.choice((0.05, 0.3, 2.0)),
    )
