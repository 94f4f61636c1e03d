"""The desk: an actor that lends queued trials to free worker groups, and carries reports and decisions.

The desk owns the leases: which free group gets the next queued trial, which lease of a trial counts, and whether a
score is the best so far (`Leases`). It keeps each result until the search has decided on it (`PendingResults`). The
driver owns the search and the groups: it decides which trials exist, with which hyperparameters, which continue, stop
or restart, and how many groups there are.

Four parties call it:

* the ranks of a worker group long-poll ``next_lease`` and run what they get;
* rank 0 of a lease reports, and asks before it commits a checkpoint; every rank says when it leaves;
* the Tune handle long-polls ``serve`` for results; if its process is killed, the next one gets them again;
* the driver enqueues trials, binds leases to parameters, answers results, and long-polls ``messages``.

This class only waits and wakes. It does not know Ray, so its tests are plain asyncio; ``dray.groups.group`` makes an
actor of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.desk.lease import State
from dray.desk.leases import MESSAGES, Leases
from dray.desk.messages import (
    CheckpointDamaged,
    CheckpointSaved,
    Departure,
    DeskReport,
    HandleStarted,
    LeaseOutcome,
    Message,
    Reply,
    WorkerArrived,
    WorkerUnfit,
)
from dray.desk.results import PendingResults, TrialResult
from dray.desk.wakeup import Wakeups

if TYPE_CHECKING:
    from searchers.events import Decision

RESULTS, CLOSED = "results", "closed"
"""What coroutines wait for, besides groups, leases and messages."""


class Desk:
    """All methods run on one event loop; none blocks it."""

    def __init__(self) -> None:
        self._wakeups = Wakeups()
        self._results = PendingResults(lambda: self._wakeups.wake(RESULTS))
        self._leases = Leases(self._wakeups.wake)
        self._addresses: dict[int, asyncio.Future[tuple[str, int]]] = {}
        self._is_search_over = False
        self._driver_waits = False

    # ------------------------------------------------------------------ worker groups
    async def arrived(self, group: str, node: str) -> None:
        """A process of this group runs, on this node (Ray's id); it has not imported torch yet."""
        self._leases.post(WorkerArrived(group=group, node=node))

    async def address(self, start: int, mine: tuple[str, int] | None) -> tuple[str, int]:
        """Where the ranks of a group meet, host and port: rank 0 passes it as ``mine``, the others wait for it.

        Args:
            start: number of the group's start, unique in a run.
        """
        address = self._addresses.setdefault(start, asyncio.get_running_loop().create_future())
        if mine is not None:
            address.set_result(mine)
        return await address

    async def broken(self, group: str, cause: Exception) -> None:
        """A process of this group can't run any trial, and neither could another one in its place.

        Returns when the desk is closed.
        """
        self._leases.post(WorkerUnfit(group=group, cause=cause))
        while not self._leases.closing:
            await self._wakeups.wait(CLOSED)

    async def next_lease(self, group: str, start: int, rank: int, size: int, after: int) -> Any:
        """The parameters of this rank's next lease, as given to ``bind``. None if its process is to end.

        Args:
            group: the group's name.
            start: number of the process's start, unique in a run.
            rank, size: of the caller within its group.
            after: number of the last lease that this rank has served, 0 at first.
        """
        state = self._leases.ask(group, start, rank, size, first=after == 0)
        if state is None:
            return None
        while True:
            lease = state.lease
            if lease is None and (self._leases.closing or state.retiring):
                return None
            if lease is not None and lease.number > after and lease.parameters is not None:
                state.idle.discard(rank)
                return lease.parameters
            await self._wakeups.wait(state)

    async def group_ended(self, group: str, start: int, dead: Mapping[int, str], error: str = "") -> None:
        """The processes of this group's start are gone, or about to be.

        Args:
            dead: ranks whose processes died, each with the cause as far as Ray knows it, or "".
            error: why they could not serve trials; "" if they could.
        """
        self._leases.end_group(group, start, dead, error)
        if (address := self._addresses.pop(start, None)) is not None:
            address.cancel()

    # ------------------------------------------------------------------ trials
    async def begun(self, lease: int) -> None:
        """Rank 0 has taken up the lease."""
        self._leases.begin(lease)

    async def report(self, lease: int, fields: Mapping[str, Any], decides: bool) -> Reply:
        """Take a report of rank 0. With ``decides`` this waits for the search's decision, and returns it.

        A final report is recorded as the trial's end, without waiting. ``fields``: of a `DeskReport`.
        """
        state = self._leases.live(lease)
        if state is None:
            return "fenced"
        report = DeskReport(**fields)
        final = decides and report.final
        self._leases.report(state, report, is_final=final)
        if not decides:
            return "interrupt" if self._leases.closing else "continue"
        number = self._results.add(
            state.trial, step=report.step, value=report.value, outcome="completed" if final else None
        )
        if final:
            return "continue"
        state.decisions[number] = None
        while (reply := self._leases.reply(state, number)) is None:
            await self._wakeups.wait(state)
        return reply

    async def stop_wanted(self, lease: int) -> bool:
        """Wait until the trial should save and leave before its end (True), or the lease has ended (False)."""
        while (state := self._leases.live(lease)) is not None:
            if self._leases.closing or state.state is State.MOVING:
                return True
            await self._wakeups.wait(state)
        return False

    async def may_commit(self, lease: int) -> bool:
        """Whether rank 0 may commit a checkpoint; waits until the driver has recorded all earlier reports.

        So the driver can lack only rows since the last checkpoint, and the next checkpoint carries these.
        """
        while (state := self._leases.live(lease)) is not None and state.unrecorded:
            await self._wakeups.wait(state)
        return state is not None

    async def saved(self, trial: int, checkpoint: str, batches: int, value: float | None) -> None:
        """The trial has committed this checkpoint, or resumed from it. Accepted from an ended lease too."""
        self._leases.post(CheckpointSaved(trial=trial, checkpoint=checkpoint, batches=batches, value=value))

    async def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        """The trial has skipped a checkpoint."""
        self._leases.post(CheckpointDamaged(trial=trial, checkpoint=checkpoint, error=why))

    async def improves(self, lease: int, score: float) -> bool:
        """Whether ``score`` (smaller is better) is the best of the experiment so far; if so, it is recorded."""
        state = self._leases.live(lease)
        return state is not None and self._leases.improves(state, score)

    async def best(self) -> float | None:
        """The best score so far, smaller is better; None if there is none."""
        return self._leases.best()

    async def leave(self, lease: int, rank: int, departure: Departure) -> None:
        """This rank has left its trial."""
        grace_s = self._leases.leave(lease, rank, departure)
        if grace_s is not None:
            asyncio.get_running_loop().call_later(grace_s, self._leases.expire, lease)

    # ------------------------------------------------------------------ the Tune handle
    async def serve(self, process: int) -> list[TrialResult] | None:
        """All results that wait for a decision, one per trial; None when the search is over.

        ``process`` is the handle's process id; a new one gets all unanswered results again.
        """
        if self._results.attach(process):
            self._leases.post(HandleStarted(process=process))
        while self._results.is_current(process):
            if due := self._results.take():
                return due
            if self._is_search_over:
                break
            await self._wakeups.wait(RESULTS)
        return None

    async def import_path(self) -> str:
        """The directory from which this process, and any other on its machine, can import dray."""
        return str(Path(__file__).parents[2])

    # ------------------------------------------------------------------ the driver
    async def messages(self, recorded: dict[int, int]) -> list[Message]:
        """All that happened since the last call; waits until something has.

        ``recorded``: how many reports of each lease the driver has recorded since then.
        """
        self._leases.recorded(recorded)
        self._driver_waits = True
        while not self._leases.messages:
            await self._wakeups.wait(MESSAGES)
        mail, self._leases.messages = self._leases.messages, []
        self._driver_waits = False
        return mail

    async def enqueue(self, trials: list[int], *, first: bool = False) -> None:
        """Queue trials for a group, at the end or before all others."""
        self._leases.enqueue(trials, first=first)

    async def withdraw(self, trials: list[int]) -> None:
        """Take trials out of the queue: the search does not let them run now."""
        self._leases.withdraw(trials)

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

    async def retire_idle(self, groups: int) -> None:
        """End up to this number of idle groups."""
        self._leases.retire_idle(groups)

    async def answer(self, trial: int, number: int, decision: Decision) -> None:
        """The search's decision on a trial's result with this number."""
        self._results.answer(trial, number, decision)
        self._leases.decide(trial, number, decision)

    async def end_trial(self, trial: int, outcome: LeaseOutcome) -> None:
        """Tell the search, through Tune, that a trial has ended other than by its last report."""
        self._results.add(trial, outcome=outcome)

    async def set_best(self, score: float | None) -> None:
        """The best score so far (smaller is better), known from the journal."""
        self._leases.set_best(score)

    async def end_search(self) -> None:
        """The search, or the run, is over: end the handle and the free groups."""
        self._is_search_over = True
        self._wakeups.wake(RESULTS)
        await self.close()

    async def close(self) -> None:
        """Grant no more leases. Running trials save and leave, at their next report at the latest."""
        self._leases.close()
        self._wakeups.wake(CLOSED)

    async def is_quiet(self) -> bool:
        """Whether no lease is out, and the driver has read all messages and waits for the next."""
        return not self._leases.are_out and not self._leases.messages and self._driver_waits
