"""The desk without Ray: its parties are coroutines here. What it decides is tested in test_leases.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from dray.desk import leases
from dray.desk.desk import Desk
from dray.desk.messages import (
    Departure,
    DeskReport,
    GroupEnded,
    GroupReady,
    HandleStarted,
    LeaseGranted,
    Message,
    ReportReceived,
    TrialLeft,
    WorkerUnfit,
)
from dray.desk.results import TrialResult

REPORT = DeskReport(step=1, value=0.5)
FINAL = DeskReport(step=4, value=0.25, final=True)


def scene(play: Any) -> Any:
    """Run a coroutine function that takes a new desk, with a limit on its time."""
    return asyncio.run(asyncio.wait_for(play(Desk("run")), 30))


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def mail(desk: Desk) -> list[Message]:
    """Messages for the driver since the last call; [] if there are none."""
    await settle()
    reads = task(desk.messages("run", {}))
    await settle()
    if reads.done():
        return list(reads.result())
    reads.cancel()
    return []


async def grant(desk: Desk) -> LeaseGranted:
    [granted] = [message for message in await mail(desk) if isinstance(message, LeaseGranted)]
    await desk.bind(granted.lease, {"number": granted.lease})
    return granted


async def lend(desk: Desk, trial: int, *, group: str = "g", size: int = 1, after: int = 0) -> int:
    """Have the ranks of a group take up a trial; the lease's number."""
    ranks = [task(desk.next_lease("run", group, 1, rank, size, after)) for rank in range(size)]
    await desk.enqueue("run", [trial])
    granted = await grant(desk)
    assert granted.trial == trial
    for rank in ranks:
        assert await rank == {"number": granted.lease}
    await desk.begun(granted.lease)
    return granted.lease


async def report(desk: Desk, lease: int, fields: Any) -> asyncio.Task[Any]:
    """Have a trial send a report for the search, which the driver records."""
    sent = task(desk.report(lease, fields, True))
    await settle()
    recorded = task(desk.messages("run", {lease: 1}))
    await settle()
    recorded.cancel()
    return sent


# ------------------------------------------------------------------------------------------------------ worker groups
def test_ranks_wait_for_a_trial_and_its_parameters() -> None:
    async def play(desk: Desk) -> None:
        ranks = [task(desk.next_lease("run", "g", 1, rank, 2, 0)) for rank in range(2)]
        assert [type(message) for message in await mail(desk)] == [GroupReady]
        await desk.enqueue("run", [0])
        await settle()
        assert not any(rank.done() for rank in ranks)
        await grant(desk)
        assert [await rank for rank in ranks] == [{"number": 1}] * 2

    scene(play)


def test_a_lease_taken_back_leaves_its_group_free_for_the_next_trial() -> None:
    async def play(desk: Desk) -> None:
        rank = task(desk.next_lease("run", "g", 1, 0, 1, 0))
        await settle()
        await desk.enqueue("run", [3, 4])
        await desk.drop(1)
        await desk.bind(2, {"number": 2})
        assert await rank == {"number": 2}

    scene(play)


def test_ranks_of_a_drained_group_end_when_the_last_has_left_its_trial() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        wanted = task(desk.stop_wanted(lease))
        await settle()
        assert not wanted.done()
        await desk.drain_group("g")
        assert await wanted
        await desk.leave(lease, 0, Departure(outcome="interrupted"))
        first = task(desk.next_lease("run", "g", 1, 0, 2, lease))
        await settle()
        assert not first.done(), "the other may still need it"
        await desk.leave(lease, 1, Departure(outcome="interrupted"))
        assert await first is None
        assert await desk.next_lease("run", "g", 1, 1, 2, lease) is None

    scene(play)


def test_an_idle_rank_ends_when_its_group_is_retired_or_has_ended() -> None:
    async def play(desk: Desk) -> None:
        retired, ended = task(desk.next_lease("run", "g", 1, 0, 1, 0)), task(desk.next_lease("run", "h", 2, 0, 1, 0))
        await settle()
        await desk.group_ended("run", "h", 2, {})
        assert await ended is None
        await desk.retire_idle("run", 1)
        assert await retired is None

    scene(play)


def test_a_rank_whose_peer_hangs_ends_after_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PEERS_GRACE_S", 0.05)

    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.leave(lease, 1, Departure(outcome="errored", error="boom"))
        assert [(m.outcome, m.error) for m in await mail(desk) if isinstance(m, TrialLeft)] == [("errored", "boom")]
        # Rank 0 hangs in a collective operation: the processes of both end.
        assert await desk.next_lease("run", "g", 1, 1, 2, lease) is None

    scene(play)


def test_ranks_of_a_group_meet_at_the_address_of_the_first() -> None:
    async def play(desk: Desk) -> None:
        second, of_others = task(desk.address(1, None)), task(desk.address(2, None))
        await settle()
        assert not second.done()
        assert await desk.address(1, ("10.0.0.7", 4242)) == await second == ("10.0.0.7", 4242)
        assert not of_others.done()
        await desk.group_ended("run", "g", 2, {0: ""})
        with pytest.raises(asyncio.CancelledError):
            await of_others

    scene(play)


def test_an_unfit_process_says_why_and_waits_for_the_end_of_the_run() -> None:
    async def play(desk: Desk) -> None:
        cause = ValueError("no data here")
        broken = task(desk.broken("run", "g", cause))
        [message] = await mail(desk)
        assert isinstance(message, WorkerUnfit)
        assert (message.group, message.cause) == ("g", cause)
        assert not broken.done()
        await desk.close("run")
        await broken

    scene(play)


# ------------------------------------------------------------------------------------------------------------- trials
def test_a_report_that_decides_waits_for_the_searchs_answer() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        sent = await report(desk, lease, REPORT)
        assert await desk.serve("run", 100) == [TrialResult(number=1, trial=3, step=1, value=0.5)]
        assert not sent.done()
        await desk.answer("run", 3, 1, "continue")
        assert await sent == "continue"
        handle, sent = task(desk.serve("run", 100)), await report(desk, lease, REPORT)
        assert [result.number for result in await handle] == [2]
        await desk.answer("run", 3, 2, "stop")
        assert await sent == "stop"

    scene(play)


def test_the_search_hears_of_a_report_and_of_what_follows_once_the_driver_has_recorded_it() -> None:
    async def play(desk: Desk) -> None:
        handle, lease = task(desk.serve("run", 100)), await lend(desk, 3)
        task(desk.report(lease, REPORT, True))
        await settle()
        await desk.group_ended("run", "g", 1, {0: ""})
        assert any(isinstance(message, ReportReceived) for message in await mail(desk))
        ended = task(desk.end_trial("run", 3, "errored"))  # Ray may run this call of the driver before the next
        await settle()
        assert not handle.done(), "a driver that is killed now has lost the metrics"
        driver = task(desk.messages("run", {lease: 1}))
        assert await handle == [TrialResult(number=1, trial=3, step=1, value=0.5)]
        await desk.answer("run", 3, 1, "continue")
        await ended
        assert await desk.serve("run", 100) == [TrialResult(number=2, trial=3, outcome="errored")]
        driver.cancel()

    scene(play)


def test_the_final_report_ends_the_trial_without_waiting() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        assert await (await report(desk, lease, FINAL)) == "continue"
        await desk.leave(lease, 0, Departure(outcome="completed"))
        assert await desk.serve("run", 100) == [TrialResult(number=1, trial=3, step=4, value=0.25, outcome="completed")]

    scene(play)


def test_a_worker_lost_while_it_waits_is_released_and_the_decision_still_counts() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        sent = task(desk.report(lease, REPORT, True))
        await settle()
        await desk.group_ended("run", "g", 1, {0: ""})
        driver = task(desk.messages("run", {lease: 1}))
        assert await sent == "fenced"
        driver.cancel()
        assert await desk.report(lease, REPORT, True) == "fenced"
        assert not await desk.may_commit(lease)
        assert not await desk.improves(lease, 0.0)
        assert [result.trial for result in await desk.serve("run", 100) or []] == [3]

    scene(play)


def test_a_paused_trial_leaves_its_group_to_the_next_and_continues_when_queued_again() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        sent = await report(desk, lease, REPORT)
        await desk.answer("run", 3, 1, "pause")
        assert await sent == "pause"
        await desk.leave(lease, 0, Departure(outcome="paused"))
        other = await lend(desk, 4, after=lease)
        await desk.enqueue("run", [3], first=True)
        await desk.leave(other, 0, Departure(outcome="completed"))
        again = task(desk.next_lease("run", "g", 1, 0, 1, other))
        granted = await grant(desk)
        assert granted.trial == 3
        assert await again == {"number": granted.lease}
        await report(desk, granted.lease, REPORT)
        assert [result.number for result in await desk.serve("run", 7) or []] == [2]

    scene(play)


def test_a_checkpoint_is_committed_only_after_the_driver_has_recorded_all_earlier_reports() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.report(lease, REPORT, False)
        allowed = task(desk.may_commit(lease))
        await settle()
        assert not allowed.done()
        task(desk.messages("run", {lease: 1}))
        assert await allowed

    scene(play)


def test_a_rank_learns_at_once_that_the_run_or_its_lease_ends() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        wanted = task(desk.stop_wanted(lease))
        await settle()
        await desk.leave(lease, 0, Departure(outcome="completed"))
        assert not await wanted
        lease = await lend(desk, 4, after=lease)
        wanted = task(desk.stop_wanted(lease))
        await settle()
        await desk.close("run")
        assert await wanted

    scene(play)


def test_closing_interrupts_those_who_wait_and_grants_no_more() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        waiting, idle = await report(desk, lease, REPORT), task(desk.next_lease("run", "other", 1, 0, 1, 0))
        await desk.enqueue("run", [4])
        await settle()
        await desk.close("run")
        assert await waiting == "interrupt"
        assert await desk.report(lease, REPORT, False) == "interrupt"
        await desk.messages("run", {})
        driver = task(desk.messages("run", {}))
        await settle()
        assert not await desk.is_quiet("run")  # trial 3 is out
        await desk.leave(lease, 0, Departure(outcome="interrupted"))
        assert await desk.next_lease("run", "g", 1, 0, 1, lease) is None
        assert await idle is None
        assert [type(message) for message in await driver] == [TrialLeft]
        assert not await desk.is_quiet("run"), "the last messages may not have reached the driver"
        driver = task(desk.messages("run", {}))
        await settle()
        assert await desk.is_quiet("run")

    scene(play)


# ------------------------------------------------------------------------------------------------------- Tune's handle
def test_the_handle_gets_each_waiting_result_once_and_those_of_a_trial_one_after_another() -> None:
    async def play(desk: Desk) -> None:
        for trial, group in ((3, "g"), (4, "h")):
            await report(desk, await lend(desk, trial, group=group), REPORT)
        await desk.end_trial("run", 3, "errored")
        assert [(r.trial, r.number) for r in await desk.serve("run", 100) or []] == [(3, 1), (4, 2)]
        more = task(desk.serve("run", 100))
        await settle()
        assert not more.done()
        await desk.answer("run", 4, 2, "continue")
        await settle()
        assert not more.done()
        await desk.answer("run", 3, 1, "continue")
        assert await more == [TrialResult(number=3, trial=3, outcome="errored")]

    scene(play)


def test_later_results_of_a_stopped_trial_are_dropped() -> None:
    async def play(desk: Desk) -> None:
        await report(desk, await lend(desk, 3), REPORT)
        await desk.end_trial("run", 3, "errored")
        await desk.serve("run", 100)
        more = task(desk.serve("run", 100))
        await desk.answer("run", 3, 1, "stop")
        await settle()
        assert not more.done()

    scene(play)


def test_a_new_handle_gets_unanswered_results_again() -> None:
    async def play(desk: Desk) -> None:
        sent = await report(desk, await lend(desk, 3), REPORT)
        first = await desk.serve("run", 100)
        # Its process has died in a call, which takes what comes before another process asks.
        dead = task(desk.serve("run", 100))
        await settle()
        await report(desk, await lend(desk, 4, group="h"), REPORT)
        assert [result.trial for result in await dead] == [4]
        dead = task(desk.serve("run", 100))
        await settle()
        again = await desk.serve("run", 101)
        assert await dead is None
        assert again is not None
        assert again[:1] == first
        assert [result.trial for result in again] == [3, 4]
        assert [message.process for message in await mail(desk) if isinstance(message, HandleStarted)] == [101]
        await desk.answer("run", 3, 1, "continue")
        assert await sent == "continue"

    scene(play)


def test_the_handle_ends_with_the_search() -> None:
    async def play(desk: Desk) -> None:
        await report(desk, await lend(desk, 3), REPORT)
        await desk.serve("run", 100)
        await desk.answer("run", 3, 1, "continue")
        waiting = task(desk.serve("run", 100))
        await settle()
        assert not waiting.done()
        await desk.end_search("run")
        assert await waiting is None

    scene(play)


# -------------------------------------------------------------------------------------------- several clients
async def lend_to_other(desk: Desk) -> None:
    """A second client, "other", trains its trial 3 in a group of the first, by lease 1."""
    await desk.add("other", b"spec")
    await desk.enqueue("other", [3])
    task(desk.next_lease("run", "g", 1, 0, 1, 0))
    await settle()
    await desk.begun(1)


def test_a_handle_may_ask_before_its_client_is_there() -> None:
    async def play(desk: Desk) -> None:
        early, unknown = task(desk.serve("job", 100)), task(desk.serve("another job", 101))
        await settle()
        await desk.add("other", b"spec", handle="job")
        await desk.end_trial("other", 3, "errored")
        assert await early == [TrialResult(number=1, trial=3, outcome="errored")]
        assert not unknown.done()
        unknown.cancel()
        await desk.remove("other")
        await desk.add("again", b"spec", handle="job")  # by a driver that starts over, with the same handle
        await desk.end_trial("again", 4, "errored")
        assert await desk.serve("job", 100) == [TrialResult(number=1, trial=4, outcome="errored")]

    scene(play)


def test_a_client_is_removed_once_its_trials_have_left() -> None:
    async def play(desk: Desk) -> None:
        await lend_to_other(desk)
        removed = task(desk.remove("other"))
        await settle()
        assert await desk.stop_wanted(1), "it is to save and leave"
        assert not removed.done()
        await desk.leave(1, 0, Departure(outcome="interrupted"))
        await removed
        assert await desk.demands({}) == []
        await desk.remove("other")  # again, by whoever else saw its end

    scene(play)


def test_a_trial_whose_driver_has_died_commits_nothing_that_goes_beyond_the_records() -> None:
    async def play(desk: Desk) -> None:
        await lend_to_other(desk)
        await desk.report(1, REPORT, False)
        waits = task(desk.may_commit(1))
        await settle()
        assert not waits.done()
        removed = task(desk.remove("other"))
        assert not await waits
        await desk.leave(1, 0, Departure(outcome="interrupted"))
        await removed

    scene(play)


def test_a_trial_that_does_not_leave_its_removed_client_in_time_is_evicted() -> None:
    async def play(desk: Desk) -> None:
        await lend_to_other(desk)
        await desk.remove("other", within_s=0.05)
        assert not await desk.may_commit(1)
        assert [message.group for message in await mail(desk) if isinstance(message, GroupEnded)] == ["g"]

    scene(play)


def test_a_share_that_is_set_counts_for_the_next_lease() -> None:
    async def play(desk: Desk) -> None:
        for name in ("a", "b"):
            await desk.add(name, b"spec")
        await desk.enqueue("a", [1])
        await desk.enqueue("b", [2])
        await desk.set_share("b", 1, 1.0, None)
        await desk.set_share("gone", 1, 1.0, None)
        task(desk.next_lease("run", "g", 1, 0, 1, 0))
        await settle()
        assert {demand.claim.name: demand.has for demand in await desk.demands({})} == {"a": 0, "b": 1}

    scene(play)


def test_all_clients_of_a_shape_hear_that_no_group_of_it_can_run_trials() -> None:
    async def play(desk: Desk) -> None:
        for name, shape in (("a", "x"), ("b", "y")):
            await desk.add(name, b"spec", shape=shape)
        await desk.unfit("x", ImportError("no torch"))
        reads = {name: task(desk.messages(name, {})) for name in "ab"}
        await settle()
        [message] = reads["a"].result()
        assert str(message.cause) == "no torch"
        assert not reads["b"].done()
        reads["b"].cancel()

    scene(play)
