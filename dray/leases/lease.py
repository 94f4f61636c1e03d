"""The desk's state of a client, of a worker group, and of a lease of a group to a trial.

A lease begins when a queued trial is matched to a free group, and is over when every rank has left the trial or the
group's processes are gone. Its group may be freed before that: then another trial trains there while the last
checkpoint of this one is written::

    GRANTED ──its driver binds it──▶ BOUND ──rank 0 takes it up──▶ RUNNING
       │                               ├──its group is to end──▶ MOVING ◀──┤
       │                               ├──it is canceled──▶ LEAVING ◀──────┤
       │                               ├──a rank fails──▶ FAILED ◀─────────┤
       │                               └──rank 0 leaves──▶ CONCLUDED ◀─────┘
       └───────────────▶ OVER ◀── from every state
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dray.leases.failure import LOST_NODE, LOW_MEMORY, Failure, FailureKind
from dray.leases.messages import Departure, GroupEnded, LeaseOutcome, TrialLeft
from dray.leases.shares import QUANTUM, Claim, Demand

LeaseState = Literal["granted", "bound", "running", "moving", "leaving", "concluded", "failed", "over"]
"""granted: waits for the driver's parameters. bound: waits for rank 0 to begin. running: waits for rank 0 to leave.
moving: waits for rank 0 to save and leave, so that another group can continue the trial. leaving: the same, but the
trial does not continue. concluded: waits for the other ranks to leave; the driver knows the outcome, and later errors
don't count. failed: waits for the other ranks to leave; the driver knows the error, and may start the trial elsewhere.
over: later messages from its processes are fenced off."""

LeaseEvent = Literal["bind", "begin", "move", "cancel", "conclude", "fail", "end"]

_CONCLUSIONS: dict[LeaseEvent, LeaseState] = {"conclude": "concluded", "fail": "failed", "end": "over"}
_STOPS: dict[LeaseEvent, LeaseState] = {"move": "moving", "cancel": "leaving", **_CONCLUSIONS}
TRANSITIONS: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    "granted": {"bind": "bound", **_CONCLUSIONS},
    "bound": {"begin": "running", **_STOPS},  # another rank may fail before rank 0 begins
    "running": _STOPS,
    "moving": {"cancel": "leaving", **_CONCLUSIONS},
    "leaving": {"cancel": "leaving", **_CONCLUSIONS},
    "concluded": {"end": "over"},
    "failed": {"end": "over"},
    "over": {},
}


@dataclass(eq=False, slots=True, kw_only=True)
class Client(Claim):
    """An experiment's run with trials to train, an owner of worker groups, or both. Its name is unique at the desk."""

    endpoint: Any = None  # the endpoint for its trials' reports, as plain data; None: the desk's own
    is_owner: bool = False  # it has groups, and no trials
    had: float = 0.0  # slot-seconds by weight, from `dray.leases.shares.Shares`
    expected: int = 0  # number of further trials that may soon be queued
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)  # trials that wait for a group, next one first
    leases: dict[int, Lease] = field(default_factory=dict)  # live leases by number
    current: dict[int, Lease] = field(default_factory=dict)  # each trial's latest lease; earlier ones are fenced off
    new: dict[int, tuple[str, int] | None] = field(default_factory=dict)
    """Trials that need processes that have run no other trial, each with the group and start that ends for it."""
    broken: list[Hashable] = field(default_factory=list)  # calls of unfit processes, which wait for it to close
    closing: bool = False  # no new leases; running trials save and leave, and its groups end
    is_leaving: bool = False  # it is forgotten once its last lease is over

    def enqueue(self, trials: Iterable[int], *, first: bool) -> None:
        """Queue trials, at the end or at the front."""
        trials = list(trials)
        self.queue.update(dict.fromkeys(trials))
        for trial in reversed(trials) if first else ():
            self.queue.move_to_end(trial, last=False)

    def withdraw(self, trials: Iterable[int]) -> None:
        """Remove trials from the queue."""
        for trial in trials:
            self.queue.pop(trial, None)

    @property
    def held(self) -> int:
        """The number of groups that it has."""
        return sum(not lease.freed for lease in self.leases.values())

    @property
    def slots(self) -> float:
        """GPUs or CPUs that its leases take."""
        return self.held * self.size

    @property
    def lead(self) -> float:
        """Its slot-seconds so far, plus those of its leases: the client with the least gets the next group."""
        return self.had + QUANTUM * self.slots / self.weight

    @property
    def groups(self) -> int:
        """The number of groups that it could use now."""
        return len(self.queue) + self.held + self.expected

    @property
    def demand(self) -> Demand:
        """Its current groups and demand."""
        claim: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Claim)}
        return Demand(groups=self.groups, has=self.held, **claim)

    def next_trial(self, *, used: bool = False) -> int | None:
        """The trial for the next lease, or None. `used`: of a group whose processes have run other trials; a trial that
        needs new ones is returned until a group ends for it."""
        is_full = self.max_slots is not None and self.slots + self.size > self.max_slots
        if self.closing or is_full:
            return None
        waits = self.new if used else {}
        return next((trial for trial in self.queue if not self._is_held(trial) and waits.get(trial) is None), None)

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
    parameters: bytes = b""  # the driver's parameters for the ranks, once it is bound
    left: dict[int, LeaseOutcome] = field(default_factory=dict)  # outcomes of the ranks that have left
    deferred: Departure | None = None
    """A departure because of an error in a collective, which another rank's end may have caused."""
    stale: str = ""  # the reason why the group's processes can't be reused
    stop_call: Hashable = None  # rank 0's call that waits for a request to save and leave
    freed: bool = False  # its group can train another trial, while its trial's last checkpoint is written

    def on(self, event: LeaseEvent) -> None:
        """Move to the next state. An event that the state does not allow is an AssertionError, and changes nothing."""
        assert event in TRANSITIONS[self.state], f"lease {self.number} is {self.state}, which allows no {event!r}"
        self.state = TRANSITIONS[self.state][event]

    @property
    def has_outcome(self) -> bool:
        """Whether the driver knows the trial's outcome."""
        return self.state in ("concluded", "failed", "over")

    def goes_on(self, outcome: LeaseOutcome) -> bool:
        """Whether its trial, which leaves with this outcome, is queued again at once."""
        was_moved = self.state == "moving" and outcome == "interrupted"
        return was_moved or (self.state != "leaving" and outcome == "yielded")

    def death(self, ended: GroupEnded) -> Departure:
        """The departure of its trial, whose processes died, or ended with an error of their own."""
        dead, error, group = ended.dead, ended.error, self.group
        ranks = ", ".join(map(str, sorted(dead)))
        who = "a process"
        if ranks and group.size > 1:
            who = f"the processes of ranks {ranks}" if len(dead) > 1 else f"the process of rank {ranks}"
        cause = next((each for each in dead.values() if each), error)
        kind: FailureKind = "host_oom" if LOW_MEMORY in cause else "node" if LOST_NODE in cause else "died"
        if self.freed and group.lease is not None:  # the trial that trained there may be to blame
            kind = "node"
        known = None if self.deferred is None else self.deferred.failure  # from a surviving rank
        return Departure(
            outcome="errored",
            error=f"{who} of worker group {group.name} {'ended' if error else 'died'}{cause and f': {cause}'}",
            failure=Failure(kind=kind, batches=-1 if known is None else known.batches),
        )

    def left_by(self, departure: Departure, ended: GroupEnded | None) -> TrialLeft:
        """The message that its trial has left by this departure. `ended`: the end of its processes, if that is the
        cause."""
        dead, nodes = ({}, {}) if ended is None else (ended.dead, ended.nodes)
        return TrialLeft(
            **{name: getattr(departure, name) for name in Departure.__slots__},
            lease=self.number,
            group=self.group.name,
            trial=self.trial,
            dead=tuple(sorted(dead)),
            nodes=tuple(nodes.get(rank, "") for rank in sorted(dead)),
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    owner: Client
    name: str
    shape: str  # a trial can run on any group of the same shape
    start: int  # number of its processes' start
    size: int
    waiting: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    """For each rank that waits for a lease: its call, and the number of the last lease that it has served."""
    lease: Lease | None = None
    writing: Lease | None = None  # the lease whose trial's last checkpoint is still written
    used: bool = False  # its processes have run a trial
    retiring: bool = False  # it gets no more trials: its processes end, and a new group may take its place

    @property
    def is_free(self) -> bool:
        """Whether all its ranks wait for a trial."""
        return self.lease is None and not self.retiring and len(self.waiting) == self.size
