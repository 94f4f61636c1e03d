"""The desk: an actor that lends queued trials to free worker groups, and carries reports and decisions.

The desk owns the leases: which free group gets the next queued trial, and which lease of a trial counts (`Leases`). Of
each client (`Client`) it keeps the queue of trials, the best score so far, and each result until the search has decided
on it (`PendingResults`). A client is a driver that owns a search, or groups, or both: it decides which trials exist,
with which hyperparameters, which continue, stop or restart, and how many groups there are.

Four parties call it:

* the ranks of a worker group long-poll ``next_lease`` and run what they get;
* rank 0 of a lease reports, and asks before it commits a checkpoint; every rank says when it leaves;
* each search's Tune handle long-polls ``serve`` for results; if its process is killed, the next one gets them again;
* the driver enqueues trials, binds leases to parameters, answers results, and long-polls ``messages``.

This class only waits and wakes. It does not know Ray, so its tests are plain asyncio; ``dray.desk.actor`` makes an
actor of it. What happens for every trial is called over a connection of its own (``dray.desk.connection``), the rest
through Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.desk.client import Client
from dray.desk.lease import Lease, State
from dray.desk.leases import Leases
from dray.desk.messages import (
    CheckpointDamaged,
    CheckpointSaved,
    ClientAdded,
    Demand,
    Departure,
    DeskReport,
    HandleStarted,
    Message,
    Reply,
    WorkerUnfit,
)
from dray.desk.results import PendingResults, TrialResult
from dray.desk.wakeup import Wakeups

if TYPE_CHECKING:
    from searchers.events import Decision, Reason


SERVER = "server"
"""The name of the client that starts groups for others."""


ADDED = "added"
"""What waits for a client waits for this."""
HANDLE_S = 60.0
"""How long a handle's call waits for its client: that of a process which was killed would wait for ever."""
LEAVE_S = 120.0
"""How long trials may take to save when their driver is gone."""


class Desk:
    """All methods run on one event loop; none blocks it.

    Args:
        client, shape: the first client, as for `add`: Ray may run the calls of one process in another order. Its
            handle has its name.
    """

    def __init__(self, client: str, shape: str = "") -> None:
        self._wakeups = Wakeups()
        self._leases = Leases(self._wakeups.wake)
        self._clients: dict[str, Client] = {}
        self._addresses: dict[int, asyncio.Future[tuple[str, int]]] = {}
        self._add(client, shape=shape, handle=client)

    async def add(self, client: str, spec: bytes = b"", workers: bytes = b"", **share: Any) -> None:
        """Serve a client of this name from now on. To be waited for before anything else of it is called.

        Args:
            client: a new name.
            spec: a pickle of what its trials run with, for groups that were not started for it. The desk can't unpickle
                it: it may not have what the user's code imports.
            workers: a pickle of what its groups are made of, for the server; b"" if it has groups of its own.
            share: what slots it gets, see `Client`: shape, size, priority, weight, max_slots; and its handle.
        """
        self._add(client, spec=spec, **share)
        if workers:
            shape = self._clients[client].shape
            self._leases.post(self._clients[SERVER], ClientAdded(client=client, shape=shape, workers=workers))

    def _add(self, client: str, **share: Any) -> None:
        results = PendingResults(lambda: self._wakeups.wake(self._clients[client].results))
        had = min((each.had for each in self._clients.values() if each.spec), default=0.0)
        self._clients[client] = Client(name=client, results=results, had=had, **share)
        self._leases.add(self._clients[client])
        self._wakeups.wake(ADDED)

    async def remove(self, client: str, within_s: float = LEAVE_S) -> None:
        """Forget a client whose driver has ended, or is about to, once its trials have saved and left.

        Args:
            within_s: how long they may take; then their groups end.
        """
        if (state := self._clients.get(client)) is None:
            return
        state.is_gone = True
        await self.close(client)
        evict = asyncio.get_running_loop().call_later(within_s, self._leases.evict, state)
        while state.leases:
            await self._wakeups.wait(state)
        evict.cancel()
        if self._clients.pop(client, None) is not None:
            self._leases.remove(state)
            self._wakeups.wake(state)  # its driver may wait for messages

    async def demands(self, had: Mapping[str, float]) -> list[Demand]:
        """What each client that has trials, or had, has and asks for.

        Args:
            had: slot-seconds by weight, of clients that the server has given slots.
        """
        for name, seconds in had.items():
            if (client := self._clients.get(name)) is not None:
                client.had = seconds
        return [client.demand for client in self._clients.values() if client.spec]

    async def set_share(self, client: str, priority: int, weight: float, max_slots: float | None) -> None:
        """Change what slots a client gets; see `Client`."""
        if (state := self._clients.get(client)) is not None:
            state.priority, state.weight, state.max_slots = priority, weight, max_slots
            self._leases.match()

    async def shrink(self, owner: str, keep: int, at_once: bool) -> None:
        """End an owner's groups but this number, see `Leases.shrink`."""
        self._leases.shrink(self._clients[owner], keep, at_once=at_once)

    async def unfit(self, shape: str, cause: Exception) -> None:
        """No group of this shape can run trials: tell the drivers that have trials for it."""
        for client in self._clients.values():
            if client.spec and client.shape == shape:
                self._leases.post(client, WorkerUnfit(group="", cause=cause))

    # ------------------------------------------------------------------ worker groups
    async def arrived(self, owner: str, group: str, node: str, gpu_type: str) -> None:
        """A process of an owner's group runs, on this node (Ray's id), which has such GPUs; it has not imported torch
        yet."""
        self._leases.arrive(self._clients[owner], group, node, gpu_type)

    async def address(self, start: int, mine: tuple[str, int] | None) -> tuple[str, int]:
        """Where the ranks of a group meet, host and port: rank 0 passes it as ``mine``, the others wait for it.

        Args:
            start: number of the group's start, unique in a run.
        """
        address = self._addresses.setdefault(start, asyncio.get_running_loop().create_future())
        if mine is not None:
            address.set_result(mine)
        return await address

    async def broken(self, owner: str, group: str, cause: Exception) -> None:
        """A process of an owner's group can't run any trial, and neither could another one in its place.

        Returns when the owner closes.
        """
        client = self._clients[owner]
        self._leases.post(client, WorkerUnfit(group=group, cause=cause))
        while not client.closing:
            await self._wakeups.wait(client)

    async def next_lease(
        self, owner: str, group: str, start: int, rank: int, size: int, after: int, shape: str = ""
    ) -> Any:
        """The parameters of this rank's next lease, as given to ``bind``. None if its process is to end.

        Args:
            owner: the client that started the group.
            group: the group's name.
            start: number of the process's start, unique in a run.
            rank, size: of the caller within its group.
            after: number of the last lease that this rank has served, 0 at first.
            shape: of the group.
        """
        client = self._clients[owner]
        state = self._leases.ask(client, group, start, rank, size, first=after == 0, shape=shape)
        if state is None:
            return None
        while True:
            lease = state.lease
            if lease is None and (client.closing or state.retiring):
                return None
            if lease is not None and lease.number > after and lease.parameters is not None:
                state.idle.discard(rank)
                return lease.parameters
            await self._wakeups.wait(state)

    async def group_ended(self, owner: str, group: str, start: int, dead: Mapping[int, str], error: str = "") -> None:
        """The processes of this group's start are gone, or about to be.

        Args:
            dead: ranks whose processes died, each with the cause as far as Ray knows it, or "".
            error: why they could not serve trials; "" if they could.
        """
        self._leases.end_group(self._clients[owner], group, start, dead, error)
        if (address := self._addresses.pop(start, None)) is not None:
            address.cancel()

    async def spec(self, client: str) -> bytes:
        """A pickle of what a client's trials run with, as given to ``add``."""
        return self._clients[client].spec

    # ------------------------------------------------------------------ trials
    async def begun(self, lease: int) -> None:
        """Rank 0 has taken up the lease."""
        self._leases.begin(lease)

    async def report(self, lease: int, report: DeskReport, decides: bool) -> Reply:
        """Take a report of rank 0. With ``decides`` this waits for the search's decision, and returns it.

        The search gets a report only once the driver has recorded its rows: a driver that is killed may not know of a
        decision whose metrics are lost. A final report is the trial's end, and no decision is waited for.

        Args:
            lease: the trial's.
            report: what the trial reports.
            decides: the search is to decide on it.
        """
        state = self._leases.live(lease)
        if state is None:
            return "fenced"
        final = decides and report.final
        self._leases.report(state, report, is_final=final)
        if not decides:
            return "interrupt" if state.client.closing else "continue"
        await self._recorded(state)
        number = state.client.results.add(
            state.trial,
            step=report.step,
            value=report.value,
            metrics=report.metrics,
            outcome="completed" if final else None,
        )
        if final:
            return "continue"
        state.decisions[number] = None
        while (reply := self._leases.reply(state, number)) is None:
            await self._wakeups.wait(state)
        return reply

    async def _recorded(self, lease: Lease) -> None:
        """Wait until the driver has recorded all reports of a lease, or never will."""
        while lease.unrecorded and not lease.client.is_gone:
            await self._wakeups.wait(lease)

    async def stop_wanted(self, lease: int) -> bool:
        """Wait until the trial should save and leave before its end (True), or the lease has ended (False)."""
        while (state := self._leases.live(lease)) is not None:
            if state.client.closing or state.state is State.MOVING:
                return True
            await self._wakeups.wait(state)
        return False

    async def may_commit(self, lease: int) -> bool:
        """Whether rank 0 may commit a checkpoint; waits until the driver has recorded all earlier reports.

        So the driver can lack only rows since the last checkpoint, and the next checkpoint carries these. A driver that
        has died records none: then the trial continues from its last checkpoint.
        """
        while (state := self._leases.live(lease)) is not None and state.unrecorded and not state.client.is_gone:
            await self._wakeups.wait(state)
        return state is not None and not state.unrecorded

    async def saved(
        self, client: str, trial: int, checkpoint: str, batches: int, value: float | None, seconds: float | None
    ) -> None:
        """The trial has committed this checkpoint, or resumed from it. Accepted from an ended lease too."""
        saved = CheckpointSaved(trial=trial, checkpoint=checkpoint, batches=batches, value=value, seconds=seconds)
        self._post(client, saved)

    async def damaged(self, client: str, trial: int, checkpoint: str, why: str) -> None:
        """The trial has skipped a checkpoint."""
        self._post(client, CheckpointDamaged(trial=trial, checkpoint=checkpoint, error=why))

    async def improves(self, lease: int, score: float) -> bool:
        """Whether ``score`` (smaller is better) is the best of the experiment so far; if so, it is recorded."""
        state = self._leases.live(lease)
        return state is not None and state.client.improves(state, score)

    async def best(self, client: str) -> float | None:
        """The best score of a client's trials so far, smaller is better; None if there is none."""
        return state.best if (state := self._clients.get(client)) is not None else None

    async def leave(self, lease: int, rank: int, departure: Departure) -> None:
        """This rank has left its trial."""
        grace_s = self._leases.leave(lease, rank, departure)
        if grace_s is not None:
            asyncio.get_running_loop().call_later(grace_s, self._leases.expire, lease)

    def _post(self, client: str, message: Message) -> None:
        if (state := self._clients.get(client)) is not None:
            self._leases.post(state, message)

    # ------------------------------------------------------------------ the Tune handle
    async def serve(self, handle: str, process: int) -> list[TrialResult] | None:
        """All results of a handle's client that wait for a decision, one per trial; None when the search is over.

        No results if there is no such client within a minute: a server's handles start before their experiments.

        Args:
            handle: see `Client`.
            process: the handle's process id; a new one gets all unanswered results again.
        """
        try:
            async with asyncio.timeout(HANDLE_S):
                while (state := self._client_of(handle)) is None:
                    await self._wakeups.wait(ADDED)
        except TimeoutError:
            return []
        if state.results.attach(process):
            self._leases.post(state, HandleStarted(process=process))
        while state.results.is_current(process):
            if due := state.results.take():
                return due
            if state.is_search_over:
                break
            await self._wakeups.wait(state.results)
        return None

    def _client_of(self, handle: str) -> Client | None:
        """The newest with this handle: a driver that has lost its connection starts over, with the same one."""
        return next((each for each in reversed(self._clients.values()) if each.handle == handle), None)

    async def import_path(self) -> str:
        """The directory from which this process, and any other on its machine, can import dray."""
        return str(Path(__file__).parents[2])

    # ------------------------------------------------------------------ the driver
    async def messages(self, client: str, recorded: dict[int, int]) -> list[Message]:
        """All that happened to a client since the last call; waits until something has, or the client is removed.

        ``recorded``: how many reports of each lease the driver has recorded since then.
        """
        self._leases.recorded(recorded)
        state = self._clients[client]
        state.driver_waits = True
        while not state.messages and client in self._clients:
            await self._wakeups.wait(state)
        mail, state.messages = state.messages, []
        state.driver_waits = False
        return mail

    async def enqueue(self, client: str, trials: list[int], *, first: bool = False) -> None:
        """Queue a client's trials for a group, at the end or before all others of it."""
        self._leases.enqueue(self._clients[client], trials, first=first)

    async def withdraw(self, client: str, trials: list[int]) -> None:
        """Take trials out of the queue: the search does not let them run now."""
        self._clients[client].withdraw(trials)

    async def bind(self, lease: int, parameters: Any) -> None:
        """Give a granted lease its parameters, so that its group's ranks begin."""
        self._leases.bind(lease, parameters)

    async def drop(self, lease: int) -> None:
        """Take back a granted lease whose trial has ended meanwhile."""
        if (state := self._leases.get(lease)) is not None:
            self._leases.end(state)

    async def drain_group(self, group: str) -> None:
        """Have this group's trial save and continue in the next free group, and the group's processes end.

        For when one of its nodes will be removed, or a group of another size is to replace it.
        """
        self._leases.drain(group)

    async def retire_idle(self, owner: str, groups: int) -> None:
        """End up to this number of an owner's idle groups."""
        self._leases.retire_idle(self._clients[owner], groups)

    async def answer(self, client: str, trial: int, number: int, decision: Decision) -> None:
        """The search's decision on a trial's result with this number."""
        state = self._clients[client]
        state.results.answer(trial, number, decision)
        self._leases.decide(state, trial, number, decision)

    async def end_trial(self, client: str, trial: int, reason: Reason) -> None:
        """Tell the search, through Tune, that a trial has ended other than by its last report."""
        state = self._clients[client]
        for lease in self._leases.unrecorded(state, trial):  # whose results come first
            await self._recorded(lease)
        state.results.add(trial, outcome=reason)

    async def set_best(self, client: str, score: float | None) -> None:
        """The best score so far (smaller is better), known from the journal."""
        self._clients[client].best = score

    async def end_search(self, client: str) -> None:
        """A client's search, or its run, is over: end the handle and its free groups."""
        state = self._clients[client]
        state.is_search_over = True
        self._wakeups.wake(state.results)
        await self.close(client)

    async def close(self, client: str) -> None:
        """Grant a client no more leases. Its running trials save and leave, at their next report at the latest."""
        self._leases.close(self._clients[client])
        self._wakeups.wake(self._clients[client])

    async def is_quiet(self, client: str) -> bool:
        """Whether no lease of a client is out, and its driver has read all messages and waits for the next."""
        state = self._clients[client]
        return not state.leases and not state.messages and state.driver_waits
