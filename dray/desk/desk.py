"""The desk: lends worker groups to the trials of its clients.

It decides which free group gets which queued trial, which lease of a trial counts, and when a group is to end. It lives
in the process that owns the groups: the driver of an experiment, or a server. A client is an experiment's run, which
decides which trials exist and which continue; an owner of groups is a client too.

Pure: no clock, no threads, no I/O. Methods take calls and events; what follows is passed to `emit`, in order. The ranks
of a group call `next_lease` and run what they get; every rank says when it leaves. A call that must wait is kept until
its answer is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from dray.desk.effects import After, Effect, Reply, Tell
from dray.desk.lease import Client, Group, Lease, LeaseEvent
from dray.desk.messages import (
    ClientLeft,
    Departure,
    GroupEnded,
    GroupReady,
    GroupRetired,
    LeaseGranted,
    LeaseOver,
    TrialLeft,
    Unfit,
    WorkerArrived,
    WorkerUnfit,
)
from dray.desk.shares import Demand

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
CAUSE_GRACE = 3
"""How many times as long after an error in a collective: Ray may take seconds to notice the death that caused it."""
LEAVE_S = 120.0  # how long trials may take to save when their driver is gone
CALLS = ("arrived", "address", "broken", "next_lease", "begun", "stop_wanted", "leave")
"""What workers may call: methods of `Desk`."""
CLIENT_CALLS = ("enqueue", "expect", "withdraw", "bind", "drop", "close", "remove")
"""What experiments of a server may call: methods of `Desk`."""


class Desk:
    """The clients with their queues of trials, the groups, and the leases that join them; `emit` is called with each
    effect."""

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self.clients: dict[str, Client] = {}
        self._groups: dict[str, Group] = {}
        self._maybe_free: dict[str, Group] = {}  # candidates for `match`: all free groups, and some no longer free
        self._gpu_types: dict[str, str] = {}  # GPU type by group name
        self._ended_starts: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._addresses: dict[int, tuple[str, int] | list[Hashable]] = {}
        """By start: the address of its rank 0, or the calls that wait for it."""
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------ clients
    def add(self, client: str, **share: Any) -> None:
        """Serve a client of this new name from now on. `share`: what slots it gets, and where its trials report; see
        `Client`."""
        had = min((each.had for each in self.clients.values() if not each.is_owner), default=0.0)
        self.clients[client] = Client(name=client, had=had, **share)

    def close(self, client: str) -> None:
        """Grant a client no more leases, have its running trials save and leave, and its groups end. Idempotent."""
        state = self.clients[client]
        state.closing = True
        for lease in list(state.leases.values()):
            if lease.parameters is None:
                self._end(lease)
            else:
                self._answer_stop(lease, stop=True)
        for group in self._groups.values():
            if group.owner is state:
                self._answer_ranks(group)
        for call in state.broken:
            self._emit(Reply(call, None))
        state.broken.clear()

    def remove(self, client: str, within_s: float = LEAVE_S) -> None:
        """Forget a client whose driver has ended, or is about to, once its trials have saved and left: then there is
        a `ClientLeft`. If they take longer than `within_s`, their groups end."""
        if (state := self.clients.get(client)) is None or state.is_leaving:
            return
        state.is_leaving = True
        self.close(client)
        if state.leases:
            self._emit(After(within_s, "evict", (client,)))
        self._forget_if_left(state)

    def evict(self, client: str) -> None:
        """End the groups that still train a client's trials."""
        if (state := self.clients.get(client)) is not None:
            for lease in list(state.leases.values()):
                self.group_ended(lease.group.owner.name, lease.group.name, lease.group.start, {})

    def _forget_if_left(self, client: Client) -> None:
        if client.is_leaving and not client.leases and self.clients.pop(client.name, None) is not None:
            self._emit(ClientLeft(client=client.name))

    def demands(self, had: Mapping[str, float]) -> list[Demand]:
        """What each client that has trials, or had, has and asks for. `had`: slot-seconds by weight, of clients that
        the server has given slots."""
        for name, seconds in had.items():
            if (client := self.clients.get(name)) is not None:
                client.had = seconds
        return [client.demand for client in self.clients.values() if not client.is_owner]

    def set_share(self, client: str, priority: int, weight: float, max_slots: float | None) -> None:
        """Change what slots a client gets; see `Client`."""
        if (state := self.clients.get(client)) is not None:
            state.priority, state.weight, state.max_slots = priority, weight, max_slots
            self._match()

    def unfit(self, shape: str, why: Unfit) -> None:
        """No group of this shape can run trials: tell the drivers that have trials for it."""
        for client in self.clients.values():
            if client.shape == shape:
                self._emit(Tell(client.name, WorkerUnfit(group="", why=why)))

    # ------------------------------------------------------------------ calls of a group's ranks
    def arrived(self, call: Hashable, owner: str, group: str, start: int, node: str, gpu_type: str) -> None:
        """A process of an owner's group, from this start of it, runs on this node (Ray's id), which has such GPUs. It
        has not imported torch yet."""
        self._gpu_types[group] = gpu_type
        self._emit(Tell(owner, WorkerArrived(group=group, start=start, node=node)))

    def address(self, call: Hashable, start: int, mine: tuple[str, int] | None) -> None:
        """Where the ranks of a group's start meet, host and port: rank 0 passes it as ``mine``, the others wait for
        it."""
        known = self._addresses.setdefault(start, [])
        if mine is not None and isinstance(known, list):
            for waiting in known:
                self._emit(Reply(waiting, mine))
            self._addresses[start] = known = mine
        if isinstance(known, list):
            known.append(call)
        else:
            self._emit(Reply(call, known))

    def broken(self, call: Hashable, owner: str, group: str, why: Unfit) -> None:
        """A process of an owner's group can't run any trial, and neither could another one in its place.

        Answered when the owner closes.
        """
        self._emit(Tell(owner, WorkerUnfit(group=group, why=why)))
        client = self.clients.get(owner)
        if client is None or client.closing:
            self._emit(Reply(call, None))
        else:
            client.broken.append(call)

    def next_lease(
        self, call: Hashable, owner: str, group: str, start: int, rank: int, size: int, after: int, shape: str = ""
    ) -> None:
        """A rank asks for its next lease: answered by its client's name, that one's endpoint, and the parameters as
        given to `bind`; None if its process is to end.

        Args:
            owner: the client that started the group.
            start: number of the process's start, unique in a run.
            rank, size: of the caller within its group.
            after: number of the last lease that this rank has served, 0 at first.
        """
        client = self.clients.get(owner)
        if client is None or start in self._ended_starts:
            # Workers outlive a killed raylet by seconds: they may still end a trial, and ask for another.
            self._emit(Reply(call, None))
            return
        state = self._groups.setdefault(group, Group(owner=client, name=group, shape=shape, start=start, size=size))
        state.waiting[rank] = (call, after)
        self._maybe_free[group] = state
        if len(state.waiting) == size and not after and state.lease is None:
            self._emit(Tell(owner, GroupReady(group=group, start=start)))
        self._answer_ranks(state)
        self._match()

    def _answer_ranks(self, group: Group) -> None:
        """Answer the ranks that wait for a lease, if theirs has its parameters, or their processes are to end."""
        lease = group.lease
        for rank, (call, after) in list(group.waiting.items()):
            if lease is None and (group.owner.closing or group.retiring):
                answer = None
            elif lease is not None and lease.number > after and lease.parameters is not None:
                answer = (lease.client.name, lease.client.endpoint, lease.parameters)
            else:
                continue
            del group.waiting[rank]
            self._emit(Reply(call, answer))

    def begun(self, call: Hashable, lease: int) -> None:
        """Rank 0 has taken up the lease."""
        state = self._leases.get(lease)
        if state is not None and state.state == "granted":
            state.on("begin")
            self._match()  # a trial of a higher priority may have come meanwhile

    def stop_wanted(self, call: Hashable, lease: int) -> None:
        """Answered once the trial should save and leave before its end (True), or the lease has ended (False)."""
        state = self._leases.get(lease)
        if state is None:
            self._emit(Reply(call, False))
        else:
            state.stop_call = call
            if state.client.closing or state.state == "moving":
                self._answer_stop(state, stop=True)

    def _answer_stop(self, lease: Lease, *, stop: bool) -> None:
        if lease.stop_call is not None:
            self._emit(Reply(lease.stop_call, stop))
            lease.stop_call = None

    def leave(self, call: Hashable, lease: int, rank: int, departure: Departure) -> None:
        """A rank has left its trial. The first outcome counts; an error ends the trial on the other ranks too."""
        self._emit(Reply(call, None))
        if (state := self._leases.get(lease)) is None:
            return
        group = state.group
        state.left[rank] = departure.outcome
        state.stale = state.stale or departure.stale
        if departure.failure is not None and departure.failure.kind == "collective":
            state.deferred = state.deferred or departure
        elif departure.is_failure or rank == 0:
            if state.state == "moving" and departure.outcome == "interrupted":
                state.client.enqueue([state.trial], first=True)
            self._conclude(state, departure)
        if len(state.left) == group.size:
            self._conclude_deferred(state)
            outcomes = set(state.left.values())
            # Ranks that did not all do the same may never get back in step in their process group.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                self._retire(group)
            elif state.stale:
                self._retire(group)
                retired = GroupRetired(group=group.name, trial=state.trial, reason=state.stale)
                self._emit(Tell(group.owner.name, retired))
            self._end(state)
        elif departure.is_failure or departure.alone:
            # The other ranks may never leave by themselves.
            is_known = departure.alone or state.has_outcome
            self._emit(After(PEERS_GRACE_S if is_known else CAUSE_GRACE * PEERS_GRACE_S, "expire", (lease,)))

    def expire(self, lease: int) -> None:
        """Not all ranks have left in time: the lease ends, and the group's processes too."""
        if (state := self._leases.get(lease)) is not None:
            self._conclude_deferred(state)
            self._retire(state.group)
            self._end(state)

    # ------------------------------------------------------------------ groups
    def group_ended(self, owner: str, group: str, start: int, dead: Mapping[int, str], error: str = "") -> None:
        """The processes of this group's start are gone, or about to be.

        Args:
            dead: ranks whose processes died, each with the cause as far as Ray knows it, or "".
            error: why they could not serve trials; "" if they could.
        """
        self._ended_starts.add(start)
        self._addresses.pop(start, None)
        state = self._groups.get(group)
        if state is not None and state.start == start:
            del self._groups[group]
            self._gpu_types.pop(group, None)
            self._retire(state)
            if (lease := state.lease) is not None:
                if lease.state in ("granted", "moving"):
                    lease.client.enqueue([lease.trial], first=True)
                elif lease.state == "running":
                    # The other ranks know how far the trial came.
                    failure = None if lease.deferred is None else lease.deferred.failure
                    departure = state.death(dead, error, -1 if failure is None else failure.batches)
                    self._conclude(lease, departure, dead=tuple(sorted(dead)))
                self._end(lease)
        self._emit(Tell(owner, GroupEnded(group=group, start=start, dead=tuple(sorted(dead)), error=error)))

    def drain(self, group: str) -> None:
        """Have this group's trial save and continue in the next free group, and the group's processes end.

        For when one of its nodes will be removed, or a group of another size is to replace it.
        """
        state = self._groups.get(group)
        if state is not None and not state.retiring:
            self._retire(state)
            self._move(state)

    def retire_idle(self, owner: str, count: int) -> None:
        """End up to this number of an owner's idle groups, the latest first, unless trials wait for one."""
        idle = [group for group in self._groups.values() if group.owner.name == owner and group.is_free]
        waits = any(client.queue for client in self.clients.values() if idle and client.shape == idle[0].shape)
        for group in [] if waits else idle[::-1][:count]:
            self._retire(group)

    def shrink(self, owner: str, keep: int, *, at_once: bool) -> None:
        """End an owner's groups but this number: idle ones, then those whose trials go last. `at_once`: trials in
        them save and leave; else they train to their end first."""
        groups = [group for group in self._groups.values() if group.owner.name == owner]
        for group in sorted(groups, key=_ends_first)[: max(0, len(groups) - keep)]:
            if not group.retiring:
                self._retire(group)
            if at_once:
                self._move(group)

    def _retire(self, group: Group) -> None:
        group.retiring = True
        self._answer_ranks(group)

    def _move(self, group: Group) -> None:
        """Have a group's trial save and leave, to continue in another group."""
        if (lease := group.lease) is None:
            return
        if lease.parameters is None:
            lease.client.enqueue([lease.trial], first=True)
            self._end(lease)
        elif lease.state in ("granted", "running"):  # ranks have it: if it ended now, some would wait for the others
            lease.on("move")
            self._answer_stop(lease, stop=True)

    # ------------------------------------------------------------------ trials of a client
    def enqueue(self, client: str, trials: Iterable[int], first: bool) -> None:
        """Queue a client's trials for a group, at the end or before all others of it."""
        self.clients[client].enqueue(trials, first=first)
        self._match()

    def expect(self, client: str, trials: int) -> None:
        """So many trials that are not queued may be soon: no group is to end meanwhile."""
        self.clients[client].expected = trials

    def withdraw(self, client: str, trials: Iterable[int]) -> None:
        """Take trials out of the queue: the search does not let them run now."""
        self.clients[client].withdraw(trials)

    def bind(self, client: str, lease: int, parameters: bytes) -> None:
        """Give a granted lease its parameters, so that its group's ranks begin."""
        if (state := self._leases.get(lease)) is not None:
            state.parameters = parameters
            self._answer_ranks(state.group)

    def drop(self, client: str, lease: int) -> None:
        """Take back a lease whose trial is not to train now."""
        if (state := self._leases.get(lease)) is not None:
            self._end(state)

    # ------------------------------------------------------------------ matching
    def _match(self) -> None:
        """Grant a lease for each free group while trials are queued for its shape; for those of a higher priority, ask
        others to save and leave."""
        if not any(client.queue for client in self.clients.values()):
            return
        for group in list(self._maybe_free.values()):
            if not group.is_free:
                del self._maybe_free[group.name]
            elif not group.owner.closing and (waiting := self._waiting(group.shape)):
                client, trial = waiting[0]
                self._grant(client, trial, group)
        for shape in dict.fromkeys(client.shape for client in self.clients.values()) if len(self.clients) > 1 else ():
            self._make_room(shape)

    def _waiting(self, shape: str) -> list[tuple[Client, int]]:
        """Clients with a trial that waits for a group of this shape, and that trial: the next one first."""
        clients = [
            (each, trial)
            for each in self.clients.values()
            if each.shape == shape and (trial := each.next_trial) is not None
        ]
        return sorted(clients, key=lambda each: (each[0].priority, each[0].lead))

    def _make_room(self, shape: str) -> None:
        """Have trials save and leave their groups, which stay up, for as many that wait with a higher priority."""
        groups = [group for group in self._groups.values() if group.shape == shape and not group.retiring]
        leases = [group.lease for group in groups if group.lease is not None]
        leases.sort(key=lambda lease: (-lease.client.priority, -lease.number))
        yielding = sum(group.lease is None or group.lease.state == "moving" for group in groups)
        for client, _ in self._waiting(shape):
            room = math.inf if client.max_slots is None else (client.max_slots - client.slots) // client.size
            wanted = int(min(len(client.queue), room))
            wanted, yielding = wanted - yielding, max(yielding - wanted, 0)
            for lease in leases:
                if wanted <= 0 or lease.client.priority <= client.priority:
                    break
                if lease.state == "running":
                    self._move(lease.group)
                    wanted -= 1

    def _grant(self, client: Client, trial: int, group: Group) -> None:
        client.withdraw([trial])
        lease = Lease(number=next(self._numbers), client=client, trial=trial, group=group)
        self._leases[lease.number] = client.leases[lease.number] = client.current[trial] = group.lease = lease
        gpu_type = self._gpu_types.get(group.name, "")
        granted = LeaseGranted(group=group.name, trial=trial, lease=lease.number, gpu_type=gpu_type)
        self._emit(Tell(client.name, granted))

    # ------------------------------------------------------------------ the end of a lease
    def _conclude_deferred(self, lease: Lease) -> None:
        if lease.deferred is not None:
            self._conclude(lease, lease.deferred)

    def _conclude(self, lease: Lease, departure: Departure, dead: tuple[int, ...] = ()) -> None:
        """The trial ends here, like this, unless it has ended before."""
        if lease.has_outcome:
            return
        event: LeaseEvent = "fail" if departure.is_failure else "conclude"
        lease.on(event)
        left = TrialLeft(
            lease=lease.number,
            group=lease.group.name,
            trial=lease.trial,
            outcome=departure.outcome,
            error=departure.error,
            fatal=departure.fatal,
            failure=departure.failure,
            dead=dead,
        )
        self._emit(Tell(lease.client.name, left))
        if lease.group.owner is not lease.client:  # it works, or one of its GPUs does not
            self._emit(Tell(lease.group.owner.name, left))

    def _end(self, lease: Lease) -> None:
        """The lease is over: its group is free for another trial, and all that comes from it is fenced off."""
        lease.on("end")
        client, group = lease.client, lease.group
        group.lease = None
        self._maybe_free[group.name] = group
        del self._leases[lease.number], client.leases[lease.number]
        if client.current.get(lease.trial) is lease:
            del client.current[lease.trial]
        self._answer_stop(lease, stop=False)
        self._emit(Tell(client.name, LeaseOver(lease=lease.number, group=group.name, trial=lease.trial)))
        self._answer_ranks(group)
        self._forget_if_left(client)
        self._match()


def _ends_first(group: Group) -> tuple[bool, bool, int, int]:
    """Sorts groups: those that end anyway, idle ones, then those with the trial of the lowest priority, the latest."""
    lease = group.lease
    priority, number = (0, 0) if lease is None else (lease.client.priority, lease.number)
    return not group.retiring, lease is not None, -priority, -number
