"""Which group trains which trial, which lease counts, and whether a score is the best so far.

Pure: no clock, no asyncio. Methods take events and change the state. What the driver reads accumulates in ``messages``;
whoever waits for a group, a lease or messages is woken as they change.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dray.desk.lease import Group, Lease, State
from dray.desk.messages import (
    Departure,
    DeskReport,
    GroupEnded,
    GroupReady,
    GroupRetired,
    LeaseGranted,
    Message,
    Reply,
    ReportReceived,
    TrialLeft,
)

if TYPE_CHECKING:
    from searchers.events import Decision

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
CAUSE_GRACE = 3
"""How many times as long after an error in a collective: Ray may take seconds to notice the death that caused it."""
MESSAGES = "messages"
"""What the driver waits for."""


class Leases:
    """The queue of trials, the groups, and the leases that join them.

    Args:
        wake: called with each group and lease that changes, and with `MESSAGES` when there is a new one.

    Attributes:
        messages: for the driver, in order; the caller takes them out.
        closing: no more leases are granted, and running trials are to save and leave.
    """

    def __init__(self, wake: Callable[[Group | Lease | str], None]) -> None:
        self.messages: list[Message] = []
        self.closing = False
        self._wake = wake
        self._queue: deque[int] = deque()
        self._groups: dict[str, Group] = {}
        self._ended_starts: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._current: dict[int, Lease] = {}
        """The latest lease of each trial: earlier ones are fenced off."""
        self._numbers = itertools.count(1)
        self._best: float | None = None
        self._best_by = (-1, -1)  # trial and lease

    def post(self, message: Message) -> None:
        """Add a message for the driver."""
        self.messages.append(message)
        self._wake(MESSAGES)

    # ------------------------------------------------------------------ queries
    @property
    def are_out(self) -> bool:
        """Whether any lease is not over yet."""
        return bool(self._leases)

    @property
    def queue(self) -> tuple[int, ...]:
        """The trials that wait for a group, the next one first."""
        return tuple(self._queue)

    def get(self, number: int) -> Lease | None:
        """The lease with this number, unless it is over."""
        return self._leases.get(number)

    def live(self, number: int) -> Lease | None:
        """The lease with this number, unless it is over or fenced off by a later one of the same trial."""
        lease = self._leases.get(number)
        return lease if lease is not None and self._current.get(lease.trial) is lease else None

    def has_ended(self, start: int) -> bool:
        """Whether the processes of this start are gone, or should be."""
        return start in self._ended_starts

    # ------------------------------------------------------------------ groups
    def ask(self, group: str, start: int, rank: int, size: int, *, first: bool) -> Group | None:
        """A rank asks for a lease. Returns its group; None if the rank's process is to end."""
        if self.has_ended(start):
            # Workers outlive a killed raylet by seconds: they may still end a trial, and ask for another.
            return None
        state = self._groups.setdefault(group, Group(name=group, start=start, size=size))
        state.idle.add(rank)
        if len(state.idle) == size and first and state.lease is None:
            self.post(GroupReady(group=group))
        self.match()
        return state

    def end_group(self, name: str, start: int, dead: Mapping[int, str], error: str) -> None:
        """The processes of a group's start have ended."""
        self._ended_starts.add(start)
        group = self._groups.get(name)
        if group is not None and group.start == start:
            del self._groups[name]
            self._retire(group)
            if (lease := group.lease) is not None:
                if lease.state in (State.GRANTED, State.MOVING):
                    self._queue.appendleft(lease.trial)
                elif lease.state is State.RUNNING:
                    # The other ranks know how far the trial came.
                    failure = None if lease.deferred is None else lease.deferred.failure
                    departure = group.death(dead, -1 if failure is None else failure.batches)
                    self._conclude(lease, departure, dead=tuple(sorted(dead)))
                self.end(lease)
        self.post(GroupEnded(group=name, start=start, dead=tuple(sorted(dead)), error=error))

    def drain(self, name: str) -> None:
        """Have this group's trial save and continue in the next free group, and the group's processes end."""
        group = self._groups.get(name)
        if group is None or group.retiring:
            return
        self._retire(group)
        if (lease := group.lease) is None:
            return
        if lease.state is State.GRANTED:
            self._queue.appendleft(lease.trial)
            self.end(lease)
        elif lease.state is State.RUNNING:
            lease.state = State.MOVING
            self._wake(lease)

    def retire_idle(self, count: int) -> None:
        """End up to this number of idle groups, the latest first, unless trials wait for one."""
        idle = [group for group in self._groups.values() if group.is_free]
        for group in [] if self._queue else idle[::-1][:count]:
            self._retire(group)

    def _retire(self, group: Group) -> None:
        group.retiring = True
        self._wake(group)

    # ------------------------------------------------------------------ the queue
    def enqueue(self, trials: Iterable[int], *, first: bool) -> None:
        """Queue trials for a group, at the end or before all others."""
        if first:
            self._queue.extendleft(reversed(list(trials)))
        else:
            self._queue.extend(trials)
        self.match()

    def withdraw(self, trials: Iterable[int]) -> None:
        """Take trials out of the queue."""
        for trial in trials:
            if trial in self._queue:
                self._queue.remove(trial)

    def match(self) -> None:
        """Grant a lease for each free group while trials are queued."""
        if self.closing:
            return
        for group in self._groups.values():
            if group.is_free:
                trial = next((trial for trial in self._queue if not self._is_held(trial)), None)
                if trial is None:
                    return
                self._queue.remove(trial)
                lease = Lease(number=next(self._numbers), trial=trial, group=group)
                self._leases[lease.number] = self._current[trial] = group.lease = lease
                self.post(LeaseGranted(group=group.name, trial=trial, lease=lease.number))

    def _is_held(self, trial: int) -> bool:
        lease = self._current.get(trial)
        return lease is not None and lease.holds_trial

    # ------------------------------------------------------------------ the life of a lease
    def bind(self, number: int, parameters: Any) -> None:
        """Give a granted lease its parameters, so that the ranks begin."""
        if (lease := self.live(number)) is not None:
            lease.parameters = parameters
            self._wake(lease.group)

    def begin(self, number: int) -> None:
        """Rank 0 has taken up the lease."""
        lease = self._leases.get(number)
        if lease is not None and lease.state is State.GRANTED:
            lease.state = State.RUNNING

    def report(self, lease: Lease, report: DeskReport, *, is_final: bool) -> None:
        """Rank 0 has reported. After the final report, errors of the trial's processes don't count."""
        lease.unrecorded += 1
        if is_final:
            lease.state = State.CONCLUDED
        self.post(
            ReportReceived(
                lease=lease.number, trial=lease.trial, rows=report.rows, step=report.step, warning=report.warning
            )
        )

    def reply(self, lease: Lease, number: int) -> Reply | None:
        """What the trial is to do after its result with this number; None until that is known."""
        if (decision := lease.decisions.get(number)) is not None:
            return decision
        if lease.state is State.OVER:
            return "fenced"
        return "interrupt" if self.closing else None

    def decide(self, trial: int, number: int, decision: Decision) -> None:
        """The search has decided on a trial's result with this number."""
        lease = self._current.get(trial)
        if lease is not None:
            if number in lease.decisions:
                lease.decisions[number] = decision
                self._wake(lease)
            elif decision == "pause":
                # It was restarted because its worker died with this report: it continues when it is resumed, not now.
                self.end(lease)
        if decision != "continue":
            self.withdraw([trial])

    def recorded(self, counts: Mapping[int, int]) -> None:
        """The driver has recorded so many more reports of each lease."""
        for number, count in counts.items():
            if (lease := self._leases.get(number)) is not None:
                lease.unrecorded -= count
                if not lease.unrecorded:
                    self._wake(lease)

    def leave(self, number: int, rank: int, departure: Departure) -> float | None:
        """A rank has left its trial. The first outcome counts; an error ends the trial on the other ranks too.

        Returns:
            After how many seconds to call `expire`, as the other ranks may never leave by themselves; else None.
        """
        lease = self._leases.get(number)
        if lease is None:
            return None
        group = lease.group
        lease.left[rank] = departure.outcome
        lease.stale = lease.stale or departure.stale
        if departure.failure is not None and departure.failure.kind == "collective":
            lease.deferred = lease.deferred or departure
        elif departure.is_failure or rank == 0:
            if lease.state is State.MOVING and departure.outcome == "interrupted":
                self._queue.appendleft(lease.trial)
            self._conclude(lease, departure)
        if len(lease.left) == group.size:
            self._conclude_deferred(lease)
            outcomes = set(lease.left.values())
            # Ranks that did not all do the same may never get back in step in their process group.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                self._retire(group)
            elif lease.stale:
                self._retire(group)
                self.post(GroupRetired(group=group.name, trial=lease.trial, reason=lease.stale))
            self.end(lease)
        elif departure.is_failure or departure.alone:
            is_known = departure.alone or lease.state in (State.CONCLUDED, State.FAILED)
            return PEERS_GRACE_S if is_known else CAUSE_GRACE * PEERS_GRACE_S
        return None

    def expire(self, number: int) -> None:
        """Not all ranks have left in time: the lease ends, and the group's processes too."""
        if (lease := self._leases.get(number)) is not None:
            self._conclude_deferred(lease)
            self._retire(lease.group)
            self.end(lease)

    def _conclude_deferred(self, lease: Lease) -> None:
        if lease.deferred is not None:
            self._conclude(lease, lease.deferred)

    def _conclude(self, lease: Lease, departure: Departure, dead: tuple[int, ...] = ()) -> None:
        if lease.conclude(departure):
            self.post(
                TrialLeft(
                    lease=lease.number,
                    group=lease.group.name,
                    trial=lease.trial,
                    outcome=departure.outcome,
                    error=departure.error,
                    fatal=departure.fatal,
                    failure=departure.failure,
                    dead=dead,
                )
            )

    def end(self, lease: Lease) -> None:
        """The lease is over: its group is free for another trial, and all that comes from it is fenced off."""
        lease.state = State.OVER
        lease.group.lease = None
        del self._leases[lease.number]
        if self._current.get(lease.trial) is lease:
            del self._current[lease.trial]
        self._wake(lease)
        self._wake(lease.group)
        self.match()

    def close(self) -> None:
        """Grant no more leases; have running trials save and leave."""
        self.closing = True
        for lease in [lease for lease in self._leases.values() if lease.state is State.GRANTED]:
            self.end(lease)
        for lease in self._leases.values():
            self._wake(lease)
        for group in self._groups.values():
            self._wake(group)

    # ------------------------------------------------------------------ the best score
    def set_best(self, score: float | None) -> None:
        """The best score of earlier runs; smaller is better."""
        self._best = score

    def best(self) -> float | None:
        """The best score so far; None if there is none."""
        return self._best

    def improves(self, lease: Lease, score: float) -> bool:
        """Whether a score is the best of the experiment so far; if so, it is recorded.

        Also true for the best score again, if its trial reports it in a later lease: it was not saved in the earlier
        one, or the trial would have continued from there.
        """
        trial, number = self._best_by
        again = score == self._best and trial == lease.trial and number != lease.number
        if self._best is not None and score >= self._best and not again:
            return False
        self._best, self._best_by = score, (lease.trial, lease.number)
        return True
