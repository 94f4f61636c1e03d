"""The desk: lends worker groups to the trials of its clients.

It decides which free group gets which queued trial, which lease of a trial is valid, and when a group ends. It lives in
the process that owns the groups: the driver of an experiment, or a server. A client is an experiment's run, which
decides which trials exist and which continue; an owner of groups is a client too.

Pure: no clock, no threads, no I/O. Methods take calls and events, and pass effects to `emit`, in order. The ranks of a
group call `next_lease`, run the trial of the lease, and report when they leave it. Calls that must wait are kept until
their answer is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from dray.leases.effects import After, Effect, Reply, Tell
from dray.leases.lease import Client, Group, Lease, LeaseEvent
from dray.leases.messages import (
    ClientLeft,
    Departure,
    GpuFailed,
    GroupEnded,
    GroupFreed,
    GroupReady,
    GroupRetired,
    LeaseGranted,
    LeaseOver,
    Unfit,
    WorkerArrived,
    WorkerUnfit,
)
from dray.leases.shares import Demand
from dray.leases.turns import ends_first, outranked, waiting

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
CAUSE_GRACE = 3
"""Factor for errors in a collective: Ray may take seconds to notice the death that caused them."""
LEAVE_S = 120.0  # how long trials may take to save after their driver has ended
CALLS = ("arrived", "address", "broken", "next_lease", "begun", "stop_wanted", "waited_for", "leave")
"""Methods of `Desk` that workers may call."""
CLIENT_CALLS = ("enqueue", "need_new", "expect", "withdraw", "cancel", "bind", "drop", "close", "remove", "gpu_failed")
"""Methods of `Desk` that the experiments of a server may call."""


class Desk:
    """The clients with their queues of trials, the groups, and the leases that join them; `emit` is called with each
    effect."""

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self.clients: dict[str, Client] = {}
        self._groups: dict[str, Group] = {}
        self._maybe_free: dict[str, Group] = {}  # candidates for `match`: all free groups, and some no longer free
        self._types: dict[str, tuple[str, str]] = {}  # GPU type and slot type by group name
        self._ended_starts: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._addresses: dict[int, tuple[str, int] | list[Hashable]] = {}
        """For each start: the address of its rank 0, or the calls that wait for it."""
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------ clients
    def add(self, client: str, **share: Any) -> None:
        """Add a client with a new name. `share`: its claim to slots and the endpoint of its trials; see `Client`."""
        had = min((each.had for each in self.clients.values() if not each.is_owner), default=0.0)
        self.clients[client] = Client(name=client, had=had, **share)

    def close(self, client: str) -> None:
        """Grant a client no more leases, let its running trials save and leave, and end its groups. Idempotent."""
        state = self.clients[client]
        state.closing = True
        for lease in list(state.leases.values()):
            if lease.state == "granted":
                self._end(lease)
            else:
                self._answer_stop(lease, stop=True)
        for group in self._groups.values():
            if group.owner is state:
                self._answer_ranks(group)
        while state.broken:
            self._emit(Reply(state.broken.pop(), None))

    def remove(self, client: str, within_s: float = LEAVE_S) -> None:
        """Forget a client whose driver is ending once its trials have saved and left, and emit a `ClientLeft` then. If
        they take longer than `within_s`, their groups end."""
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
                group = lease.group
                if lease.freed:  # its group may train another client's trial
                    self._end(lease)
                else:
                    self.group_ended(group.owner.name, GroupEnded(group=group.name, start=group.start))

    def _forget_if_left(self, client: Client) -> None:
        if client.is_leaving and not client.leases and self.clients.pop(client.name, None) is not None:
            self._emit(ClientLeft(client=client.name))

    def demands(self, had: Mapping[str, float]) -> list[Demand]:
        """The demand of each client except owners of groups. `had`: slot-seconds by weight of the clients that
        have been given slots."""
        for name, seconds in had.items():
            if (client := self.clients.get(name)) is not None:
                client.had = seconds
        return [client.demand for client in self.clients.values() if not client.is_owner]

    def set_share(self, client: str, priority: int, weight: float, max_slots: float | None) -> None:
        """Change a client's claim to slots; see `Client`."""
        if (state := self.clients.get(client)) is not None:
            state.priority, state.weight, state.max_slots = priority, weight, max_slots
            self._match()

    def unfit(self, shape: str, why: Unfit) -> None:
        """Tell the drivers with trials for this shape that no group of it can run trials."""
        for client in self.clients.values():
            if client.shape == shape:
                self._emit(Tell(client.name, WorkerUnfit(group="", why=why)))

    # ------------------------------------------------------------------ calls of a group's ranks
    def arrived(
        self, call: Hashable, owner: str, group: str, start: int, node: str, gpu_type: str, slot_type: str
    ) -> None:
        """Note that a process of a group's start is running, on a node (Ray's id) with GPUs of this type, and slots of
        this type. It has not imported torch yet."""
        self._types[group] = gpu_type, slot_type
        self._emit(Tell(owner, WorkerArrived(group=group, start=start, node=node)))

    def address(self, call: Hashable, start: int, mine: tuple[str, int] | None) -> None:
        """Reply with the host and port at which the ranks of a group's start meet. Rank 0 passes it as ``mine``; the
        others wait for it."""
        known = self._addresses.setdefault(start, [])
        if mine is not None and isinstance(known, list):
            for each in known:
                self._emit(Reply(each, mine))
            self._addresses[start] = known = mine
        if isinstance(known, list):
            known.append(call)
        else:
            self._emit(Reply(call, known))

    def broken(self, call: Hashable, owner: str, group: str, why: Unfit) -> None:
        """Note that a process of a group can't run any trial, and neither could another one in its place. The reply
        comes when the owner closes."""
        self._emit(Tell(owner, WorkerUnfit(group=group, why=why)))
        client = self.clients.get(owner)
        if client is None or client.closing:
            self._emit(Reply(call, None))
        else:
            client.broken.append(call)

    def next_lease(
        self, call: Hashable, owner: str, group: str, start: int, rank: int, size: int, after: int, shape: str = ""
    ) -> None:
        """Reply to a rank with its next lease: the client's name and endpoint, and the parameters from `bind`; None if
        the process must end.

        Args:
            owner: the client that started the group.
            start: number of the process's start, unique in a run.
            rank, size: the caller's rank, and the size of its group.
            after: number of the last lease that this rank has served, 0 at first.
        """
        client = self.clients.get(owner)
        if client is None or start in self._ended_starts:
            # Workers outlive a killed raylet by seconds: they may still finish a trial and ask for another.
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
        """Answer the ranks that wait for a lease if it has its parameters, or if their processes must end."""
        lease = group.lease
        for rank, (call, after) in list(group.waiting.items()):
            # While they write, the first rank to end would end the others.
            if lease is None and group.writing is None and (group.owner.closing or group.retiring):
                answer = None
            elif lease is not None and lease.number > after and lease.state != "granted":
                answer = (lease.client.name, lease.client.endpoint, lease.parameters)
            else:
                continue
            del group.waiting[rank]
            self._emit(Reply(call, answer))

    def begun(self, call: Hashable, lease: int) -> None:
        """Note that rank 0 has begun the lease."""
        if (state := self._leases.get(lease)) is not None and state.state == "bound":
            state.on("begin")
            self._match()  # a trial with a higher priority may have arrived meanwhile

    def stop_wanted(self, call: Hashable, lease: int) -> None:
        """Reply when the trial should save and leave before its end (True), or the lease has ended (False)."""
        state = self._leases.get(lease)
        if state is None:
            self._emit(Reply(call, False))
        else:
            state.stop_call = call
            if state.client.closing or state.state in ("moving", "leaving"):
                self._answer_stop(state, stop=True)

    def _answer_stop(self, lease: Lease, *, stop: bool) -> None:
        if lease.stop_call is not None:
            self._emit(Reply(lease.stop_call, stop))
            lease.stop_call = None

    def waited_for(self, call: Hashable, lease: int) -> None:
        """Reply whether another trial would get the lease's group if this one left it now."""
        state, waits = self._leases.get(lease), False
        if state is not None and not (state.client.closing or state.group.owner.closing or state.group.retiring):
            state.freed = True
            waits = bool(waiting(self.clients.values(), state.group.shape, used=True))
            state.freed = False
        self._emit(Reply(call, waits))

    def leave(self, call: Hashable, lease: int, rank: int, departure: Departure) -> None:
        """Handle a rank that has left its trial. The first outcome counts; an error ends the trial on all ranks. After
        its group was freed, only rank 0 leaves once more."""
        self._emit(Reply(call, None))
        if (state := self._leases.get(lease)) is None:
            return
        state.left[rank] = departure.outcome
        state.stale = state.stale or departure.stale
        if departure.outcome == "unloaded":
            self._try_in_new_processes(state)
        elif departure.failure is not None and departure.failure.kind == "collective":
            state.deferred = state.deferred or departure
        elif departure.outcome != "writing" and (departure.is_failure or departure.alone or rank == 0):
            if state.goes_on(departure.outcome):
                state.client.enqueue([state.trial], first=True)
            self._conclude(state, departure)
        if state.freed or len(state.left) == state.group.size:
            self._all_left(state)
        elif departure.is_failure or departure.alone:
            # The other ranks may never leave on their own.
            grace_s = PEERS_GRACE_S if state.has_outcome else CAUSE_GRACE * PEERS_GRACE_S
            self._emit(After(grace_s, "expire", (lease,)))

    def _all_left(self, lease: Lease) -> None:
        """End a lease that all ranks have left; or free its group, if its trial's last checkpoint is still written."""
        self._conclude(lease, lease.deferred)
        group, outcomes = lease.group, set(lease.left.values()) - {"writing"}
        if not lease.freed:
            # Ranks with different outcomes may never get back in step in their process group.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                self._retire(group)
            elif lease.stale:
                self._retire(group, lease.trial, lease.stale)
        if outcomes:
            self._end(lease)
        else:
            self._free(lease)

    def _try_in_new_processes(self, lease: Lease) -> None:
        """Let a trial whose code can't be imported in its group, which had other code, continue in new processes. Its
        driver does not hear of the error."""
        if not lease.has_outcome:
            continues = lease.state != "leaving" and not lease.client.closing
            self._conclude(lease, Departure(outcome="interrupted"))
            if continues:
                lease.client.enqueue([lease.trial], first=True)
                self._renew(lease.group, lease.client, lease.trial)

    def expire(self, lease: int) -> None:
        """End a lease that some ranks have not left in time, and the group's processes."""
        if (state := self._leases.get(lease)) is not None:
            self._conclude(state, state.deferred)
            self._retire(state.group)
            self._end(state)

    # ------------------------------------------------------------------ groups
    def group_ended(self, owner: str, ended: GroupEnded) -> None:
        """Handle the end of a group's processes, which are gone or about to be."""
        self._ended_starts.add(ended.start)
        self._addresses.pop(ended.start, None)
        state = self._groups.get(ended.group)
        if state is not None and state.start == ended.start:
            del self._groups[ended.group]
            self._types.pop(ended.group, None)
            self._retire(state)
            for lease in [each for each in (state.writing, state.lease) if each is not None]:
                if lease.state in ("granted", "bound", "moving"):
                    lease.client.enqueue([lease.trial], first=True)
                elif lease.state in ("running", "leaving"):
                    self._conclude(lease, lease.death(ended), ended)
                self._end(lease)
        self._forget_renewal(ended.group, ended.start)
        self._emit(Tell(owner, ended))

    def drain(self, group: str) -> None:
        """Let a group's trial save and continue in the next free group, and end the group's processes: one of its nodes
        will be removed, or a group of a different size replaces it."""
        if (state := self._groups.get(group)) is not None and not state.retiring:
            self._retire(state)
            if state.writing is not None and state.writing.state == "running":
                state.writing.on("move")  # if the node is gone before it has written, it is not its failure
            self._move(state)

    def retire_idle(self, owner: str, count: int) -> None:
        """End up to `count` idle groups of an owner, the latest first, unless trials wait for one."""
        idle = [group for group in self._groups.values() if group.owner.name == owner and group.is_free]
        waits = any(client.queue for client in self.clients.values() if idle and client.shape == idle[0].shape)
        for group in [] if waits else idle[::-1][:count]:
            self._retire(group)

    def shrink(self, owner: str, keep: int, *, at_once: bool) -> None:
        """End all but `keep` groups of an owner: first idle ones, then those with trials of the lowest priority.
        `at_once`: their trials save and leave; otherwise they train to their end first."""
        groups = [group for group in self._groups.values() if group.owner.name == owner]
        for group in sorted(groups, key=ends_first)[: max(0, len(groups) - keep)]:
            self._retire(group)
            if at_once:
                self._move(group)

    def _retire(self, group: Group, trial: int | None = None, reason: str = "") -> None:
        group.retiring = True
        self._answer_ranks(group)
        if trial is not None:  # a new group takes its place
            self._emit(Tell(group.owner.name, GroupRetired(group=group.name, trial=trial, reason=reason)))

    def _renew(self, group: Group, client: Client, trial: int) -> None:
        """End a used group, so that a new one in its place can run a client's trial."""
        client.new[trial] = group.name, group.start
        self._retire(group, trial)

    def _forget_renewal(self, group: str, start: int) -> None:
        """Note that this start of a group will not run the trial that another start has ended for."""
        for client in self.clients.values():
            for trial, ended in client.new.items():
                if ended is not None and ended[0] == group and ended[1] != start:
                    client.new[trial] = None

    def _move(self, group: Group) -> None:
        """Let a group's trial save and leave, and continue in another group."""
        if (lease := group.lease) is None:
            return
        if lease.state == "granted":
            lease.client.enqueue([lease.trial], first=True)
            self._end(lease)
        elif lease.state in ("bound", "running"):  # ranks have begun: ending it now would leave some waiting
            lease.on("move")
            self._answer_stop(lease, stop=True)

    # ------------------------------------------------------------------ trials of a client
    def enqueue(self, client: str, trials: Iterable[int], first: bool) -> None:
        """Queue a client's trials, at the end of its queue or at the front."""
        self.clients[client].enqueue(trials, first=first)
        self._match()

    def need_new(self, client: str, trials: Iterable[int]) -> None:
        """Run these trials of a client, when they are queued next, only in processes that have run no other trial."""
        for trial in trials:
            self.clients[client].new.setdefault(trial)

    def expect(self, client: str, trials: int) -> None:
        """Set the number of trials that may soon be queued, so that no group ends meanwhile."""
        self.clients[client].expected = trials

    def gpu_failed(self, client: str, trial: int, node: str) -> None:
        """A client has found in the log of a dead process that a GPU of this node, by Ray's id, may be broken."""
        for each in list(self.clients):
            self._emit(Tell(each, GpuFailed(trial=trial, node=node)))

    def withdraw(self, client: str, trials: Iterable[int]) -> None:
        """Remove trials from the queue: the search does not let them run now."""
        self.clients[client].withdraw(trials)

    def cancel(self, client: str, trial: int) -> None:
        """Remove a trial from the queue, and let it leave its group if it has one."""
        self.clients[client].withdraw([trial])
        if (lease := self.clients[client].current.get(trial)) is None:
            return
        if lease.state == "granted":
            self._end(lease)
        elif not lease.has_outcome:
            lease.on("cancel")
            self._answer_stop(lease, stop=True)

    def bind(self, client: str, lease: int, parameters: bytes) -> None:
        """Give a granted lease its parameters, so that its group's ranks begin."""
        if (state := self._leases.get(lease)) is not None and state.state == "granted":
            state.on("bind")
            state.parameters = parameters
            self._answer_ranks(state.group)

    def drop(self, client: str, lease: int) -> None:
        """Take back a lease whose trial must not train now."""
        if (state := self._leases.get(lease)) is not None:
            self._end(state)

    # ------------------------------------------------------------------ matching
    def _match(self) -> None:
        """Grant a lease for each free group while trials are queued for its shape. If trials with a higher priority are
        waiting, ask others to save and leave."""
        if not any(client.queue for client in self.clients.values()):
            return
        for group in list(self._maybe_free.values()):
            if not group.is_free:
                del self._maybe_free[group.name]
            elif not group.owner.closing and (turns := waiting(self.clients.values(), group.shape, used=group.used)):
                client, trial = turns[0]
                if group.used and trial in client.new:
                    self._renew(group, client, trial)
                else:
                    self._grant(client, trial, group)
        for shape in dict.fromkeys(client.shape for client in self.clients.values()) if len(self.clients) > 1 else ():
            for group in outranked(self.clients.values(), self._groups.values(), shape):
                self._move(group)

    def _grant(self, client: Client, trial: int, group: Group) -> None:
        client.withdraw([trial])
        self._forget_renewal(group.name, group.start)
        if trial in client.new:
            client.new[trial] = None
        lease = Lease(number=next(self._numbers), client=client, trial=trial, group=group)
        self._leases[lease.number] = client.leases[lease.number] = client.current[trial] = group.lease = lease
        gpu_type, slot_type = self._types.get(group.name, ("", ""))
        granted = LeaseGranted(
            group=group.name, trial=trial, lease=lease.number, gpu_type=gpu_type, slot_type=slot_type
        )
        for name in dict.fromkeys((client.name, group.owner.name)):  # the owner may start more groups now
            self._emit(Tell(name, granted))

    # ------------------------------------------------------------------ the end of a lease
    def _conclude(self, lease: Lease, departure: Departure | None, ended: GroupEnded | None = None) -> None:
        """Record the outcome of a trial's lease, if there is one, and unless it has one already. `ended`: the end of
        its processes, if that is the cause."""
        if departure is None or lease.has_outcome:
            return
        event: LeaseEvent = "fail" if departure.is_failure else "conclude"
        lease.on(event)
        if departure.outcome not in ("interrupted", "yielded"):
            lease.client.new.pop(lease.trial, None)
        left = lease.left_by(departure, ended)
        for name in dict.fromkeys((lease.client.name, lease.group.owner.name)):  # it says that the group, or GPU, works
            self._emit(Tell(name, left))

    def _free(self, lease: Lease) -> None:
        """Let a lease's group train another trial, while the last checkpoint of its own is written."""
        group = lease.group
        lease.freed, group.lease, group.writing, group.used = True, None, lease, True
        self._maybe_free[group.name] = group
        self._emit(Tell(lease.client.name, GroupFreed(lease=lease.number, group=group.name, trial=lease.trial)))
        self._answer_ranks(group)
        self._match()

    def _end(self, lease: Lease) -> None:
        """End a lease: its group is free for another trial, and later messages from it are fenced off."""
        client, group = lease.client, lease.group
        if lease.freed:
            group.writing = None
        else:
            group.lease, group.used = None, group.used or lease.state != "granted"
        lease.on("end")
        self._maybe_free[group.name] = group
        del self._leases[lease.number], client.leases[lease.number]
        if client.current.get(lease.trial) is lease:
            del client.current[lease.trial]
        self._answer_stop(lease, stop=False)
        over = LeaseOver(lease=lease.number, group=group.name, trial=lease.trial, freed=lease.freed)
        self._emit(Tell(client.name, over))
        self._answer_ranks(group)
        self._forget_if_left(client)
        self._match()
