"""The desk: where worker groups ask for work, trials leave their reports, and the driver's decisions arrive.

The desk decides nothing itself. The driver decides everything: which trial exists, what its hyperparameters are, stop
or go on, restart or give up. The desk pairs a free group with the next trial of the queue, keeps one outstanding result
per trial until the driver has answered it, and fences off what comes from a lease that is over.

Four parties talk to it, each through the methods of its section below:

* the ranks of a worker group long-poll ``next_lease`` and run what they get;
* rank 0 of a lease reports, and asks before it commits a checkpoint; every rank says when it leaves;
* the Tune handle long-polls ``serve`` for results; if its process is killed, the next one gets them again;
* the driver enqueues trials, binds leases to parameters, answers results, and long-polls ``messages``.

The class knows nothing of Ray, so its tests are plain asyncio; ``dray.groups.group`` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.desk.failure import Failure
from dray.desk.messages import Decision, Message, Outcome, Result, Verdict
from dray.desk.results import Results
from dray.desk.state import Group, Lease
from dray.desk.wakeup import Signal

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
CAUSE_GRACE = 3
"""How many times as long after an error in a collective: Ray may take seconds to notice the death that caused it."""


class Desk:
    """The state of one experiment's leases. All methods run on one event loop; none blocks it."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._ended: set[int] = set()
        self._addresses: dict[int, asyncio.Future[tuple[str, int]]] = {}
        self._queue: deque[int] = deque()
        self._leases: dict[int, Lease] = {}
        self._lease_of: dict[int, int] = {}
        self._lease_numbers = itertools.count(1)
        self._results = Results()
        self._outbox: list[Message] = []
        self._mail, self._recorded = Signal(), Signal()
        self._listens = False
        self._closing = False
        self._best: float | None = None
        self._best_of = (-1, -1)  # the trial, and the lease

    # ------------------------------------------------------------------ worker groups
    async def arrived(self, group: str, node: str) -> None:
        """A process of this group runs, on this node (Ray's id); it has not imported torch yet."""
        self._post(Message(kind="arrived", group=group, node=node))

    async def address(self, start: int, mine: tuple[str, int] | None) -> tuple[str, int]:
        """Where the ranks of a group meet, host and port; rank 0 tells it, as ``mine``, and the others wait for it.

        Args:
            start: number of the group's start, unique in this run.
        """
        place = self._addresses.setdefault(start, asyncio.get_running_loop().create_future())
        if mine is not None:
            place.set_result(mine)
        return await place

    async def broken(self, group: str, cause: Exception) -> None:
        """A process of this group can't run any trial, and neither could another one in its place.

        Returns when the desk is closed.
        """
        self._post(Message(kind="broken", group=group, cause=cause, fatal=True))
        while not self._closing:
            await self._recorded.wait()

    async def next_lease(self, group: str, start: int, rank: int, size: int, after: int) -> dict[str, Any] | None:
        """The next lease's specification for this rank: what ``bind`` was given. None if its process is to end.

        Args:
            group: the group's name.
            start: number of the start that the process is of, unique in this run.
            rank, size: of the caller within its group.
            after: number of the last lease that this rank has served, 0 at first.
        """
        if start in self._ended:
            # Workers outlive a killed raylet by seconds: they may still end a trial, and ask for another.
            return None
        books = self._groups.setdefault(group, Group(name=group, start=start, size=size))
        books.idle.add(rank)
        if len(books.idle) == size and after == 0 and books.lease is None:
            self._post(Message(kind="joined", group=group))
        self._match()
        while True:
            lease = books.lease
            if lease is None and (self._closing or books.retires):
                return None
            if lease is not None and lease.number > after and lease.spec is not None:
                books.idle.discard(rank)
                return lease.spec
            await books.changed.wait()

    async def ended(self, group: str, start: int, dead: Mapping[int, str], error: str = "") -> None:
        """The processes of this group's start are gone, or will be at once. Told by whoever started them.

        Args:
            dead: the ranks whose processes died, each with the cause as far as Ray knows it, or "".
            error: why they could not serve trials; "" if they could.
        """
        self._ended.add(start)
        if (address := self._addresses.pop(start, None)) is not None:
            address.cancel()
        books = self._groups.get(group)
        if books is not None and books.start == start:
            del self._groups[group]
            books.retires = True
            if (lease := books.lease) is not None:
                if not lease.begun or (lease.leaves and not lease.told):
                    self._queue.appendleft(lease.trial)
                elif not lease.told:
                    # The other ranks know how far the trial came.
                    told, failure = books.death(dead, -1 if lease.hearsay is None else lease.hearsay[1].batches)
                    self._tell(lease, "errored", told, failure=failure, dead=tuple(sorted(dead)))
                self._end(lease)
            books.changed.fire()
        self._post(Message(kind="ended", group=group, start=start, dead=tuple(sorted(dead)), error=error))

    async def begun(self, lease: int) -> None:
        """Rank 0 has taken up the lease."""
        if (books := self._leases.get(lease)) is not None:
            books.begun = True

    async def report(self, lease: int, report: dict[str, Any], decides: bool) -> Verdict:
        """Take a report of rank 0. With ``decides`` the answer is the search's decision, and waits for it.

        ``report`` holds ``rows`` (metrics, for the driver's log), ``step`` and ``value`` (what the search ranks), and
        ``final`` (the trial has reached its length: recorded as its end, and not waited for).
        """
        books = self._live(lease)
        if books is None:
            return "fenced"
        books.unrecorded += 1
        self._post(Message(kind="rows", group=books.group, trial=books.trial, lease=lease, report=report))
        if not decides:
            return "interrupt" if self._closing else "continue"
        final = report["final"]
        number = self._results.add(
            books.trial, step=report["step"], value=report["value"], outcome="completed" if final else None
        )
        if final:
            books.told = True
            return "continue"
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        books.waiting[number] = verdict
        if self._closing:
            return "interrupt"
        return await verdict

    async def stop_wanted(self, lease: int) -> bool:
        """Wait until the lease is to end before its trial does (True), or has ended (False)."""
        while (books := self._live(lease)) is not None:
            if self._closing or books.leaves:
                return True
            await books.over.wait()
        return False

    async def may_commit(self, lease: int) -> bool:
        """Whether rank 0 may commit a checkpoint; waits until the driver has recorded all earlier reports.

        So the driver can lack only rows since the last checkpoint, and the next checkpoint carries these.
        """
        while (books := self._live(lease)) is not None and books.unrecorded:
            await self._recorded.wait()
        return books is not None

    async def saved(self, trial: int, checkpoint: str, batches: int, value: float | None) -> None:
        """The trial has committed this checkpoint, or found it to go on from. Accepted from an ended lease too."""
        self._post(Message(kind="saved", trial=trial, checkpoint=checkpoint, batches=batches, value=value))

    async def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        """The trial passes over a checkpoint."""
        self._post(Message(kind="damaged", trial=trial, checkpoint=checkpoint, error=why))

    async def improves(self, lease: int, score: float) -> bool:
        """Whether ``score`` (smaller is better) is the best of the experiment so far; if so, it is recorded.

        Also true for the best score again, if its trial reports it in a later lease: it was not saved in the earlier
        one, or the trial would have gone on from there.
        """
        books = self._live(lease)
        if books is None:
            return False
        trial, found_in = self._best_of
        again = score == self._best and trial == books.trial and found_in != lease
        if self._best is not None and score >= self._best and not again:
            return False
        self._best, self._best_of = score, (books.trial, lease)
        return True

    async def best(self) -> float | None:
        """The best score so far, smaller is better; None if there is none."""
        return self._best

    async def leave(
        self,
        lease: int,
        rank: int,
        outcome: Outcome,
        error: str = "",
        fatal: bool = False,
        *,
        failure: Failure | None = None,
        alone: bool = False,
        stale: str = "",
    ) -> None:
        """This rank has left its trial. The first outcome counts; an error ends the trial on the other ranks too.

        ``failure``: the error's kind. An error in a collective counts only if nobody tells its cause: the rank that
        failed first does, or Ray, if its process died.
        ``alone``: this rank was made to leave. The others do not know, and may wait for it for ever.
        ``stale``: why this rank's process should serve no other trial; the group is then started anew.
        """
        books = self._leases.get(lease)
        group = self._groups.get(books.group) if books is not None else None
        if books is None or group is None or group.lease is not books:
            return
        books.left[rank] = outcome
        books.stale = books.stale or stale
        failed = outcome in ("errored", "invalid_hp")
        if failure is not None and failure.kind == "collective":
            books.hearsay = books.hearsay or (error, failure)
        elif failed or rank == 0:
            self._tell(books, outcome, error, fatal=fatal, failure=failure)
        if len(books.left) == group.size:
            self._tell_hearsay(books)
            outcomes = set(books.left.values())
            # Ranks that did not all do the same may never get back in step in their process group.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                group.retires = True
            elif books.stale:
                group.retires = True
                self._post(Message(kind="retired", group=books.group, trial=books.trial, error=books.stale))
            if books.leaves and outcomes == {"interrupted"} and not self._closing:
                self._queue.appendleft(books.trial)
            self._end(books)
        elif failed or alone:
            grace_s = PEERS_GRACE_S if books.told or alone else CAUSE_GRACE * PEERS_GRACE_S
            asyncio.get_running_loop().call_later(grace_s, self._retire_unless_left, books, group)

    def _retire_unless_left(self, lease: Lease, group: Group) -> None:
        if group.lease is lease:
            self._tell_hearsay(lease)
            group.retires = True
            self._end(lease)

    def _tell_hearsay(self, lease: Lease) -> None:
        if lease.hearsay is not None:
            error, failure = lease.hearsay
            self._tell(lease, "errored", error, failure=failure)

    def _tell(
        self,
        lease: Lease,
        outcome: Outcome,
        error: str,
        *,
        fatal: bool = False,
        failure: Failure | None = None,
        dead: tuple[int, ...] = (),
    ) -> None:
        if not lease.told or outcome == "completed":
            lease.told = True
            self._post(
                Message(kind="left", group=lease.group, trial=lease.trial, lease=lease.number, outcome=outcome,
                        error=error, fatal=fatal, failure=failure, dead=dead)
            )  # fmt: skip

    def _end(self, lease: Lease) -> None:
        group = self._groups.get(lease.group)
        if group is not None and group.lease is lease:
            group.lease = None
        self._leases.pop(lease.number, None)
        lease.over.fire()
        if self._lease_of.get(lease.trial) == lease.number:
            del self._lease_of[lease.trial]
        for verdict in lease.waiting.values():
            if not verdict.done():
                verdict.set_result("fenced")
        if group is not None:
            group.changed.fire()
        self._recorded.fire()
        self._match()

    def _live(self, lease: int) -> Lease | None:
        books = self._leases.get(lease)
        return books if books is not None and self._lease_of.get(books.trial) == lease else None

    def _match(self) -> None:
        """Grant a lease for each free group while trials are queued."""
        if self._closing:
            return
        for name, group in self._groups.items():
            if group.is_free:
                trial = next((trial for trial in self._queue if not self._pauses(trial)), None)
                if trial is None:
                    return
                self._queue.remove(trial)
                lease = Lease(number=next(self._lease_numbers), trial=trial, group=name)
                self._leases[lease.number] = group.lease = lease
                self._lease_of[trial] = lease.number
                self._post(Message(kind="granted", group=name, trial=trial, lease=lease.number))

    def _pauses(self, trial: int) -> bool:
        """Whether the trial was told to pause and has not left its group yet: it goes on from what it saves there."""
        lease = self._leases.get(self._lease_of.get(trial, -1))
        return lease is not None and lease.pausing

    # ------------------------------------------------------------------ the Tune handle
    async def serve(self, process: int) -> list[Result] | None:
        """All results that wait for a decision, one per trial; None when the search is over.

        ``process`` is the handle's process id; a new one gets all that the driver has not answered again.
        """
        if self._results.is_new(process):
            self._post(Message(kind="handle", process=process))
        return await self._results.due(process)

    async def place(self) -> str:
        """Where this process, and any other on its machine, can import dray from."""
        return str(Path(__file__).parents[2])

    # ------------------------------------------------------------------ the driver
    async def messages(self, recorded: dict[int, int]) -> list[Message]:
        """All that happened since the last call; waits until something has.

        ``recorded``: how many reports of each lease the driver has recorded since then.
        """
        for number, count in recorded.items():
            if (lease := self._leases.get(number)) is not None:
                lease.unrecorded -= count
        self._recorded.fire()
        self._listens = True
        while not self._outbox:
            await self._mail.wait()
        mail, self._outbox = self._outbox, []
        self._listens = False
        return mail

    async def enqueue(self, trials: list[int], *, first: bool = False) -> None:
        """Queue trials for a group, at the end or before all others."""
        if first:
            self._queue.extendleft(reversed(trials))
        else:
            self._queue.extend(trials)
        self._match()

    async def bind(self, lease: int, spec: dict[str, Any]) -> None:
        """Give a granted lease its parameters, so that its group's ranks begin."""
        books = self._live(lease)
        if books is not None:
            books.spec = spec
            self._groups[books.group].changed.fire()

    async def drop(self, lease: int) -> None:
        """Take back a granted lease whose trial has ended meanwhile."""
        if (books := self._leases.get(lease)) is not None:
            self._end(books)

    async def vacate(self, group: str) -> None:
        """Have this group's trial save and go on in the next free group, and the group's processes end.

        For when one of its nodes is about to be taken away, or a group of another size is to take its place.
        """
        books = self._groups.get(group)
        if books is None or books.retires:
            return
        books.retires = True
        if (lease := books.lease) is not None:
            lease.leaves = True
            lease.over.fire()
            if not lease.begun:
                self._queue.appendleft(lease.trial)
                self._end(lease)
        books.changed.fire()

    async def spare(self, groups: int) -> None:
        """End up to this number of idle groups."""
        idle = [books for books in self._groups.values() if books.is_free]
        for books in [] if self._queue else idle[::-1][:groups]:
            books.retires = True
            books.changed.fire()

    async def answer(self, trial: int, number: int, decision: Decision) -> None:
        """The driver's decision on result ``number`` of a trial."""
        self._results.answered(trial, number, decision)
        lease = self._leases.get(self._lease_of.get(trial, -1))
        if lease is not None:
            verdict = lease.waiting.pop(number, None)
            if verdict is not None and not verdict.done():
                verdict.set_result(decision)
                lease.pausing = decision == "pause"
            elif verdict is None and decision == "pause":
                # It was restarted because its worker died with this report: it goes on when it is resumed, not now.
                self._end(lease)
        if decision != "continue":
            await self.withdraw([trial])

    async def withdraw(self, trials: list[int]) -> None:
        """Take trials out of the queue: the search does not let them run now."""
        for trial in trials:
            if trial in self._queue:
                self._queue.remove(trial)

    async def finish(self, trial: int, outcome: Outcome) -> None:
        """Tell the search, through Tune, that a trial has ended other than by its last report."""
        self._results.add(trial, outcome=outcome)

    async def set_best(self, score: float | None) -> None:
        """The best score so far (smaller is better), known from the journal."""
        self._best = score

    async def finished(self) -> None:
        """The search, or the run, is over: end the handle and the free groups."""
        self._results.finish()
        await self.close()

    async def close(self) -> None:
        """Lend no more. Running trials are told to stop at their next report, and to save."""
        self._closing = True
        for lease in [lease for lease in self._leases.values() if not lease.begun]:
            self._end(lease)
        for lease in self._leases.values():
            lease.over.fire()
            for verdict in lease.waiting.values():
                if not verdict.done():
                    verdict.set_result("interrupt")
        for group in self._groups.values():
            group.changed.fire()
        self._recorded.fire()

    async def quiet(self) -> bool:
        """Whether no lease is out, and the driver has got all messages and waits for the next."""
        return not self._leases and not self._outbox and self._listens

    def _post(self, message: Message) -> None:
        self._outbox.append(message)
        self._mail.fire()
