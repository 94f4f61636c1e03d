"""A client of the desk: a driver with trials to train, or with worker groups to lend, or with both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dray.config import defaults
from dray.desk.lease import Lease
from dray.desk.messages import Demand, Message
from dray.desk.results import PendingResults
from dray.desk.shares import QUANTUM, Claim


@dataclass(eq=False, slots=True, kw_only=True)
class Client:
    """What the desk keeps of an experiment's run, or of a server.

    Attributes:
        name: unique at the desk.
        spec: a pickle of what its trials run with.
        handle: the name by which its Tune handle asks for results.
        shape: of the groups that its trials run on.
        kind: "gpu" or "cpu".
        size: GPUs of such a group, or CPUs; 1/n if n groups share one.
        unit: GPUs of a slot, or CPUs.
        priority: 1 to 99; smaller numbers go first, as in Determined.
        weight: of its share among those with the same priority, > 0.
        max_slots: the most GPUs, or CPUs, that it may have; None: no limit.
        had: slot-seconds by weight, as of `dray.desk.shares.Shares`.
        results: that wait for the search's decision.
        queue: trials that wait for a group, the next one first.
        leases: those that are not over, by number.
        current: the lease of each trial that counts.
        messages: for the driver, in order; the caller takes them out.
        is_gone: its driver has ended, and records nothing more.
        closing: no more of its trials get leases, those that run are to save and leave, and its groups end.
    """

    name: str
    spec: bytes = b""
    handle: str = ""
    results: PendingResults
    shape: str = ""
    kind: str = "cpu"
    size: float = 1
    unit: float = 1
    priority: int = defaults.PRIORITY
    weight: float = 1.0
    max_slots: float | None = None
    had: float = 0.0
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    leases: dict[int, Lease] = field(default_factory=dict)
    current: dict[int, Lease] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    is_gone: bool = False
    closing: bool = False
    is_search_over: bool = False
    driver_waits: bool = False
    best: float | None = None
    """The best score so far; smaller is better."""
    _best_by: tuple[int, int] = (-1, -1)  # trial and lease

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
        """How much it has had, with what it is about to have: who has the least gets the next group."""
        return self.had + QUANTUM * self.slots / self.weight

    @property
    def demand(self) -> Demand:
        """What it has and asks for now."""
        claim = Claim(
            name=self.name,
            groups=len(self.queue) + len(self.leases),
            size=self.size,
            priority=self.priority,
            weight=self.weight,
            max_slots=self.max_slots,
        )
        return Demand(claim=claim, shape=self.shape, kind=self.kind, unit=self.unit, has=len(self.leases))

    @property
    def next_trial(self) -> int | None:
        """The trial that gets the next lease; None if none may have one."""
        is_full = self.max_slots is not None and self.slots + self.size > self.max_slots
        if self.closing or is_full:
            return None
        return next((trial for trial in self.queue if not self._is_held(trial)), None)

    def _is_held(self, trial: int) -> bool:
        lease = self.current.get(trial)
        return lease is not None and lease.holds_trial

    def improves(self, lease: Lease, score: float) -> bool:
        """Whether a score is the best of the experiment so far; if so, it is recorded.

        Also true for the best score again, if its trial reports it in a later lease: it was not saved in the earlier
        one, or the trial would have continued from there.
        """
        trial, number = self._best_by
        again = score == self.best and trial == lease.trial and number != lease.number
        if self.best is not None and score >= self.best and not again:
            return False
        self.best, self._best_by = score, (lease.trial, lease.number)
        return True
