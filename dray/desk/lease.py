"""What the desk knows of a client, a worker group, and a lease of a trial to a group.

A lease begins when a queued trial is matched to a free group, and is over when every rank has left the trial, or the
group's processes are gone::

    GRANTED ──rank 0 takes it up──▶ RUNNING ──its group is to end──▶ MOVING
       │                               │                               │
       │                               ├──a rank fails──▶ FAILED ◀─────┤
       │                               └──rank 0 leaves──▶ CONCLUDED ◀─┘
       └───────────────▶ OVER ◀── from every state ────────────────────
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dray.config import defaults
from dray.desk.failure import LOST_NODE, LOW_MEMORY, Failure, FailureKind
from dray.desk.messages import Departure, LeaseOutcome
from dray.desk.shares import QUANTUM, Demand

LeaseState = Literal["granted", "running", "moving", "concluded", "failed", "over"]
"""What a lease waits for. granted: the driver's parameters, and rank 0 to take it up. running: rank 0 to leave. moving:
rank 0 to save and leave, so that another group can continue the trial. concluded: the other ranks to leave; the driver
knows the outcome, and later errors don't count. failed: the other ranks to leave; the driver knows the error, and may
start the trial elsewhere. over: nothing; all that its processes still send is fenced off."""

LeaseEvent = Literal["begin", "move", "conclude", "fail", "end"]

_CONCLUSIONS: dict[LeaseEvent, LeaseState] = {"conclude": "concluded", "fail": "failed", "end": "over"}
TRANSITIONS: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    "granted": {"begin": "running", "move": "moving", **_CONCLUSIONS},  # another rank may fail before rank 0 begins
    "running": {"move": "moving", **_CONCLUSIONS},
    "moving": _CONCLUSIONS,
    "concluded": {"end": "over"},
    "failed": {"end": "over"},
    "over": {},
}


@dataclass(eq=False, slots=True, kw_only=True)
class Client:
    """An experiment's run with trials to train, an owner of worker groups, or both."""

    name: str  # unique at the desk
    endpoint: Any = None  # where the ranks of its leases report, as plain data; None: at the desk's own endpoint
    is_owner: bool = False  # it has groups, and no trials
    shape: str = ""  # of the groups that its trials run on
    kind: str = "cpu"  # "gpu" or "cpu"
    size: float = 1  # GPUs of such a group, or CPUs; 1/n if n groups share one
    unit: float = 1  # GPUs of a slot, or CPUs
    priority: int = defaults.PRIORITY  # 1 to 99; smaller numbers go first, as in Determined
    weight: float = 1.0  # of its share among those with the same priority, > 0
    max_slots: float | None = None  # the most GPUs, or CPUs, that it may have; None: no limit
    had: float = 0.0  # slot-seconds by weight, as of `dray.desk.shares.Shares`
    expected: int = 0  # how many other trials may be queued soon
    # Trials that wait for a group, the next one first
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    leases: dict[int, Lease] = field(default_factory=dict)  # those that are not over, by number
    # The latest lease of each trial that has one; earlier ones are fenced off
    current: dict[int, Lease] = field(default_factory=dict)
    # Calls of processes that can't run its trials, and wait for it to close
    broken: list[Hashable] = field(default_factory=list)
    # No more of its trials get leases, those that run are to save and leave, and its groups end
    closing: bool = False
    is_leaving: bool = False  # it is forgotten once its last lease is over

    def enqueue(self, trials: Iterable[int], *, first: bool) -> None:
        """Queue trials for a group, at the end or before all others."""
        trials = list(trials)
        self.queue.update(dict.fromkeys(trials))
        for trial in reversed(trials) if first else ():
            self.queue.move_to_end(trial, last=False)

    def withdraw(self, trials: Iterable[int]) -> None:
        """Take trials out of the queue."""
        for trial in trials:
            self.queue.pop(trial, None)

    @property
    def slots(self) -> float:
        """How many GPUs, or CPUs, its leases take."""
        return len(self.leases) * self.size

    @property
    def lead(self) -> float:
        """How much it has had, with what it is about to have: the client with the least gets the next group."""
        return self.had + QUANTUM * self.slots / self.weight

    @property
    def groups(self) -> int:
        """How many groups it could use now."""
        return len(self.queue) + len(self.leases) + self.expected

    @property
    def demand(self) -> Demand:
        """What it has and asks for now."""
        return Demand(
            name=self.name,
            groups=self.groups,
            has=len(self.leases),
            size=self.size,
            priority=self.priority,
            weight=self.weight,
            max_slots=self.max_slots,
            shape=self.shape,
            kind=self.kind,
            unit=self.unit,
        )

    @property
    def next_trial(self) -> int | None:
        """The trial that gets the next lease; None if none may have one."""
        is_full = self.max_slots is not None and self.slots + self.size > self.max_slots
        if self.closing or is_full:
            return None
        return next((trial for trial in self.queue if not self._is_held(trial)), None)

    def _is_held(self, trial: int) -> bool:
        lease = self.current.get(trial)
        return lease is not None and lease.state != "failed"


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    number: int
    client: Client
    trial: int
    group: Group
    state: LeaseState = "granted"
    parameters: bytes | None = None  # what the driver gives to the ranks; None until it has
    left: dict[int, LeaseOutcome] = field(default_factory=dict)  # ranks that have left, and how
    deferred: Departure | None = None
    """A rank's departure by an error in a collective: another rank's end may have caused it."""
    stale: str = ""  # why the group's processes can't be reused
    stop_call: Hashable = None  # rank 0's call that waits for a request to save and leave

    def on(self, event: LeaseEvent) -> None:
        """Take an event. One that is not allowed in this state is an AssertionError, and changes nothing."""
        assert event in TRANSITIONS[self.state], f"lease {self.number} is {self.state}, which allows no {event!r}"
        self.state = TRANSITIONS[self.state][event]

    @property
    def has_outcome(self) -> bool:
        """Whether its driver knows how the trial left."""
        return self.state in ("concluded", "failed", "over")


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    owner: Client
    name: str
    shape: str  # equal groups have equal shapes: a trial can run on any of them
    start: int  # number of the start that its processes belong to
    size: int
    waiting: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    """By rank that waits for a lease: its call, and the number of the last lease that it has served."""
    lease: Lease | None = None
    retiring: bool = False  # it gets no other trial: its processes end, and a new group may take its place

    @property
    def is_free(self) -> bool:
        """Whether all its ranks wait for a trial."""
        return self.lease is None and not self.retiring and len(self.waiting) == self.size

    def death(self, dead: Mapping[int, str], error: str, batches: int) -> Departure:
        """How a trial ended whose processes died, or ended by an `error` of their own. `dead`: ranks, each with the
        cause if known, or "". `batches`: trained until then, according to a surviving rank; -1 if unknown."""
        ranks = ", ".join(map(str, sorted(dead)))
        who = "a process"
        if ranks and self.size > 1:
            who = f"the processes of ranks {ranks}" if len(dead) > 1 else f"the process of rank {ranks}"
        cause = next((each for each in dead.values() if each), error)
        kind: FailureKind = "oom" if LOW_MEMORY in cause else "node" if LOST_NODE in cause else "died"
        return Departure(
            outcome="errored",
            error=f"{who} of worker group {self.name} {'ended' if error else 'died'}{cause and f': {cause}'}",
            failure=Failure(kind=kind, batches=batches),
        )
