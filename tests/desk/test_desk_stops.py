"""The desk without Ray, where a lease is to end before its trial does, or its processes are gone and do not know it."""

from __future__ import annotations

from dray.desk.desk import Desk
from tests.desk.test_desk import REPORT, lend, mail, scene, settle, task


def test_processes_that_outlive_their_successors_start_are_sent_away_and_displace_nobody() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.ended("g", 1, {0: "Ray has lost the node"})
        successor = task(desk.next_lease("g", 2, 0, 1, 0))
        await mail(desk)
        assert await desk.next_lease("g", 1, 0, 1, lease) is None
        assert await mail(desk) == []
        assert not successor.done()
        successor.cancel()

    scene(play)


def test_trial_of_a_group_whose_node_is_taken_away_goes_on_in_another_as_the_first() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        wanted = task(desk.stop_wanted(lease))
        await settle()
        assert not wanted.done()
        await desk.enqueue([4])
        await desk.vacate("g")
        assert await wanted
        await desk.leave(lease, 0, "interrupted")
        assert await desk.next_lease("g", 1, 0, 1, lease) is None
        other = task(desk.next_lease("other", 2, 0, 1, 0))
        heard = await mail(desk)
        assert [message.trial for message in heard if message.kind == "granted"] == [3]
        assert not [message for message in heard if message.outcome == "errored"]
        other.cancel()

    scene(play)


def test_node_that_goes_before_its_trial_has_left_costs_no_restart() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.vacate("g")
        await desk.ended("g", 1, {0: "Ray has lost the node"})
        successor = task(desk.next_lease("g", 2, 0, 1, 0))
        heard = await mail(desk)
        assert [message.trial for message in heard if message.kind == "granted"] == [3]
        assert not [message for message in heard if message.kind == "left"]
        assert await desk.report(lease, REPORT, False) == "fenced"
        successor.cancel()

    scene(play)


def test_a_group_without_a_trial_is_vacated_at_once_and_one_that_is_not_there_is_not() -> None:
    async def play(desk: Desk) -> None:
        idle = task(desk.next_lease("g", 1, 0, 1, 0))
        await mail(desk)
        for _ in range(2):
            await desk.vacate("g")
        await desk.vacate("another")
        assert await idle is None
        await desk.enqueue([3])
        assert await mail(desk) == [], "nothing is lent to it any more"

    scene(play)


def test_ranks_of_a_group_that_is_vacated_end_when_the_last_has_left_its_trial() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.vacate("g")
        await desk.leave(lease, 0, "interrupted")
        first = task(desk.next_lease("g", 1, 0, 2, lease))
        await settle()
        assert not first.done(), "the other may still need it"
        await desk.leave(lease, 1, "interrupted")
        assert await first is None
        assert await desk.next_lease("g", 1, 1, 2, lease) is None

    scene(play)


def test_a_rank_hears_at_once_that_the_run_ends_and_waits_no_longer_than_its_lease() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        wanted = task(desk.stop_wanted(lease))
        await settle()
        await desk.leave(lease, 0, "completed")
        assert not await wanted
        lease = await lend(desk, 4, after=lease)
        wanted = task(desk.stop_wanted(lease))
        await settle()
        await desk.close()
        assert await wanted

    scene(play)


def test_so_many_groups_without_a_trial_are_spared_and_get_none_any_more() -> None:
    async def play(desk: Desk) -> None:
        busy = await lend(desk, 3)
        ranks = [task(desk.next_lease(group, 1, 0, 1, 0)) for group in ("b", "c", "d")]
        starts = task(desk.next_lease("e", 1, 0, 2, 0))
        await mail(desk)
        await desk.spare(2)
        assert [await rank for rank in ranks[1:]] == [None, None]
        await desk.enqueue([4, 5])
        assert [(message.kind, message.group) for message in await mail(desk)] == [("granted", "b")]
        await desk.spare(2)
        assert await mail(desk) == [], "a trial waits for a group"
        await desk.leave(busy, 0, "completed")
        for rank in (ranks[0], starts):
            assert not rank.done()
            rank.cancel()

    scene(play)
