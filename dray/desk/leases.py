"""Which group trains which trial, which lease counts, and whether a score is the best so far.

Pure: no clock, no asyncio. Methods take events and change the state. What the driver reads accumulates in ``messages``;
the groups and leases whose waiting ranks should look again accumulate in ``changed``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from dray.desk.failure import Failure
from dray.desk.lease import Group, Lease, State
from dray.desk.messages import (
    Decision,
    GroupEnded,
    GroupReady,
    GroupRetired,
    LeaseGranted,
    LeaseOutcome,
    Message,
    Reply,
    ReportReceived,
    TrialLeft,
)

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
CAUSE_GRACE = 3
"""How many times as long after an error in a collective: Ray may take seconds to notice the death that caused it."""


class Leases:
    """The queue of trials, the groups, and the leases that join them.

    Attributes:
        messages: for the driver, in order; the caller takes them out.
        changed: groups and leases that have changed; the caller clears it.
        closing: no more leases are granted, and running trials are to save and leave.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.changed: set[Group | Lease] = set()
        self.closing = False
        self._queue: deque[int] = deque()
        self._groups: dict[str, Group] = {}
        self._ended_starts: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._current: dict[int, Lease] = {}
        """The latest lease of each trial: earlier ones are fenced off."""
        self._numbers = itertools.count(1)
        self._best: float | None = None
        self._best_by = (-1, -1)  # trial and lease

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
            self.messages.append(GroupReady(group=group))
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
                    batches = -1 if lease.deferred_error is None else lease.deferred_error[1].batches
                    cause, failure = group.death(dead, batches)
                    self._conclude(lease, "errored", cause, failure=failure, dead=tuple(sorted(dead)))
                self.end(lease)
        self.messages.append(GroupEnded(group=name, start=start, dead=tuple(sorted(dead)), error=error))

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
            self.changed.add(lease)

    def retire_idle(self, count: int) -> None:
        """End up to this number of idle groups, the latest first, unless trials wait for one."""
        idle = [group for group in self._groups.values() if group.is_free]
        for group in [] if self._queue else idle[::-1][:count]:
            self._retire(group)

    def _retire(self, group: Group) -> None:
        group.retiring = True
        self.changed.add(group)

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
                self.messages.append(LeaseGranted(group=group.name, trial=trial, lease=lease.number))

    def _is_held(self, trial: int) -> bool:
        lease = self._current.get(trial)
        return lease is not None and lease.holds_trial

    # ------------------------------------------------------------------ the life of a lease
    def bind(self, number: int, spec: object) -> None:
        """Give a granted lease its parameters, so that the ranks begin."""
        if (lease := self.live(number)) is not None:
            lease.spec = spec
            self.changed.add(lease.group)

    def begin(self, number: int) -> None:
        """Rank 0 has taken up the lease."""
        lease = self._leases.get(number)
        if lease is not None and lease.state is State.GRANTED:
            lease.state = State.RUNNING

    def report(self, lease: Lease, report: Mapping[str, Any], *, is_final: bool) -> None:
        """Rank 0 has reported. After the final report, errors of the trial's processes don't count."""
        lease.unrecorded += 1
        if is_final:
            lease.state = State.CONCLUDED
        self.messages.append(ReportReceived(trial=lease.trial, lease=lease.number, report=report))

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
                self.changed.add(lease)
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
                    self.changed.add(lease)

    def leave(
        self,
        number: int,
        rank: int,
        outcome: LeaseOutcome,
        error: str,
        fatal: bool,
        failure: Failure | None,
        alone: bool,
        stale: str,
    ) -> float | None:
        """A rank has left its trial; see `Desk.leave`.

        Returns:
            After how many seconds to call `expire`, as the other ranks may never leave by themselves; else None.
        """
        lease = self._leases.get(number)
        if lease is None:
            return None
        group = lease.group
        lease.left[rank] = outcome
        lease.stale = lease.stale or stale
        failed = outcome in ("errored", "invalid_hp")
        if failure is not None and failure.kind == "collective":
            lease.deferred_error = lease.deferred_error or (error, failure)
        elif failed or rank == 0:
            if lease.state is State.MOVING and outcome == "interrupted":
                self._queue.appendleft(lease.trial)
            self._conclude(lease, outcome, error, fatal=fatal, failure=failure)
        if len(lease.left) == group.size:
            self._report_deferred_error(lease)
            outcomes = set(lease.left.values())
            # Ranks that did not all do the same may never get back in step in their process group.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                self._retire(group)
            elif lease.stale:
                self._retire(group)
                self.messages.append(GroupRetired(group=group.name, trial=lease.trial, reason=lease.stale))
            self.end(lease)
        elif failed or alone:
            is_known = alone or lease.state in (State.CONCLUDED, State.FAILED)
            return PEERS_GRACE_S if is_known else CAUSE_GRACE * PEERS_GRACE_S
        return None

    def expire(self, number: int) -> None:
        """Not all ranks have left in time: the lease ends, and the group's processes too."""
        if (lease := self._leases.get(number)) is not None:
            self._report_deferred_error(lease)
            self._retire(lease.group)
            self.end(lease)

    def _report_deferred_error(self, lease: Lease) -> None:
        if lease.deferred_error is not None:
            error, failure = lease.deferred_error
            self._conclude(lease, "errored", error, failure=failure)

    def _conclude(self, lease: Lease, outcome: LeaseOutcome, error: str, **details: Any) -> None:
        if lease.conclude(outcome):
            common: dict[str, Any] = {"group": lease.group.name, "trial": lease.trial, "lease": lease.number}
            self.messages.append(TrialLeft(**common, outcome=outcome, error=error, **details))

    def end(self, lease: Lease) -> None:
        """The lease is over: its group is free for another trial, and all that comes from it is fenced off."""
        lease.state = State.OVER
        lease.group.lease = None
        del self._leases[lease.number]
        if self._current.get(lease.trial) is lease:
            del self._current[lease.trial]
        self.changed |= {lease, lease.group}
        self.match()

    def close(self) -> None:
        """Grant no more leases; have running trials save and leave."""
        self.closing = True
        for lease in [lease for lease in self._leases.values() if lease.state is State.GRANTED]:
            self.end(lease)
        self.changed.update(self._leases.values(), self._groups.values())

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
