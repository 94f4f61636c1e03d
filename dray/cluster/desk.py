"""The desk: where worker groups ask for work, trials leave their reports, and the driver's decisions arrive.

A mailbox with books, and no judgement. Everything that is decided (which trial exists, what its hyperparameters are,
stop or go on, restart or give up) is decided by the driver; the desk pairs a free group with the next trial of the
queue, keeps one outstanding result per trial until the driver has answered it, and fences what comes from a lease that
is over.

Four parties talk to it, each through the methods of its section below:

* the ranks of a worker group long-poll ``next_lease`` and run what they get;
* rank 0 of a lease reports, asks before it commits a checkpoint, and every rank says when it leaves;
* the Tune handle long-polls ``serve`` for results; when its process is killed, the next is handed them again;
* the driver enqueues trials, binds leases to parameters, answers results, and long-polls ``messages``.

The class knows nothing of Ray, so its tests are plain asyncio; ``dray.cluster.lending`` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dray.cluster.failure import LOW_MEMORY, Failure
from dray.cluster.messages import Decision, Message, Outcome, Result, Verdict

PEERS_GRACE_S = 5.0
"""How long the other ranks of a group may take to leave a lease after one rank left it with an error."""
PICK_UP_S = 10.0
"""How long the ranks of a free group may take to begin a lease before they are held to be dead."""
OUT_OF_STEP = "its ranks are no longer in step"
OTHERS = "others are in their place"
VACATED = "what it ran goes on elsewhere"
SPARE = "there are more groups than trials"


class Signal:
    """Wakes every coroutine that waits, again and again."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(slots=True, kw_only=True)
class _Lease:
    number: int
    trial: int
    group: str
    spec: dict[str, Any] | None = None
    begun: bool = False
    pausing: bool = False
    left: dict[int, Outcome] = field(default_factory=dict)
    told: bool = False
    hearsay: str = ""
    failure: Failure | None = None
    stale: str = ""
    leaves: bool = False
    """A node of its group is about to be taken away."""
    over: Signal = field(default_factory=Signal)
    """It is to end, or has ended."""
    unrecorded: int = 0
    waiting: dict[int, asyncio.Future[Verdict]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Group:
    incarnation: str
    size: int
    idle: set[int] = field(default_factory=set)
    lease: _Lease | None = None
    retire: str = ""
    """Why its processes serve no other trial."""
    replaced: bool = False
    """On purpose: the driver has been told."""
    changed: Signal = field(default_factory=Signal)


class Desk:
    """The books of one experiment. All methods run on one event loop; none blocks it."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._replaced: set[str] = set()
        self._queue: deque[int] = deque()
        self._leases: dict[int, _Lease] = {}
        self._lease_of: dict[int, int] = {}
        self._lease_numbers = itertools.count(1)
        self._results: dict[int, deque[Result]] = {}
        self._result_numbers = itertools.count(1)
        self._due: list[Result] = []  # the first of each trial, in order, that the handle has not been given
        self._handle = -1  # its process
        self._outbox: list[Message] = []
        self._mail, self._news, self._recorded = Signal(), Signal(), Signal()
        self._listens = False
        self._closing = False
        self._finished = False
        self._best: float | None = None
        self._best_of = (-1, -1)  # the trial, and the lease
        self._deaths: dict[str, str] = {}
        self._kills: dict[tuple[str, str], int] = {}

    # ------------------------------------------------------------------ worker groups
    async def arrived(self, group: str, placement: Any, oom_kills: tuple[str, int] = ("", 0)) -> None:
        """A process of this group runs, on resources of this placement group; it has yet to import torch.

        ``oom_kills``: its node, and how many processes the kernel has killed there for their memory.
        """
        node, kills = oom_kills
        if kills > self._kills.setdefault((group, node), kills):
            self._kills[group, node] = kills
            self._deaths.setdefault(
                group, f"meanwhile the kernel has killed a process of {node}, which was {LOW_MEMORY}"
            )
        self._post(Message(kind="arrived", group=group, placement=placement))

    async def died(self, group: str, told: str) -> None:
        """What Ray tells of a process of this group that has died; the group's next processes are not up yet."""
        self._deaths[group] = told

    async def broken(self, group: str, cause: Exception) -> None:
        """A process of this group can't run any trial, and another one in its place couldn't either.

        Returns when the desk is closed.
        """
        self._post(Message(kind="broken", group=group, cause=cause, fatal=True))
        while not self._closing:
            await self._recorded.wait()

    async def next_lease(self, group: str, incarnation: str, rank: int, size: int, after: int) -> dict[str, Any] | None:
        """The next lease's specification for this rank; None when there is no more work.

        Args:
            group: the group's name.
            incarnation: changes whenever Ray Train has built the group's processes anew. A new one ends the lease of
                the one before.
            rank, size: of the caller within its group.
            after: number of the last lease that this rank has served, 0 at first.

        Returns:
            What ``bind`` was given, or ``{"retire": why}``: these processes can't be used again, end them by an error.
        """
        if incarnation in self._replaced:
            # Workers outlive a raylet that was killed by seconds: they may still end a trial, and ask for another.
            return {"retire": OTHERS}
        books = self._groups.get(group)
        if books is None or books.incarnation != incarnation:
            if books is not None:
                self._lose(group, books)
            books = self._groups[group] = _Group(incarnation=incarnation, size=size)
        books.idle.add(rank)
        if len(books.idle) == size and after == 0 and books.lease is None:
            self._post(Message(kind="joined", group=group))
        self._match()
        while True:
            if self._closing:
                return None
            if books.retire:
                return {"retire": books.retire}
            if self._groups.get(group) is not books:
                return {"retire": OTHERS}
            lease = books.lease
            if lease is not None and lease.number > after and lease.spec is not None:
                books.idle.discard(rank)
                return lease.spec
            await books.changed.wait()

    async def begun(self, lease: int) -> None:
        """Rank 0 has taken up the lease."""
        if (books := self._leases.get(lease)) is not None:
            books.begun = True

    async def report(self, lease: int, report: dict[str, Any], decides: bool) -> Verdict:
        """Take a report of rank 0. With ``decides`` the answer is the search's decision, and takes as long as that.

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
        result = Result(
            number=next(self._result_numbers),
            trial=books.trial,
            step=report["step"],
            value=report["value"],
            outcome="completed" if report["final"] else None,
        )
        if result.outcome:
            books.told = True
            self._hand_over(result)
            return "continue"
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        books.waiting[result.number] = verdict
        self._hand_over(result)
        if self._closing:
            return "interrupt"
        return await verdict

    async def stop_wanted(self, lease: int) -> bool:
        """Waits until the lease is to end before its trial does (True), or has ended (False)."""
        while (books := self._live(lease)) is not None:
            if self._closing or books.leaves:
                return True
            await books.over.wait()
        return False

    async def may_commit(self, lease: int) -> bool:
        """Whether rank 0 may commit a checkpoint; waits until the driver has recorded all it reported before.

        So at most the rows since the last checkpoint can be unknown to the driver, and those the checkpoint carries.
        """
        while (books := self._live(lease)) is not None and books.unrecorded:
            await self._recorded.wait()
        return books is not None

    async def saved(self, trial: int, checkpoint: str, batches: int, value: float | None) -> None:
        """The trial has committed a checkpoint, or found this one to go on from; also of a lease that is over."""
        self._post(Message(kind="saved", trial=trial, checkpoint=checkpoint, batches=batches, value=value))

    async def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        """The trial passes over a checkpoint."""
        self._post(Message(kind="damaged", trial=trial, checkpoint=checkpoint, error=why))

    async def improves(self, lease: int, score: float) -> bool:
        """Whether ``score`` (smaller is better) is the best of the experiment so far, which it then is.

        So is the best itself, if its trial comes with it in a later lease: in the one that it was found in there was no
        time to save it, or the trial would have gone on from there.
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
        second_hand: bool = False,
        alone: bool = False,
        stale: str = "",
    ) -> None:
        """This rank has left its trial. The first word on it counts; an error ends the trial of the other ranks too.

        ``failure``: what the error is.
        ``second_hand``: the error is that of another rank, whose own word on it is better.
        ``alone``: this rank was made to leave, and the others do not know of it: they may wait for it for ever.
        ``stale``: why this rank's process should serve no other trial; the group is then started anew.
        """
        books = self._leases.get(lease)
        group = self._groups.get(books.group) if books is not None else None
        if books is None or group is None or group.lease is not books:
            return
        books.left[rank] = outcome
        books.stale = books.stale or stale
        failed = outcome in ("errored", "invalid_hp")
        if second_hand:
            books.hearsay, books.failure = error, failure
        elif failed or rank == 0:
            self._tell(books, outcome, error, fatal, failure)
        if len(books.left) == group.size:
            if books.hearsay:
                self._tell(books, "errored", books.hearsay, fatal=False, failure=books.failure)
            outcomes = set(books.left.values())
            # A process group whose ranks did not all do the same may be out of step for ever.
            if ("errored" in outcomes and group.size > 1) or len(outcomes) > 1:
                group.retire = OUT_OF_STEP
            elif books.stale:
                group.retire, group.replaced = books.stale, True
                self._post(Message(kind="retired", group=books.group, trial=books.trial, error=books.stale))
            if books.leaves and outcomes == {"interrupted"} and not self._closing:
                self._queue.appendleft(books.trial)
            self._end(books)
        elif failed or alone:
            asyncio.get_running_loop().call_later(PEERS_GRACE_S, self._retire_unless_left, books, group)

    def _retire_unless_left(self, lease: _Lease, group: _Group) -> None:
        if group.lease is lease:
            if lease.hearsay:
                self._tell(lease, "errored", lease.hearsay, fatal=False, failure=lease.failure)
            group.retire = OUT_OF_STEP
            self._end(lease)

    def _revoke_unless_begun(self, lease: _Lease) -> None:
        # Processes that died while they were idle: nobody tells us, and the trial need not wait for their successors.
        if not lease.begun and self._leases.get(lease.number) is lease:
            if lease.group in self._groups:
                self._groups[lease.group].retire = "they were idle, and did not answer"
            self._queue.appendleft(lease.trial)
            self._end(lease)

    def _tell(self, lease: _Lease, outcome: Outcome, error: str, fatal: bool, failure: Failure | None = None) -> None:
        if not lease.told or outcome == "completed":
            lease.told = True
            self._post(
                Message(kind="left", group=lease.group, trial=lease.trial, lease=lease.number, outcome=outcome,
                        error=error, fatal=fatal, failure=failure)
            )  # fmt: skip

    def _lose(self, name: str, group: _Group) -> None:
        """The processes of ``group`` are gone."""
        lease, told = group.lease, self._deaths.pop(name, "")
        group.retire = OTHERS
        self._replaced.add(group.incarnation)
        if not group.replaced:
            self._post(Message(kind="lost", group=name))
        if lease is not None:
            if not lease.begun or (lease.leaves and not lease.told):
                self._queue.appendleft(lease.trial)
            elif not lease.told:
                kind: Literal["oom", "died"] = "oom" if LOW_MEMORY in told else "died"
                error = f"a process of worker group {name} died{f': {told}' if told else ''}"
                self._tell(lease, "errored", error, False, Failure(kind=kind))
            self._end(lease)
        group.changed.fire()

    def _end(self, lease: _Lease) -> None:
        group = self._groups.get(lease.group)
        if group is not None and group.lease is lease:
            group.lease = None
        self._leases.pop(lease.number, None)
        if lease.leaves:
            self._post(Message(kind="vacated", group=lease.group))
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

    def _live(self, lease: int) -> _Lease | None:
        books = self._leases.get(lease)
        return books if books is not None and self._lease_of.get(books.trial) == lease else None

    def _match(self) -> None:
        """Grant a lease for each free group while trials are queued."""
        if self._closing:
            return
        for name, group in self._groups.items():
            if group.lease is None and not group.retire and len(group.idle) == group.size:
                trial = next((trial for trial in self._queue if not self._pauses(trial)), None)
                if trial is None:
                    return
                self._queue.remove(trial)
                lease = _Lease(number=next(self._lease_numbers), trial=trial, group=name)
                self._leases[lease.number] = group.lease = lease
                self._lease_of[trial] = lease.number
                self._post(Message(kind="granted", group=name, trial=trial, lease=lease.number))

    def _pauses(self, trial: int) -> bool:
        """Whether the trial is still in a group, which it was told to leave: what it saves there, it goes on from."""
        lease = self._leases.get(self._lease_of.get(trial, -1))
        return lease is not None and lease.pausing

    # ------------------------------------------------------------------ the Tune handle
    async def serve(self, process: int) -> list[Result] | None:
        """All results that wait to be decided on, of each trial one; None when the search is over.

        ``process`` is the handle's; another one than before gets again what the driver has not answered.
        """
        if process != self._handle:
            self._handle = process
            self._due = sorted((mine[0] for mine in self._results.values() if mine), key=lambda result: result.number)
            self._post(Message(kind="handle", process=process))
            self._news.fire()
        while process == self._handle and not self._due and not self._finished:
            await self._news.wait()
        if process != self._handle:  # it has died, and this call of it has not
            return None
        due, self._due = self._due, []
        return due or None

    async def place(self) -> str:
        """Where this process, and so any other of its machine, can import dray from."""
        return str(Path(__file__).parents[2])

    def _hand_over(self, result: Result) -> None:
        mine = self._results.setdefault(result.trial, deque())
        mine.append(result)
        if len(mine) == 1:  # the others wait for its answer
            self._is_due(result)

    def _is_due(self, result: Result) -> None:
        self._due.append(result)
        self._news.fire()

    # ------------------------------------------------------------------ the driver
    async def messages(self, recorded: dict[int, int]) -> list[Message]:
        """All that happened since the last call; waits until something has.

        ``recorded``: how many reports the driver has recorded since then, by lease.
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
        """Give a granted lease its parameters; its group's ranks begin."""
        books = self._live(lease)
        if books is not None:
            books.spec = spec
            self._groups[books.group].changed.fire()
            asyncio.get_running_loop().call_later(PICK_UP_S, self._revoke_unless_begun, books)

    async def drop(self, lease: int) -> None:
        """Take back a granted lease: its trial has ended meanwhile."""
        if (books := self._leases.get(lease)) is not None:
            self._end(books)

    async def vacate(self, group: str) -> None:
        """This group's trial saves, and goes on in the next free one; the processes are used no more.

        For a node of it is about to be taken away, or a group of another size is to take its place. The driver is told
        when it is "vacated".
        """
        books = self._groups.get(group)
        if books is None or books.retire:
            return
        books.retire, books.replaced = VACATED, True
        if (lease := books.lease) is None:
            self._post(Message(kind="vacated", group=group))
        else:
            lease.leaves = True
            lease.over.fire()
            if not lease.begun:
                self._queue.appendleft(lease.trial)
                self._end(lease)
        books.changed.fire()

    async def spare(self, groups: int) -> None:
        """Lend no more to so many groups, if so many have nothing to do; the driver is told which."""
        idle = [
            name
            for name, books in self._groups.items()
            if books.lease is None and not books.retire and len(books.idle) == books.size
        ]
        for name in [] if self._queue else idle[::-1][:groups]:
            # Its ranks wait on until the driver ends them: told to end, they would be started anew.
            self._groups[name].retire, self._groups[name].replaced = SPARE, True
            self._post(Message(kind="spare", group=name))

    async def dismiss(self, group: str) -> None:
        """This group is no more; what it was lent is given back."""
        if (books := self._groups.pop(group, None)) is not None:
            self._lose(group, books)

    async def answer(self, trial: int, number: int, decision: Decision) -> None:
        """The driver's decision on result ``number`` of a trial."""
        results = self._results.get(trial, deque())
        while results and results[0].number <= number:
            results.popleft()
        if decision == "stop" or not results:
            self._results.pop(trial, None)
        else:
            self._is_due(results[0])
        lease = self._leases.get(self._lease_of.get(trial, -1))
        if lease is not None:
            verdict = lease.waiting.pop(number, None)
            if verdict is not None and not verdict.done():
                verdict.set_result(decision)
                lease.pausing = decision == "pause"
            elif verdict is None and decision == "pause":
                # Restarted after its worker had died with this report: it is to go on when it is resumed, not now.
                self._end(lease)
        if decision != "continue":
            await self.withdraw([trial])

    async def withdraw(self, trials: list[int]) -> None:
        """Take trials out of the queue: the search lets none of them run now."""
        for trial in trials:
            if trial in self._queue:
                self._queue.remove(trial)

    async def finish(self, trial: int, outcome: Outcome) -> None:
        """Tell the search, through Tune, that a trial has ended otherwise than by its last report."""
        self._hand_over(Result(number=next(self._result_numbers), trial=trial, outcome=outcome))

    async def set_best(self, score: float | None) -> None:
        """The best score so far (smaller is better), known from the journal."""
        self._best = score

    async def finished(self) -> None:
        """The search is over, or the run is: the handle is sent home, free groups too."""
        self._finished = True
        self._news.fire()
        await self.close()

    async def close(self) -> None:
        """Lend no more. Running trials are told to stop at their next report, and save what they have."""
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
        """No lease is out, and the driver has all messages: it waits for the next."""
        return not self._leases and not self._outbox and self._listens

    def _post(self, message: Message) -> None:
        self._outbox.append(message)
        self._mail.fire()
