"""Which group trains which trial, and which lease counts.

Pure: no clock, no asyncio. Methods take events and change the state; whoever waits for a group, a lease or a client is
woken as they change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dray.desk.client import Client
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
    WorkerArrived,
)

if TYPE_CHECKING:
    from searchers.events import Decision

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
CAUSE_GRACE = 3
"""How many times as long after an error in a collective: Ray may take seconds to notice the death that caused it."""


class Leases:
    """The clients with their queues of trials, the groups, and the leases that join them.

    Args:
        wake: called with each group and lease that changes, and with each client that has a new message.
    """

    def __init__(self, wake: Callable[[Group | Lease | Client], None]) -> None:
        self._wake = wake
        self._clients: list[Client] = []
        self._groups: dict[str, Group] = {}
        self._maybe_free: dict[str, Group] = {}
        """Of thousands, those that `match` looks at: all that are free, and some that were."""
        self._gpu_types: dict[str, str] = {}
        """Of the node of a process of each group."""
        self._ended_starts: set[int] = set()
        self._leases: dict[int, Lease] = {}
        """The latest lease of each trial: earlier ones are fenced off."""
        self._unrecorded: dict[int, Lease] = {}
        """Those with reports that the driver has not recorded yet, also if they are over."""
        self._numbers = itertools.count(1)

    def add(self, client: Client) -> None:
        """Serve this client from now on."""
        self._clients.append(client)

    def remove(self, client: Client) -> None:
        """Serve a client that has closed no more."""
        self._clients.remove(client)
        for lease in self.unrecorded(client):
            del self._unrecorded[lease.number]
            self._wake(lease)

    def post(self, client: Client, message: Message) -> None:
        """Add a message for a client's driver."""
        client.messages.append(message)
        self._wake(client)

    # ------------------------------------------------------------------ queries
    def get(self, number: int) -> Lease | None:
        """The lease with this number, unless it is over."""
        return self._leases.get(number)

    def live(self, number: int) -> Lease | None:
        """The lease with this number, unless it is over or fenced off by a later one of the same trial."""
        lease = self._leases.get(number)
        return lease if lease is not None and lease.client.current.get(lease.trial) is lease else None

    def unrecorded(self, client: Client, trial: int | None = None) -> list[Lease]:
        """A client's leases, or a trial's, with reports that the driver has not recorded yet."""
        return [
            lease
            for lease in self._unrecorded.values()
            if lease.client is client and (trial is None or lease.trial == trial)
        ]

    def has_ended(self, start: int) -> bool:
        """Whether the processes of this start are gone, or should be."""
        return start in self._ended_starts

    # ------------------------------------------------------------------ groups
    def arrive(self, owner: Client, group: str, node: str, gpu_type: str) -> None:
        """A process of a client's group runs on this node."""
        self._gpu_types[group] = gpu_type
        self.post(owner, WorkerArrived(group=group, node=node))

    def ask(
        self, owner: Client, group: str, start: int, rank: int, size: int, *, first: bool, shape: str = ""
    ) -> Group | None:
        """A rank of a client's group asks for a lease. Returns its group; None if the rank's process is to end."""
        if self.has_ended(start):
            # Workers outlive a killed raylet by seconds: they may still end a trial, and ask for another.
            return None
        state = self._groups.setdefault(group, Group(owner=owner, name=group, shape=shape, start=start, size=size))
        state.idle.add(rank)
        self._maybe_free[group] = state
        if len(state.idle) == size and first and state.lease is None:
            self.post(owner, GroupReady(group=group))
        self.match()
        return state

    def end_group(self, owner: Client, name: str, start: int, dead: Mapping[int, str], error: str) -> None:
        """The processes of a group's start have ended."""
        self._ended_starts.add(start)
        group = self._groups.get(name)
        if group is not None and group.start == start:
            del self._groups[name]
            self._gpu_types.pop(name, None)
            self._retire(group)
            if (lease := group.lease) is not None:
                if lease.state in (State.GRANTED, State.MOVING):
                    lease.client.enqueue([lease.trial], first=True)
                elif lease.state is State.RUNNING:
                    # The other ranks know how far the trial came.
                    failure = None if lease.deferred is None else lease.deferred.failure
                    departure = group.death(dead, -1 if failure is None else failure.batches)
                    self._conclude(lease, departure, dead=tuple(sorted(dead)))
                self.end(lease)
        self.post(owner, GroupEnded(group=name, start=start, dead=tuple(sorted(dead)), error=error))

    def drain(self, name: str) -> None:
        """Have this group's trial save and continue in the next free group, and the group's processes end."""
        group = self._groups.get(name)
        if group is None or group.retiring:
            return
        self._retire(group)
        self._move(group)

    def _move(self, group: Group) -> None:
        """Have a group's trial save and leave, to continue in another group."""
        if (lease := group.lease) is None:
            return
        if lease.state is State.GRANTED:
            lease.client.enqueue([lease.trial], first=True)
            self.end(lease)
        elif lease.state is State.RUNNING:
            lease.state = State.MOVING
            self._wake(lease)

    def retire_idle(self, owner: Client, count: int) -> None:
        """End up to this number of a client's idle groups, the latest first, unless trials wait for one."""
        idle = [group for group in self._groups.values() if group.owner is owner and group.is_free]
        waits = any(client.queue for client in self._clients if idle and client.shape == idle[0].shape)
        for group in [] if waits else idle[::-1][:count]:
            self._retire(group)

    def shrink(self, owner: Client, keep: int, *, at_once: bool) -> None:
        """End a client's groups but this number: idle ones, then those whose trials go last.

        Args:
            at_once: trials in them save and leave; else they train to their end first.
        """
        groups = [group for group in self._groups.values() if group.owner is owner]
        for group in sorted(groups, key=_ends_first)[: max(0, len(groups) - keep)]:
            if not group.retiring:
                self._retire(group)
            if at_once:
                self._move(group)

    def evict(self, client: Client) -> None:
        """End the groups that train a client's trials, which have not left in time."""
        for lease in list(client.leases.values()):
            self.end_group(lease.group.owner, lease.group.name, lease.group.start, {}, "")

    def _retire(self, group: Group) -> None:
        group.retiring = True
        self._wake(group)

    # ------------------------------------------------------------------ the queues
    def enqueue(self, client: Client, trials: Iterable[int], *, first: bool) -> None:
        """Queue trials for a group, at the end or before all others."""
        client.enqueue(trials, first=first)
        self.match()

    def match(self) -> None:
        """Grant a lease for each free group while trials are queued for its shape; for those of a higher priority, ask
        others to save and leave."""
        if not any(client.queue for client in self._clients):
            return
        for group in list(self._maybe_free.values()):
            if not group.is_free:
                del self._maybe_free[group.name]
            elif not group.owner.closing and (waiting := self._waiting(group.shape)):
                client, trial = waiting[0]
                self._grant(client, trial, group)
        for shape in {client.shape for client in self._clients} if len(self._clients) > 1 else ():
            self._make_room(shape)

    def _waiting(self, shape: str) -> list[tuple[Client, int]]:
        """Clients with a trial that waits for a group of this shape, and that trial: whoever goes first, first."""
        clients = [
            (each, trial) for each in self._clients if each.shape == shape and (trial := each.next_trial) is not None
        ]
        return sorted(clients, key=lambda each: (each[0].priority, each[0].lead))

    def _make_room(self, shape: str) -> None:
        """Have trials save and leave their groups, which stay up, for as many that wait with a higher priority."""
        groups = [group for group in self._groups.values() if group.shape == shape and not group.retiring]
        leases = [group.lease for group in groups if group.lease is not None]
        leases.sort(key=lambda lease: (-lease.client.priority, -lease.number))
        yielding = sum(group.lease is None or group.lease.state is State.MOVING for group in groups)
        for client, _ in self._waiting(shape):
            room = math.inf if client.max_slots is None else (client.max_slots - client.slots) // client.size
            wanted = int(min(len(client.queue), room))
            wanted, yielding = wanted - yielding, max(yielding - wanted, 0)
            for lease in leases:
                if wanted <= 0 or lease.client.priority <= client.priority:
                    break
                if lease.state is State.RUNNING:
                    lease.state = State.MOVING
                    self._wake(lease)
                    wanted -= 1

    def _grant(self, client: Client, trial: int, group: Group) -> None:
        client.withdraw([trial])
        lease = Lease(number=next(self._numbers), client=client, trial=trial, group=group)
        self._leases[lease.number] = client.leases[lease.number] = client.current[trial] = group.lease = lease
        gpu_type = self._gpu_types.get(group.name, "")
        self.post(client, LeaseGranted(group=group.name, trial=trial, lease=lease.number, gpu_type=gpu_type))

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
            self.match()  # a trial of a higher priority may have come meanwhile

    def report(self, lease: Lease, report: DeskReport, *, is_final: bool) -> None:
        """Rank 0 has reported. After the final report, errors of the trial's processes don't count."""
        lease.unrecorded += 1
        self._unrecorded[lease.number] = lease
        if is_final:
            lease.state = State.CONCLUDED
        self.post(
            lease.client,
            ReportReceived(
                lease=lease.number, trial=lease.trial, rows=report.rows, step=report.step, warning=report.warning
            ),
        )

    def reply(self, lease: Lease, number: int) -> Reply | None:
        """What the trial is to do after its result with this number; None until that is known."""
        if (decision := lease.decisions.get(number)) is not None:
            return decision
        if lease.state is State.OVER:
            return "fenced"
        return "interrupt" if lease.client.closing else None

    def decide(self, client: Client, trial: int, number: int, decision: Decision) -> None:
        """The search has decided on a trial's result with this number."""
        lease = client.current.get(trial)
        if lease is not None:
            if number in lease.decisions:
                lease.decisions[number] = decision
                self._wake(lease)
            elif decision == "pause":
                # It was restarted because its worker died with this report: it continues when it is resumed, not now.
                self.end(lease)
        if decision != "continue":
            client.withdraw([trial])

    def recorded(self, counts: Mapping[int, int]) -> None:
        """The driver has recorded so many more reports of each lease."""
        for number, count in counts.items():
            if (lease := self._unrecorded.get(number)) is not None:
                lease.unrecorded -= count
                if not lease.unrecorded:
                    del self._unrecorded[number]
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
                lease.client.enqueue([lease.trial], first=True)
            self._conclude(lease, departure)
        if len(lease.left) == group.size:
            self._conclude_deferred(lease)
            outcomes = set(lease.left.values())
            # Ranks that did not all do the same may never get back in step in their process group.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                self._retire(group)
            elif lease.stale:
                self._retire(group)
                self.post(group.owner, GroupRetired(group=group.name, trial=lease.trial, reason=lease.stale))
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
                lease.client,
                TrialLeft(
                    lease=lease.number,
                    group=lease.group.name,
                    trial=lease.trial,
                    outcome=departure.outcome,
                    error=departure.error,
                    fatal=departure.fatal,
                    failure=departure.failure,
                    dead=dead,
                ),
            )

    def end(self, lease: Lease) -> None:
        """The lease is over: its group is free for another trial, and all that comes from it is fenced off."""
        lease.state = State.OVER
        lease.group.lease = None
        self._maybe_free[lease.group.name] = lease.group
        del self._leases[lease.number], lease.client.leases[lease.number]
        if lease.client.current.get(lease.trial) is lease:
            del lease.client.current[lease.trial]
        self._wake(lease)
        self._wake(lease.group)
        self._wake(lease.client)
        self.match()

    def close(self, client: Client) -> None:
        """Grant a client no more leases, have its running trials save and leave, and its groups end."""
        client.closing = True
        for lease in list(client.leases.values()):
            if lease.state is State.GRANTED:
                self.end(lease)
            else:
                self._wake(lease)
        for group in self._groups.values():
            if group.owner is client:
                self._wake(group)


def _ends_first(group: Group) -> tuple[bool, bool, int, int]:
    """Sorts groups: those that end anyway, idle ones, then those with the trial of the lowest priority, the latest."""
    lease = group.lease
    priority, number = (0, 0) if lease is None else (lease.client.priority, lease.number)
    return not group.retiring, lease is not None, -priority, -number
