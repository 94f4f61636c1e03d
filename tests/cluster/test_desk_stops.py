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
        await desk.leave_nodes("g")
        assert await wanted
        await desk.leave(lease, 0, "interrupted")
        assert "retire" in (await desk.next_lease("g", "a", 0, 1, lease) or {})
        other = task(desk.next_lease("other", "b", 0, 1, 0))
        heard = await mail(desk)
        assert [message.trial for message in heard if message.kind == "granted"] == [3]
        assert not [message for message in heard if message.outcome == "errored"]
        other.cancel()

    scene(play)


def test_node_that_goes_before_its_trial_has_left_costs_no_restart() -> None:
    async def play(desk: Desk) -> None:
        lease = await lend(desk, 3)
        await desk.leave_nodes("g")
        successor = task(desk.next_lease("g", "b", 0, 1, 0))
        heard = await mail(desk)
        assert [message.trial for message in heard if message.kind == "granted"] == [3]
        assert not [message for message in heard if message.kind in ("left", "lost")]
        assert await desk.report(lease, REPORT, False) == "fenced"
        successor.cancel()

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
