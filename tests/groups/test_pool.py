"""How many worker groups a run has, when they start and end, and what is said of those that wait: all is given here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dray.cluster.view import GPU_TYPE, NODE_ID, Activity, AutoscalerLimits, ClusterView
from dray.config.resources import Resources
from dray.display.counts import Counts
from dray.errors import ConfigError
from dray.groups.borrowed import BorrowedGroups, GroupServer
from dray.groups.capacity import find_slots
from dray.groups.effects import (
    ClusterSeen,
    EndGroup,
    GiveUp,
    GroupPlaced,
    GroupsEffect,
    LookAtCluster,
    NodesDrain,
    Release,
    Reserve,
    ShellFailed,
    ShowWaiting,
    SlotsReserved,
    StartGroup,
)
from dray.groups.elastic import TAKEN_S
from dray.groups.pool import (
    IDLE_S,
    IN_TURN_S,
    LOOK_S,
    MAX_FAILED_STARTS,
    SAY_AFTER_S,
    SAY_EVERY_S,
    Groups,
    GroupsPlan,
    NodeWait,
)
from dray.groups.slots import Slots
from dray.leases.effects import Say
from dray.leases.failure import Failure
from dray.leases.messages import GpuFailed, GroupEnded, GroupReady, LeaseGranted, TrialLeft, WorkerArrived
from dray.rpc.connection import Call, Connection, ConnectionLost
from dray.rpc.event_loop import EventLoop
from dray.rpc.wire import Malformed
from tests.groups.clusters import GPU_NODE, HEAD_NODE, cluster, cpus, gpus, node
from tests.ray.harness import wait_for


class FakeDesk:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def drain(self, group: str) -> None:
        self.told.append(("drain", group))

    def retire_idle(self, owner: str, count: int) -> None:
        self.told.append(("retire_idle", owner, count))

    def shrink(self, owner: str, keep: int, *, at_once: bool) -> None:
        self.told.append(("shrink", owner, keep, at_once))


class World:
    """A cluster of nodes with so many CPUs each, its groups, and an experiment with so many trials to run."""

    def __init__(
        self,
        *nodes: int,
        own: bool = True,
        slots: Slots = cpus(),  # noqa: B008 - frozen
        limits: AutoscalerLimits | None = None,
        starts: Iterator[int] | None = None,
        **plan: Any,
    ) -> None:
        self.now, self.trials = 100.0, 0
        self.nodes, self.limits = [node({"CPU": float(each)}, name=str(at)) for at, each in enumerate(nodes)], limits
        self.has_slots = True
        """Whether groups that start get their slots before the next step."""
        self.started: list[StartGroup] = []
        """All groups that were ever started."""
        self.ended: list[tuple[str, int]] = []
        self.lines: list[str] = []
        self.error = ""
        self.waits_for = ""
        self.looks = 0
        self.rooms: dict[int, Reserve] = {}
        self.desk: Any = FakeDesk()
        self.counts = Counts()
        self._to_place: list[StartGroup] = []
        self._asked: LookAtCluster | None = None
        self._up = set[int]()
        self.groups = Groups(
            "run",
            slots,
            GroupsPlan(own_cluster=own, **plan),
            self._view(),
            self.now,
            desk=self.desk,
            emit=self._perform,
            counts=self.counts,
            names=starts or itertools.count(),
            starts=starts or itertools.count(1),
        )

    def _view(self) -> ClusterView:
        waiting = self._asked is not None and self._asked.waiting
        return ClusterView(nodes=tuple(self.nodes), limits=self.limits, free={} if waiting else None)

    def _perform(self, effect: GroupsEffect) -> None:
        match effect:
            case StartGroup():
                self.started.append(effect)
                self._to_place.append(effect)
            case EndGroup():
                self.ended.append((effect.group, effect.start))
            case Reserve():
                self.rooms[effect.room] = effect
            case Release():
                del self.rooms[effect.room]
            case LookAtCluster():
                assert self._asked is None, "one after the other"
                self._asked = effect
            case Say():
                self.lines.append(effect.line)
            case ShowWaiting():
                self.waits_for = effect.status
            case GiveUp():
                self.error = effect.error

    def on(self, *events: Any) -> World:
        for event in events:
            self.groups.on(event, self.now)
        return self

    def step(self, trials: int | None = None) -> World:
        """What follows at once from what has happened; from now on there are so many trials."""
        self.trials = self.trials if trials is None else trials
        for start in self._to_place if self.has_slots else ():
            self.on(GroupPlaced(group=start.group, start=start.start))
        self._to_place.clear()
        self.groups.reconcile(self.trials, self.now)
        if self._asked is not None:
            self.looks += 1
            view, self._asked = self._view(), None
            self.on(ClusterSeen(view)).groups.reconcile(self.trials, self.now)
        return self

    def later(self, seconds: float) -> World:
        """A time in which nothing happens."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            self.step()
        return self

    def comes_up(self, *names: str, on: str = "0") -> World:
        """These groups can train; by default all that start."""
        for start in self.started:
            is_over = start.start in self._up or (start.group, start.start) in self.ended
            if not is_over and (start.group in names or not names):
                self._up.add(start.start)
                self.on(WorkerArrived(group=start.group, start=start.start, node=on))
                self.on(GroupReady(group=start.group, start=start.start))
        return self

    def trains(self) -> World:
        return self.on(LeaseGranted(lease=1, group="group-0", trial=0))

    def bring_up(self, count: int) -> World:
        """As many trials, each in a group that trains."""
        self.step(count)
        while self.groups.ready_count < count:
            self.comes_up().step()
        return self

    def ends(self, start: StartGroup, *, lost: bool = False, error: str = "") -> World:
        """It has ended by itself."""
        dead = {0: ""} if lost and not error else {}
        return self.on(GroupEnded(group=start.group, start=start.start, dead=dead, error=error))

    @property
    def names(self) -> list[str]:
        return [start.group for start in self.started]


# ------------------------------------------------------------------------------------------- on a machine of our own
def test_there_are_no_more_groups_than_trials_or_than_fit() -> None:
    world = World(32).step(3)
    assert world.names == ["group-0", "group-1", "group-2"]
    world.trains().bring_up(32).step(50)
    assert world.groups.count == len(world.started) == 32
    assert world.looks == 0, "its own machine does not change"


def test_on_few_cores_the_first_group_trains_before_another_starts() -> None:
    world = World(2).step(9)
    world.later(4).comes_up("group-0").later(2)
    assert (world.groups.count, world.groups.ready_count) == (1, 1), "it has nothing to show yet"
    world.trains().later(5)
    assert world.groups.count == 1
    world.later(2)
    assert world.groups.count == 2, "it has trained for as long as it took to come to that"


@pytest.mark.parametrize(("done", "groups"), [(0.4, 2), (0.6, 1)])
def test_on_few_cores_another_does_not_start_for_the_end_of_a_search(done: float, groups: int) -> None:
    shares = [0.1]
    world = World(2, share_done=lambda: shares[0]).step(9).later(5)
    world.comes_up("group-0").trains()
    shares[0] = done  # 9 s for this, so 18 or 7 are left: more, or less, than twice the 5 of a start
    world.later(9)
    assert world.groups.count == groups


def test_others_start_even_if_the_first_group_does_not_train() -> None:
    world = World(2).step(9).comes_up("group-0").later(IN_TURN_S - 1)
    assert world.groups.count == 1
    assert world.later(1).groups.count == 2


def test_groups_of_a_large_machine_start_several_at_once() -> None:
    world = World(16).step(16).later(IN_TURN_S + 1)
    assert world.groups.count == 4, "they are still starting, on a quarter of its cores"
    world.comes_up("group-2").trains().step()
    assert world.groups.count == 5, "the next one at once"


# ------------------------------------------------------------------------------------------------ groups that end
def test_a_group_that_ends_is_freed_and_replaced_at_once() -> None:
    world = World(1).step(2)
    [first] = world.started
    world.ends(first, error="no file descriptors").step()
    assert world.ended == [("group-0", 1)], "its slots are free"
    assert world.lines == ["worker group group-0 ended: no file descriptors"]
    assert [(start.group, start.start) for start in world.started] == [("group-0", 1), ("group-0", 2)]
    assert (world.groups.count, world.groups.ready_count, world.error) == (1, 0, "")
    late = GroupPlaced(group="group-0", start=1), GroupReady(group="group-0", start=1)
    world.ends(first, lost=True).on(*late, WorkerArrived(group="group-0", start=1, node="0")).step()
    assert (len(world.started), world.groups.ready_count) == (2, 0), "they are of the start before"


def test_a_group_that_keeps_dying_without_a_trial_ends_the_experiment() -> None:
    world = World(1).step(1).comes_up().on(TrialLeft(lease=1, group="group-0", trial=0, outcome="completed"))
    for number in range(MAX_FAILED_STARTS):
        assert not world.error
        world.ends(world.started[-1], lost=True, error="no file descriptors" if number else "").step().comes_up()
    assert f"group-0 was started {MAX_FAILED_STARTS} times and never finished a trial" in world.error
    assert "because no file descriptors" in world.error
    assert (world.counts.groups_started, world.counts.groups_lost) == (MAX_FAILED_STARTS, MAX_FAILED_STARTS)
    assert len(world.started) == MAX_FAILED_STARTS, "and no other is started"


@pytest.mark.parametrize("lost", [True, False])
def test_starts_with_a_trial_or_ended_on_purpose_did_not_fail(lost: bool) -> None:
    world = World(1).step(2)
    for _ in range(3 * MAX_FAILED_STARTS):
        world.comes_up()
        if lost:
            world.on(TrialLeft(lease=1, group="group-0", trial=0, outcome="completed"))
        world.ends(world.started[-1], lost=lost).step()
    assert (world.error, world.groups.count) == ("", 1)
    assert world.counts.groups_lost == (3 * MAX_FAILED_STARTS if lost else 0)


def test_a_shell_that_fails_ends_the_experiment() -> None:
    error = World(1).step(1).on(ShellFailed(OSError("no threads"))).error
    assert error == "worker groups can't be started or ended: OSError('no threads')"


# ------------------------------------------------------------------------------------------- on a cluster of others


def test_idle_groups_are_retired_after_a_while_except_one() -> None:
    world = World(4, own=False).bring_up(4).step(2).later(LOOK_S)
    assert world.later(IDLE_S - 1).desk.told == []
    assert world.later(2 * LOOK_S).desk.told == [("retire_idle", "run", 2)]
    assert len(world.later(LOOK_S).desk.told) == 1, "once"
    world.step(0).later(IDLE_S + 3 * LOOK_S)
    assert world.desk.told[1:] == [("retire_idle", "run", 3)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("slots", "max_slots", "nodes", "expected"), [(cpus(2), 5, (16, 16), 2), (cpus(shared_by=4), None, (1, 1), 8)]
)
def test_groups_never_exceed_max_slots_and_n_share_each_slot(
    own: bool, slots: Slots, max_slots: int | None, nodes: tuple[int, ...], expected: int
) -> None:
    world = World(*nodes, own=own, slots=slots, max_slots=max_slots).step(30)
    for _ in range(30):
        world.comes_up().trains().later(LOOK_S)
    assert world.groups.count == len(world.started) == expected
    assert {start.slots.taken for start in world.started} == {slots.taken}
    world.ends(world.started[0], lost=True).later(LOOK_S)
    assert (world.groups.count, len(world.started)) == (expected, expected + 1), "what one had, the next may have"


def test_a_thousand_groups_look_at_the_cluster_as_often_as_one() -> None:
    world = World(*[4] * 1000, own=False, slots=replace(cpus(), cpus_per_slot=4)).step(2000)
    assert (world.groups.count, world.looks) == (1000, 0), "it was seen just before"
    for name in world.names:  # what the desk sends while they start
        world.comes_up(name).step()
    assert (world.groups.ready_count, world.looks) == (1000, 0), "all groups exist that fit"
    world.nodes.append(node({"CPU": 4.0}))
    assert world.later(2.1 * LOOK_S).groups.count == 1001
    assert 1 <= world.looks <= 2


def test_the_display_shows_what_groups_wait_for() -> None:
    world = World(2, own=False)
    world.has_slots = False
    world.step(1).later(13 * LOOK_S)
    [line] = world.lines
    assert line.startswith("the worker group waits for nodes. Each needs 1 x (1 CPU).")
    assert world.waits_for == "the worker group waits for nodes"
    world.on(GroupPlaced(group="group-0", start=1)).later(LOOK_S)
    assert world.waits_for == ""


def test_a_group_that_gets_no_gpu_of_a_type_asks_for_one_of_the_next() -> None:
    world = World(2, own=False, slots=cpus(gpu_types=("A100", "L4")))
    world.has_slots = False
    world.step(1).later(15 * LOOK_S)
    asked = [(start.group, start.slots.labels) for start in world.started]
    assert asked == [("group-0", {GPU_TYPE: "A100"}), ("group-0", {GPU_TYPE: "L4"})]
    assert world.ended == [("group-0", 1)]
    assert world.ends(world.started[0]).step().groups.count == 1, "its end is reported late"


def test_a_group_on_a_draining_node_is_drained_once() -> None:
    world = World(4, own=False).step(1)
    world.on(WorkerArrived(group="group-0", start=1, node="a"), WorkerArrived(group="group-0", start=1, node="b"))
    world.on(NodesDrain(frozenset("b")))
    assert world.desk.told == [], "there is nothing to save yet"
    world.on(GroupReady(group="group-0", start=1), NodesDrain(frozenset("c")))
    assert world.desk.told == []
    world.on(NodesDrain(frozenset("b")), NodesDrain(frozenset("b")))
    assert world.desk.told == [("drain", "group-0")]
    assert len(world.lines) == 1


def gpus_fail(world: World, failures: Iterable[tuple[int, str]]) -> None:
    """GPUs of these nodes end these trials."""
    for trial, name in failures:
        failure = Failure(kind="device", node=name)
        world.on(TrialLeft(lease=trial, group="group-0", trial=trial, outcome="errored", failure=failure))


def one_on_each(*nodes: int) -> World:
    """A group that trains on each of these nodes."""
    world = World(*nodes, own=False).step(len(nodes))
    for at, start in enumerate(world.started):
        world.comes_up(start.group, on=str(at))
    return world


def test_a_node_gets_no_more_trials_once_its_gpus_have_ended_two() -> None:
    world = one_on_each(1, 1, 1)
    gpus_fail(world, [(3, "0"), (3, "0"), (5, "1")])
    world.later(2 * LOOK_S)
    assert (world.lines, world.desk.told) == ([], []), "two errors of one trial may be the trial's"
    gpus_fail(world, [(7, "0"), (8, "0")])
    [line] = world.lines
    assert line.startswith("GPU errors ended trials 3, 7 on node address-of-0: it gets no more trials; see nvidia-smi")
    world.later(2 * LOOK_S)
    assert world.desk.told == [("drain", "group-0")]
    world.ends(world.started[0]).later(LOOK_S)
    assert world.groups.count == 2, "there is no room for a third"
    world.ends(world.started[1], lost=True).later(LOOK_S)
    assert world.started[-1].slots.labels == {NODE_ID: "!in(0)"}
    assert not world.error


def test_gpu_errors_that_were_found_in_a_log_count_too() -> None:
    world = one_on_each(1, 1)
    gpus_fail(world, [(3, "0")])
    world.on(GpuFailed(trial=5, node="0"))
    world.later(2 * LOOK_S)
    assert world.desk.told == [("drain", "group-0")]


def test_a_search_ends_when_gpus_of_all_nodes_have_ended_trials() -> None:
    world = one_on_each(1, 1)
    gpus_fail(world, [(0, "0"), (1, "0"), (2, "1")])
    assert not world.error
    gpus_fail(world, [(3, "1")])
    assert "GPU errors ended trials 2, 3 on node address-of-1, and no other node has room" in world.error


# ------------------------------------------------------------------------------------------------------ an elastic one
def elastic(slots: int, *, own: bool = False) -> World:
    """A group with one, two or four slots, on a cluster with so many that are free."""
    world = World(slots, own=own, sizes=(1, 2, 4)).step(5)
    return reserved(world, slots)


def reserved(world: World, slots: int) -> World:
    """The present reservation has so many slots."""
    [room] = world.rooms
    return world.on(SlotsReserved(room=room, slots=slots)).step()


@pytest.mark.parametrize("own", [True, False])
def test_an_elastic_group_starts_once_its_slots_were_reserved(own: bool) -> None:
    world = World(2, own=own, sizes=(1, 2, 4)).step(5)
    assert (world.started, world.groups.count) == ([], 1)
    reserved(reserved(world, 1), 2)
    assert [start.slots.per_trial for start in world.started] == [2]
    assert world.rooms == {}, "they are for the group"


def test_an_elastic_group_is_drained_and_replaced_by_a_larger_one() -> None:
    world = elastic(2).comes_up().later(2 * LOOK_S)
    assert [start.slots.per_trial for start in world.started] == [2]
    world.nodes.append(node({"CPU": 2.0}))
    reserved(world, 2).later(2 * LOOK_S)
    assert world.desk.told == [("drain", "group-0")], "once"
    assert len(world.started) == 1, "its slots are not free before it has ended"
    reserved(world.ends(world.started[0]).step(), 4)
    assert (world.groups.count, world.started[1].slots.per_trial) == (1, 4)


def test_an_elastic_group_that_lost_slots_becomes_smaller() -> None:
    world = elastic(2)
    world.has_slots = False
    world.later(TAKEN_S - LOOK_S)
    assert world.ended == []
    world.later(3 * LOOK_S)
    assert world.ended == [("group-0", 1)]
    reserved(world, 1).later(5)
    assert world.started[1].slots.per_trial == 1
    assert world.lines == [
        "the worker group waits for nodes. Each needs 1 x (1 CPU). The cluster has 2 CPUs (0 free) on 1 node; "
        "no autoscaler is running to start more",
        "others took slots of worker group group-0: its trial continues with fewer",
    ]


# --------------------------------------------------------------------------------------------------------- at the end


# ------------------------------------------------------------------------------------------- a server's groups
def test_a_server_keeps_idle_groups_as_long_as_it_was_told() -> None:
    world = World(4, own=False, idle_s=300.0, is_servers=True).bring_up(2).step(0).later(LOOK_S)
    assert world.later(298.0).desk.told == []
    assert world.later(4 * LOOK_S).desk.told == [("retire_idle", "run", 2)]


def test_groups_make_room_by_those_without_slots_first() -> None:
    world = World(4, own=False, is_servers=True).bring_up(3)
    world.has_slots = False
    world.ends(world.started[1], lost=True).later(2 * LOOK_S).step(1)
    assert world.groups.has_waiting
    world.groups.make_room(at_once=True)
    assert world.ended == [("group-1", 2), ("group-1", 4)]
    assert world.desk.told == [("shrink", "run", 1, True)]


def seen(*nodes: Any, **activity: Any) -> ClusterView:
    """A cluster whose autoscaler does this."""
    now = {"starting": {}, "failed": {}, **activity}
    return cluster(HEAD_NODE, *nodes, free={"CPU": 1.0}, activity=Activity(**now))


def test_waiting_is_reported_once_with_the_request_and_the_cluster() -> None:
    waiting, view = NodeWait(gpus(2)), seen(starting={"spot": 2})
    said = [waiting.look(2, 3, view, float(now)) for now in range(200)]
    assert [now for now, line in enumerate(said) if line] == [SAY_AFTER_S]
    assert said[int(SAY_AFTER_S)] == (
        "2 of 3 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 4 CPUs (1 free) on 1 node; the autoscaler is starting 2 spot"
    )
    assert waiting.status == "2 of 3 worker groups wait for nodes (2 spot starting)"
    assert waiting.look(0, 3, view, 200.0) == waiting.status == ""


def test_unavailable_nodes_are_reported_once() -> None:
    waiting = NodeWait(gpus(2))
    assert waiting.look(1, 1, seen(), 0.0) == ""
    assert "the worker group waits" in waiting.look(1, 1, seen(), SAY_AFTER_S)
    refused = seen(failed={"spot": "no capacity"})
    assert waiting.look(1, 1, refused, SAY_AFTER_S) == ""
    assert "it could not start spot: no capacity" in waiting.look(1, 1, refused, SAY_AFTER_S + SAY_EVERY_S)
    assert waiting.status == "the worker group waits for nodes (spot not available)"
    assert waiting.look(1, 1, refused, SAY_AFTER_S + 2 * SAY_EVERY_S) == ""


def test_a_missing_autoscaler_is_reported_with_what_is_free() -> None:
    waiting, view = NodeWait(gpus(2)), cluster(HEAD_NODE, GPU_NODE)
    assert [waiting.look(1, 2, view, now) for now in (0.0, SAY_AFTER_S)] == ["", ""]
    assert waiting.look(1, 2, cluster(HEAD_NODE, GPU_NODE, free={"CPU": 1.0}), SAY_AFTER_S) == (
        "1 of 2 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 2 GPUs (0 free) and 12 CPUs (1 free) on 2 nodes; no autoscaler is running to start more"
    )


def test_a_short_wait_is_not_reported() -> None:
    waiting = NodeWait(gpus(2))
    for turn in range(100):
        assert waiting.look((turn + 1) % 2, 1, seen(), turn * (SAY_AFTER_S - 1)) == waiting.status == ""


class Answers:
    def take(self, call: Call) -> None:
        if call.method == "nonsense":
            raise Malformed(call.method)
        call.answer()

    def lost(self, session: Any) -> None:
        pass

    def settle(self) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("test-server")
    loop.listen("127.0.0.1")
    loop.attach(Answers())
    yield loop
    loop.close()


def lent(loop: EventLoop) -> BorrowedGroups:
    server = GroupServer(address="", endpoint=loop.endpoint, local=True)
    return BorrowedGroups(server, "run-1", None, loop.endpoint, {}, lambda message: None)  # type: ignore[arg-type]


def test_one_that_its_server_has_forgotten_does_not_wait_forever(loop: EventLoop) -> None:
    groups = lent(loop)
    groups.step()
    loop.close()
    wait_for(lambda: groups._desk.is_lost, "the loss", 5)  # noqa: SLF001
    with pytest.raises(ConnectionLost, match="lost the connection to the server"):
        groups.step()


def test_one_that_has_ended_has_lost_nothing(loop: EventLoop) -> None:
    groups = lent(loop)
    groups.end()
    wait_for(lambda: groups._desk._stream.is_ending, "the end")  # noqa: SLF001
    groups.step()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_client_that_calls_what_none_calls_is_let_go_with_one_line(
    is_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EventLoop("test-server")
    loop.listen("127.0.0.1")
    bad, good = Connection(loop.endpoint), Connection(loop.endpoint)
    attach = partial(loop.attach, Answers())
    for step in (bad.nonsense, attach) if is_early else (attach, bad.nonsense):
        step()
    wait_for(lambda: bad.is_lost, "the end of its session")
    good.call("sense").result(30)
    assert [record.getMessage() for record in caplog.records] == [
        "ended a session that called what no client calls: nonsense"
    ]
    good.close()
    loop.close()


def test_a_cluster_that_a_server_lends_is_one_thing_in_messages(loop: EventLoop) -> None:
    asked = Resources(slots_per_trial=5)
    server = GroupServer(address="10.0.0.1:6379", endpoint=loop.endpoint, local=False)
    told = r"5 slots requested, but the Ray cluster of the server at 10\.0\.0\.1:6379 has, or can grow to, 4 cpu slots"
    with pytest.raises(ConfigError, match=told):
        find_slots(cluster(HEAD_NODE), asked, 5, server.cluster().description)
