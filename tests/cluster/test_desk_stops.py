"""The desk without Ray, where a lease is to end before its trial does, or its processes are gone and do not know it."""

from __future__ import annotations

from dray.cluster.desk import Desk
from tests.cluster.test_desk import REPORT, lend, mail, scene, settle, task


def test_processes_that_outlive_their_successors_start_are_sent_away_and_displace_nobody() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        successor = task(desk.next_lease("g", "b", 0, 1, 0))
        await mail(desk)
        assert "retire" in (await desk.next_lease("g", "a", 0, 1, lease) or {})
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
        assert "retire" in (await desk.next_lease("g", "a", 0, 1, lease) or {})
        other = task(desk.next_lease("other", "b", 0, 1, 0))
        heard = await mail(desk)
        assert [message.trial for message in heard if message.kind == "granted"] == [3]
        assert not [message for message in heard if message.outcome == "errored"]
        assert [message.group for message in heard if message.kind == "vacated"] == ["g"]
        other.cancel()

    scene(play)


def test_node_that_goes_before_its_trial_has_left_costs_no_restart() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.vacate("g")
        successor = task(desk.next_lease("g", "b", 0, 1, 0))
        heard = await mail(desk)
        assert [message.trial for message in heard if message.kind == "granted"] == [3]
        assert not [message for message in heard if message.kind in ("left", "lost")]
        assert [message.group for message in heard if message.kind == "vacated"] == ["g"]
        assert await desk.report(lease, REPORT, False) == "fenced"
        successor.cancel()

    scene(play)


def test_a_group_without_a_trial_is_vacated_at_once_and_one_that_is_not_there_is_not() -> None:
    async def play(desk: Desk) -> None:
        idle = task(desk.next_lease("g", "a", 0, 1, 0))
        await mail(desk)
        for _ in range(2):
            await desk.vacate("g")
        await desk.vacate("another")
        assert [(message.kind, message.group) for message in await mail(desk)] == [("vacated", "g")]
        assert "retire" in (await idle or {})
        await desk.enqueue([3])
        assert await mail(desk) == [], "nothing is lent to it any more"

    scene(play)


def test_a_group_is_vacated_when_its_last_rank_has_left() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3, size=2)
        await desk.vacate("g")
        await desk.leave(lease, 0, "interrupted")
        assert "vacated" not in [message.kind for message in await mail(desk)]
        await desk.leave(lease, 1, "interrupted")
        assert "vacated" in [message.kind for message in await mail(desk)]

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
        ranks = [task(desk.next_lease(group, "a", 0, 1, 0)) for group in ("b", "c", "d")]
        starts = task(desk.next_lease("e", "a", 0, 2, 0))
        await mail(desk)
        await desk.spare(2)
        assert {(message.kind, message.group) for message in await mail(desk)} == {("spare", "c"), ("spare", "d")}
        await desk.enqueue([4, 5])
        assert [(message.kind, message.group) for message in await mail(desk)] == [("granted", "b")]
        await desk.spare(2)
        assert await mail(desk) == [], "a trial waits for a group"
        await desk.leave(busy, 0, "completed")
        assert not any(rank.done() for rank in ranks), "it is for the driver to end them"
        for rank in (*ranks, starts):
            rank.cancel()

    scene(play)


def test_a_group_that_was_spared_is_not_told_of_as_lost() -> None:
    async def play(desk: Desk) -> None:
        rank = task(desk.next_lease("g", "a", 0, 1, 0))
        await mail(desk)
        await desk.spare(1)
        await desk.dismiss("g")
        assert [message.kind for message in await mail(desk)] == ["spare"]
        rank.cancel()

    scene(play)
