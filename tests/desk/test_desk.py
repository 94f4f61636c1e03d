"""The desk without Ray: its parties are coroutines here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from dray.desk import desk as desk_module
from dray.desk.desk import Desk
from dray.desk.failure import Failure, FailureKind
from dray.desk.messages import Message, Result

REPORT = {"rows": [], "step": 1, "value": 0.5, "final": False}
COLLECTIVE = Failure(kind="collective", where="RuntimeError at model.py:3 in train_batch", batches=6)
FINAL = {"rows": [], "step": 4, "value": 0.25, "final": True}


def scene(play: Any) -> Any:
    """Run a coroutine function that takes a new desk, with a limit on its time."""
    return asyncio.run(asyncio.wait_for(play(Desk()), 30))


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def mail(desk: Desk) -> list[Message]:
    await settle()
    return await desk.messages({}) if desk._outbox else []


def kinds(messages: list[Message]) -> list[tuple[str, int]]:
    return [(message.kind, message.trial) for message in messages]


def task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def lend(desk: Desk, trial: int, *, group: str = "g", start: int = 1, size: int = 1, after: int = 0) -> int:
    """Take `trial` to the ranks of a group; the lease's number."""
    ranks = [task(desk.next_lease(group, start, rank, size, after)) for rank in range(size)]
    await desk.enqueue([trial])
    granted = next(message for message in await mail(desk) if message.kind == "granted")
    assert granted.trial == trial
    await desk.bind(granted.lease, {"number": granted.lease})
    for rank in ranks:
        assert await rank == {"number": granted.lease}
    await desk.begun(granted.lease)
    return granted.lease


def test_trials_are_lent_in_the_order_of_the_queue_and_a_restarted_one_goes_first() -> None:
    async def play(desk: Desk) -> list[int]:
        await desk.enqueue([0, 1])
        await desk.enqueue([7], first=True)
        served, after = [], 0
        for _ in range(3):
            rank = task(desk.next_lease("g", 1, 0, 1, after))
            granted = next(message for message in await mail(desk) if message.kind == "granted")
            await desk.bind(granted.lease, {"number": granted.lease})
            after = (await rank)["number"]
            served.append(granted.trial)
            await desk.leave(after, 0, "completed")
        return served

    assert scene(play) == [7, 0, 1]


def test_no_lease_is_granted_before_every_rank_of_the_group_asks() -> None:
    async def play(desk: Desk) -> None:
        await desk.enqueue([0])
        first = task(desk.next_lease("g", 1, 0, 2, 0))
        assert ("granted", 0) not in kinds(await mail(desk))
        second = task(desk.next_lease("g", 1, 1, 2, 0))
        assert kinds(await mail(desk)) == [("joined", -1), ("granted", 0)]
        await desk.bind(1, {"number": 1})
        assert await first == await second == {"number": 1}

    scene(play)


def test_a_report_that_decides_waits_for_the_drivers_answer() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        report = task(desk.report(lease, REPORT, True))
        handle = task(desk.serve(100))
        assert await handle == [Result(number=1, trial=3, step=1, value=0.5)]
        assert not report.done()
        await desk.answer(3, 1, "continue")
        assert await report == "continue"
        report, handle = task(desk.report(lease, REPORT, True)), task(desk.serve(100))
        assert [result.number for result in await handle] == [2]
        await desk.answer(3, 2, "stop")
        assert await report == "stop"

    scene(play)


def test_the_handle_is_given_all_results_that_wait_each_once_and_of_a_trial_one_after_another() -> None:
    async def play(desk: Desk) -> None:
        for trial, group in ((3, "g"), (4, "h")):
            task(desk.report(await lend(desk, trial, group=group), REPORT, True))
        await settle()
        await desk.finish(3, "errored")
        assert [(r.trial, r.number) for r in await desk.serve(100) or []] == [(3, 1), (4, 2)]
        more = task(desk.serve(100))
        await settle()
        assert not more.done()
        await desk.answer(4, 2, "continue")
        await settle()
        assert not more.done()
        await desk.answer(3, 1, "continue")
        assert await more == [Result(number=3, trial=3, outcome="errored")]

    scene(play)


def test_what_a_stopped_trial_said_later_is_not_asked_about() -> None:
    async def play(desk: Desk) -> None:
        task(desk.report(await lend(desk, 3), REPORT, True))
        await settle()
        await desk.finish(3, "errored")
        await desk.serve(100)
        more = task(desk.serve(100))
        await desk.answer(3, 1, "stop")
        await settle()
        assert not more.done()

    scene(play)


def test_a_handle_in_the_place_of_a_dead_one_is_given_what_is_not_answered() -> None:
    async def play(desk: Desk) -> None:
        report = task(desk.report(await lend(desk, 3), REPORT, True))
        first = await desk.serve(100)
        # Its process has died in a call, which takes what comes before another process is there.
        dead = task(desk.serve(100))
        await settle()
        task(desk.report(await lend(desk, 4, group="h"), REPORT, True))
        assert [result.trial for result in await dead] == [4]
        dead = task(desk.serve(100))
        await settle()
        again = await desk.serve(101)
        assert await dead is None
        assert again is not None
        assert again[:1] == first
        assert [result.trial for result in again] == [3, 4]
        assert [message.process for message in await mail(desk) if message.kind == "handle"] == [101]
        await desk.answer(3, 1, "continue")
        assert await report == "continue"

    scene(play)


def test_the_final_report_ends_the_trial_and_is_not_waited_for() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        assert await desk.report(lease, FINAL, True) == "continue"
        await desk.leave(lease, 0, "completed")
        assert await desk.serve(100) == [Result(number=1, trial=3, step=4, value=0.25, outcome="completed")]

    scene(play)


def test_the_end_of_a_groups_processes_ends_their_lease_and_fences_it() -> None:
    async def play(desk: Desk) -> None:
        old = await lend(desk, 3)
        await desk.ended("g", 1, {0: ""})
        left, ended = await mail(desk)
        assert (left.kind, left.trial, left.outcome) == ("left", 3, "errored")
        assert "died" in left.error
        assert (ended.kind, ended.group, ended.start, ended.dead, ended.error) == ("ended", "g", 1, (0,), "")
        assert await desk.report(old, REPORT, True) == "fenced"
        assert not await desk.may_commit(old)

    scene(play)


def test_a_restarted_trial_is_fenced_from_its_earlier_lease_in_another_group() -> None:
    async def play(desk: Desk) -> None:
        old = await lend(desk, 3, group="g")
        await desk.leave(old, 0, "errored", "boom")
        new = await lend(desk, 3, group="h")
        assert await desk.report(old, REPORT, False) == "fenced"
        assert await desk.report(new, REPORT, False) == "continue"

    scene(play)


def test_a_worker_lost_while_it_waits_for_a_decision_is_released_and_the_decision_still_counts() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        report = task(desk.report(lease, REPORT, True))
        await settle()
        await desk.ended("g", 1, {0: ""})
        assert await report == "fenced"
        assert [result.trial for result in await desk.serve(100) or []] == [3]

    scene(play)


def test_a_trial_that_is_stopped_while_it_is_queued_again_is_lent_no_more() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        task(desk.report(lease, REPORT, True))
        await desk.leave(lease, 0, "errored", "boom")
        await desk.enqueue([3], first=True)
        await desk.answer(3, 1, "stop")
        task(desk.next_lease("g", 1, 0, 1, lease))
        assert ("granted", 3) not in kinds(await mail(desk))

    scene(play)


def test_a_paused_trial_leaves_its_group_to_the_next_and_is_lent_again_when_it_is_queued() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        report = task(desk.report(lease, REPORT, True))
        await settle()
        await desk.answer(3, 1, "pause")
        assert await report == "pause"
        await desk.leave(lease, 0, "paused")
        assert [(m.kind, m.outcome) for m in await mail(desk) if m.kind == "left"] == [("left", "paused")]
        other = await lend(desk, 4, after=lease)
        await desk.enqueue([3], first=True)
        await desk.leave(other, 0, "completed")
        again = task(desk.next_lease("g", 1, 0, 1, other))
        granted = next(message for message in await mail(desk) if message.kind == "granted")
        assert granted.trial == 3
        await desk.bind(granted.lease, {"number": granted.lease})
        assert await again == {"number": granted.lease}
        task(desk.report(granted.lease, REPORT, True))
        assert [result.number for result in await desk.serve(7) or []] == [2]

    scene(play)


def test_a_trial_resumed_while_it_still_saves_waits_until_it_has_left_its_group() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        report = task(desk.report(lease, REPORT, True))
        await settle()
        await desk.answer(3, 1, "pause")
        assert await report == "pause"
        await desk.enqueue([3, 4], first=True)
        task(desk.next_lease("free", 2, 0, 1, 0))
        assert [m.trial for m in await mail(desk) if m.kind == "granted"] == [4]
        task(desk.messages({lease: 1}))
        assert await desk.may_commit(lease), "what it saves now, it goes on from"
        await desk.leave(lease, 0, "paused")
        task(desk.next_lease("g", 1, 0, 1, lease))
        assert [m.trial for m in await mail(desk) if m.kind == "granted"] == [3]

    scene(play)


def test_a_trial_that_dies_while_it_saves_is_not_waited_for() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        task(desk.report(lease, REPORT, True))
        await settle()
        await desk.answer(3, 1, "pause")
        await desk.enqueue([3], first=True)
        await desk.ended("g", 1, {0: ""})
        task(desk.next_lease("g", 2, 0, 1, 0))
        messages = await mail(desk)
        assert [(m.trial, m.outcome) for m in messages if m.kind == "left"] == [(3, "errored")]
        assert [m.trial for m in messages if m.kind == "granted"] == [3]

    scene(play)


def test_a_restart_that_crosses_its_trials_pause_is_taken_back() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        task(desk.report(lease, REPORT, True))
        await desk.leave(lease, 0, "errored", "boom")
        await desk.enqueue([3], first=True)
        task(desk.next_lease("g", 1, 0, 1, lease))
        granted = next(m for m in await mail(desk) if m.kind == "granted")
        await desk.answer(3, 1, "pause")
        await desk.bind(granted.lease, {"number": granted.lease})
        assert await desk.report(granted.lease, REPORT, False) == "fenced"
        await desk.enqueue([4])
        assert [m.trial for m in await mail(desk) if m.kind == "granted"] == [4]

    scene(play)


def test_a_trial_withdrawn_from_the_queue_is_lent_no_more() -> None:
    async def play(desk: Desk) -> None:
        await desk.enqueue([3, 4, 5])
        await desk.withdraw([3, 5, 9])
        task(desk.next_lease("g", 1, 0, 1, 0))
        assert [m.trial for m in await mail(desk) if m.kind == "granted"] == [4]
        assert not desk._queue

    scene(play)


def test_a_group_that_died_before_it_began_a_trial_gives_it_back() -> None:
    async def play(desk: Desk) -> None:
        task(desk.next_lease("dead", 1, 0, 1, 0))
        await settle()
        await desk.enqueue([3])
        await desk.bind(1, {"number": 1})  # nobody takes it up
        await desk.ended("dead", 1, {0: ""})
        alive = task(desk.next_lease("alive", 2, 0, 1, 0))
        heard = await mail(desk)
        assert not [message for message in heard if message.kind == "left"]
        granted = [message for message in heard if message.kind == "granted"]
        assert [(message.group, message.trial) for message in granted] == [("dead", 3), ("alive", 3)]
        await desk.bind(granted[1].lease, {"number": granted[1].lease})
        assert await alive == {"number": 2}

    scene(play)


def test_ranks_of_a_group_meet_where_the_first_says() -> None:
    async def play(desk: Desk) -> None:
        second, of_others = task(desk.address(1, None)), task(desk.address(2, None))
        await settle()
        assert not second.done()
        assert await desk.address(1, ("10.0.0.7", 4242)) == await second == ("10.0.0.7", 4242)
        assert not of_others.done()
        await desk.ended("g", 2, {0: ""})
        with pytest.raises(asyncio.CancelledError):
            await of_others

    scene(play)


def test_an_error_on_one_rank_of_two_retires_the_group_after_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "PEERS_GRACE_S", 0.05)

    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.leave(lease, 1, "errored", "boom")
        assert [(m.kind, m.outcome, m.error) for m in await mail(desk)] == [("left", "errored", "boom")]
        # Rank 0 hangs in a collective operation; rank 1 is told to end the processes of both.
        assert await desk.next_lease("g", 1, 1, 2, lease) is None

    scene(play)


def test_a_rank_that_was_made_to_leave_alone_ends_the_processes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "PEERS_GRACE_S", 0.05)

    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.leave(lease, 0, "stopped", alone=True)
        assert [(m.kind, m.outcome) for m in await mail(desk)] == [("left", "stopped")]
        # Rank 1 waits for rank 0 in a collective operation.
        assert await desk.next_lease("g", 1, 0, 2, lease) is None

    scene(play)


def test_an_invalid_hp_on_every_rank_leaves_the_group_in_use() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        for rank in (1, 0):
            await desk.leave(lease, rank, "invalid_hp", "no")
        assert [m.outcome for m in await mail(desk)] == ["invalid_hp"]
        assert await lend(desk, 4, size=2, after=lease) == lease + 1

    scene(play)


def test_a_checkpoint_is_committed_only_after_the_driver_has_all_that_was_reported_before() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.report(lease, REPORT, False)
        allowed = task(desk.may_commit(lease))
        await settle()
        assert not allowed.done()
        task(desk.messages({lease: 1}))
        assert await allowed

    scene(play)


def test_only_a_strictly_better_score_is_the_best_of_the_experiment() -> None:
    async def play(desk: Desk) -> list[bool]:
        lease = await lend(desk, 3)
        await desk.set_best(0.5)
        return [await desk.improves(lease, score) for score in (0.5, 0.4, 0.45, 0.3)]

    assert scene(play) == [False, True, False, True]


def test_the_best_score_is_the_best_again_when_its_trial_was_killed_before_it_could_be_saved() -> None:
    async def play(desk: Desk) -> list[bool]:
        first = await lend(desk, 3)
        found = [await desk.improves(first, 0.4), await desk.improves(first, 0.4)]
        await desk.leave(first, 0, "errored", "killed")
        other = await lend(desk, 4)
        found.append(await desk.improves(other, 0.4))
        await desk.leave(other, 0, "errored", "killed")
        again = await lend(desk, 3)
        return [*found, await desk.improves(again, 0.4), await desk.improves(again, 0.4)]

    assert scene(play) == [True, False, False, True, False]


def test_closing_interrupts_those_who_wait_and_lends_no_more() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        waiting, idle = task(desk.report(lease, REPORT, True)), task(desk.next_lease("other", 1, 0, 1, 0))
        await desk.enqueue([4])
        await settle()
        await desk.close()
        assert await waiting == "interrupt"
        assert await desk.report(lease, REPORT, False) == "interrupt"
        await desk.messages({})
        driver = task(desk.messages({}))
        await settle()
        assert not await desk.quiet()  # trial 3 is out
        await desk.leave(lease, 0, "interrupted")
        assert await desk.next_lease("g", 1, 0, 1, lease) is None
        assert await idle is None
        assert [message.kind for message in await driver] == ["left"]
        assert not await desk.quiet(), "what the driver was sent last may not have reached it"
        driver = task(desk.messages({}))
        await settle()
        assert await desk.quiet()

    scene(play)


def test_when_the_search_is_over_or_the_run_ends_the_waiting_handle_goes_home() -> None:
    async def play(desk: Desk) -> None:
        task(desk.report(await lend(desk, 3), REPORT, True))
        await desk.serve(100)
        await desk.answer(3, 1, "continue")
        waiting = task(desk.serve(100))
        await settle()
        assert not waiting.done()
        await desk.finished()
        assert await waiting is None

    scene(play)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_failed_is_heard_before_one_that_failed_because_of_it(first: int) -> None:
    async def play(desk: Desk) -> list[Message]:
        lease = await lend(desk, 3, size=2)
        for rank in (first, 1 - first):
            if rank == 1:
                await desk.leave(lease, 1, "errored", "its own error")
            else:
                await desk.leave(lease, 0, "errored", "rank 1 failed", failure=COLLECTIVE)
        return [message for message in await mail(desk) if message.kind == "left"]

    [left] = scene(play)
    assert (left.outcome, left.error) == ("errored", "its own error")


def test_an_error_of_a_collective_counts_where_no_other_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(desk: Desk, ranks: int) -> list[tuple[str, Failure | None]]:
        lease = await lend(desk, 3, size=2)
        for rank in range(ranks):
            await desk.leave(lease, rank, "errored", f"heard by {rank}", failure=COLLECTIVE)
        await settle()
        told = [(message.error, message.failure) for message in await mail(desk) if message.kind == "left"]
        # As after any error of one of its ranks.
        assert await desk.next_lease("g", 1, 0, 2, lease) is None
        return told

    monkeypatch.setattr(desk_module, "PEERS_GRACE_S", 0.0)
    assert scene(lambda desk: play(desk, 1)) == [("heard by 0", COLLECTIVE)]
    assert scene(lambda desk: play(desk, 2)) == [("heard by 0", COLLECTIVE)], "what comes later may be of the first"


def test_a_process_that_can_run_no_trial_says_why_and_waits_for_the_end_of_the_run() -> None:
    async def play(desk: Desk) -> None:
        cause = ValueError("no data here")
        broken = task(desk.broken("g", cause))
        [message] = await mail(desk)
        assert (message.kind, message.group, message.cause) == ("broken", "g", cause)
        assert not broken.done()
        await desk.close()
        await broken

    scene(play)


# ----------------------------------------------------------------------------------------------- processes are replaced
def test_a_rank_whose_process_is_spoilt_has_its_group_replaced_and_nothing_counts_as_lost() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.leave(lease, 1, "completed", stale="a thread runs on")
        await desk.leave(lease, 0, "completed")
        left, retired = await mail(desk)
        assert (left.kind, left.outcome) == ("left", "completed")
        assert (retired.kind, retired.group, retired.trial, retired.error) == ("retired", "g", 3, "a thread runs on")
        # Its processes are told so, and the next trial is for those that take their place.
        await desk.enqueue([4])
        for rank in range(2):
            assert await desk.next_lease("g", 1, rank, 2, lease) is None
        await desk.ended("g", 1, {})
        [ended] = await mail(desk)
        assert (ended.dead, ended.error) == ((), "")
        for rank in range(2):
            task(desk.next_lease("g", 2, rank, 2, 0))
        assert kinds(await mail(desk)) == [("joined", -1), ("granted", 4)]

    scene(play)


def test_what_the_first_word_on_a_failure_says_of_it_is_passed_on() -> None:
    failure = Failure(kind="oom", where="MemoryError at model.py:3 in train_batch", batches=7)

    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.leave(lease, 0, "errored", "no room", failure=failure, stale="out of memory")
        left = (await mail(desk))[0]
        assert (left.outcome, left.error, left.failure) == ("errored", "no room", failure)

    scene(play)


@pytest.mark.parametrize(
    ("told", "kind"), [("", "died"), ("Ray has lost the node", "died"), ("its node was running low on memory", "oom")]
)
def test_a_process_that_died_is_told_from_one_that_ray_has_killed_for_its_memory(told: str, kind: FailureKind) -> None:
    async def play(desk: Desk) -> None:
        await lend(desk, 3)
        await desk.ended("g", 1, {0: told})
        left = (await mail(desk))[0]
        assert (left.kind, left.failure, left.dead) == ("left", Failure(kind=kind), (0,))
        assert left.error == f"a process of worker group g died{f': {told}' if told else ''}"

    scene(play)


@pytest.mark.parametrize("order", list(itertools.permutations(["its death", "what the other says", "the grace"])))
def test_an_error_of_a_collective_is_not_told_for_the_death_of_another_rank(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where it had to be told before Ray knew of the death."""
    monkeypatch.setattr(desk_module, "PEERS_GRACE_S", 0.01)

    async def play(desk: Desk) -> list[Message]:
        lease = await lend(desk, 3, size=2)
        for event in order:
            match event:
                case "its death":
                    await desk.ended("g", 1, {1: ""})
                case "what the other says":
                    await desk.leave(lease, 0, "errored", "Connection closed by peer", failure=COLLECTIVE)
                case "the grace":
                    await asyncio.sleep(0.05)
        told = [message for message in await mail(desk) if message.kind == "left"]
        asks = task(desk.next_lease("g", 1, 0, 2, lease))
        for rank in range(2):
            task(desk.next_lease("g", 2, rank, 2, 0))
        heard = await mail(desk)
        assert asks.done(), "a process that outlives them is sent away"
        # What comes in their place serves the next trial: there is nothing to wait for.
        await desk.enqueue([4])
        assert kinds(await mail(desk)) == [("granted", 4)]
        return told + [message for message in heard if message.kind == "left"]

    [left] = scene(play)
    if order == ("what the other says", "the grace", "its death"):
        assert (left.error, left.failure, left.dead) == ("Connection closed by peer", COLLECTIVE, ())
    else:
        assert left.error == "the process of rank 1 of worker group g died"
        # The other rank knows how far the trial came, if it comes to say so.
        batches = 6 if order.index("what the other says") < order.index("its death") else -1
        assert (left.failure, left.dead) == (Failure(kind="died", batches=batches), (1,))


def test_a_group_whose_processes_are_replaced_before_the_grace_is_over_has_died() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.leave(lease, 0, "errored", "Connection closed by peer", failure=COLLECTIVE)
        await desk.ended("g", 1, {})
        [left] = [message for message in await mail(desk) if message.kind == "left"]
        assert (left.error, left.failure) == ("a process of worker group g died", Failure(kind="died", batches=6))

    scene(play)


def test_a_trial_whose_group_is_gone_for_good_is_told_of_the_death_and_free_for_another_group() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=4)
        for rank in (0, 3):
            await desk.leave(lease, rank, "errored", "Connection reset by peer", failure=COLLECTIVE)
        await desk.ended("g", 1, {1: "Ray has lost the node", 2: "Ray has lost the node"})
        [left] = [message for message in await mail(desk) if message.kind == "left"]
        assert left.error == "the processes of ranks 1, 2 of worker group g died: Ray has lost the node"
        assert await lend(desk, 3, group="h", start=2) == lease + 1

    scene(play)


def test_what_a_rank_says_of_its_own_failure_counts_though_another_died() -> None:
    failure = Failure(kind="error", where="KeyError at model.py:3 in train_batch", batches=7)

    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.leave(lease, 0, "errored", "KeyError: 'x'", failure=failure)
        await desk.ended("g", 1, {1: ""})
        [left] = [message for message in await mail(desk) if message.kind == "left"]
        assert (left.error, left.failure) == ("KeyError: 'x'", failure)

    scene(play)


def test_an_end_of_earlier_processes_is_not_that_of_their_successors() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, start=2)
        await desk.ended("g", 1, {0: "its node was running low on memory"}, "could not start")
        assert kinds(await mail(desk)) == [("ended", -1)]
        assert await desk.report(lease, REPORT, False) == "continue"

    scene(play)


def test_a_trial_that_hung_is_told_before_its_process_is_gone_and_only_once() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.leave(lease, 0, "errored", "no batch", failure=Failure(kind="hung", batches=4))
        await desk.ended("g", 1, {0: ""})
        assert kinds(await mail(desk)) == [("left", 3), ("ended", -1)]

    scene(play)
