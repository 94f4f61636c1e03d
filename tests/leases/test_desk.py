"""The desk's decisions: which group trains which trial, which lease counts, and when a call is answered. Shares:
priorities, weights, limits, and turns of groups that don't fit side by side."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import pytest

from dray.leases.desk import CAUSE_GRACE, LEAVE_S, PEERS_GRACE_S, Desk
from dray.leases.effects import After, Effect, Reply, Tell
from dray.leases.failure import Failure, FailureKind
from dray.leases.lease import TRANSITIONS, Client, Group, Lease
from dray.leases.messages import (
    ClientLeft,
    Departure,
    GpuFailed,
    GroupEnded,
    GroupFreed,
    GroupReady,
    GroupRetired,
    LeaseGranted,
    LeaseOutcome,
    LeaseOver,
    TrialLeft,
    Unfit,
    WorkerUnfit,
)
from dray.leases.shares import QUANTUM, Demand, Shares

COLLECTIVE = Failure(kind="collective", where="RuntimeError at model.py:3 in train_batch", batches=6)
M = TypeVar("M")


class Scene:
    """A desk, the calls of ranks, and what it emitted. The client "run" has trials, and owns the groups."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.desk = Desk(self.effects.append)
        self.desk.add("run")

    @property
    def run(self) -> Client:
        return self.desk.clients["run"]

    def add(self, name: str, **share: Any) -> Client:
        self.desk.add(name, **share)
        return self.desk.clients[name]

    def take(self, kind: type[M]) -> list[M]:
        """Take out the effects of this kind since the last call."""
        found = [each for each in self.effects if isinstance(each, kind)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, kind)]
        return found

    def told(self, kind: type[M], client: str = "run") -> list[M]:
        """The messages of this kind to a client since the last call; of other kinds are not kept."""
        messages = [each.message for each in self.take(Tell) if each.client == client]
        return [message for message in messages if isinstance(message, kind)]

    def replies(self) -> dict[Any, Any]:
        """The answers to calls since the last time."""
        return {reply.call: reply.value for reply in self.take(Reply) if reply.call is not None}

    def ask(self, group: str = "g", *, start: int = 1, size: int = 1, after: int = 0, shape: str = "") -> None:
        """All ranks of a group ask for a lease; the calls are the group's name with the rank."""
        for rank in range(size):
            self.desk.next_lease(f"{group}{rank}", "run", group, start, rank, size, after, shape)

    def queue(self, *trials: int, client: str = "run", first: bool = False) -> None:
        self.desk.enqueue(client, trials, first)

    def take_up(self, *, client: str = "run") -> Lease:
        """The latest lease of a client gets its parameters, and rank 0 takes it up."""
        lease = list(self.desk.clients[client].leases.values())[-1]
        self.desk.bind(client, lease.number, b"parameters")
        self.desk.begun(None, lease.number)
        return lease

    def lend(
        self, trial: int, group: str = "g", *, start: int = 1, size: int = 1, after: int = 0, client: str = "run"
    ) -> Lease:
        """Queue a trial, which the ranks of a group get and take up."""
        self.queue(trial, client=client)
        self.ask(group, start=start, size=size, after=after)
        lease = self.take_up(client=client)
        assert (lease.trial, lease.group.name) == (trial, group)
        self.effects.clear()
        return lease

    def leave(self, lease: Lease, rank: int, outcome: LeaseOutcome, error: str = "", **fields: Any) -> list[After]:
        """A rank leaves; what is to be called later."""
        self.desk.leave(None, lease.number, rank, Departure(outcome=outcome, error=error, **fields))
        return self.take(After)

    def end_group(self, group: str = "g", start: int = 1, dead: dict[int, str] | None = None, error: str = "") -> None:
        dead = {0: ""} if dead is None else dead
        self.desk.group_ended("run", GroupEnded(group=group, start=start, dead=dead, error=error))

    def granted(self, client: str = "run") -> list[int]:
        return [message.trial for message in self.told(LeaseGranted, client)]

    def group(self, name: str = "g") -> Group:
        return self.desk._groups[name]  # noqa: SLF001 - an idle group has no other trace


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("state", TRANSITIONS)
def test_a_leases_events_change_its_state_as_the_table_says(scene: Scene, state: Any) -> None:
    group = Group(owner=scene.run, name="g", shape="", start=1, size=1)
    for event in ("bind", "begin", "move", "cancel", "conclude", "fail", "end"):
        lease = Lease(number=1, client=scene.run, trial=0, group=group, state=state)
        if event in TRANSITIONS[state]:
            lease.on(event)
            assert lease.state == TRANSITIONS[state][event]
        else:
            with pytest.raises(AssertionError, match=f"lease 1 is {state}, which allows no '{event}'"):
                lease.on(event)
            assert lease.state == state


# ----------------------------------------------------------------------------------------------------------- the queue
def test_trials_are_granted_in_order_and_restarted_ones_first(scene: Scene) -> None:
    scene.queue(0, 1)
    scene.queue(7, 8, first=True)
    for group in "abcd":
        scene.ask(group)
    assert scene.granted() == [7, 8, 0, 1]


def test_ranks_wait_for_each_other_and_for_their_parameters(scene: Scene) -> None:
    scene.queue(0)
    scene.desk.next_lease("g0", "run", "g", 1, 0, 2, 0)
    assert not scene.effects
    scene.desk.next_lease("g1", "run", "g", 1, 1, 2, 0)
    assert [type(each.message) for each in scene.take(Tell)] == [GroupReady, LeaseGranted]
    assert not scene.replies()
    scene.desk.bind("run", 1, b"parameters")
    assert scene.replies() == {"g0": ("run", None, b"parameters"), "g1": ("run", None, b"parameters")}


def test_closing_ends_leases_that_nobody_took_up_and_grants_no_more(scene: Scene) -> None:
    scene.queue(3)
    scene.ask()
    [waiting] = scene.run.leases.values()
    running = scene.lend(4, "h")
    scene.desk.stop_wanted("stop", running.number)
    scene.ask("idle")
    for _ in range(2):
        scene.desk.close("run")
    assert (waiting.state, running.state) == ("over", "running")
    assert scene.replies() == {"g0": None, "idle0": None, "stop": True}
    scene.queue(5)
    assert scene.granted() == []
    scene.leave(running, 0, "interrupted")
    assert not scene.run.leases
    scene.ask("h", after=running.number)
    assert scene.replies() == {"h0": None}


# ------------------------------------------------------------------------------------------------------- states, fences


# ---------------------------------------------------------------------------------------------- groups that drain, end
def test_the_trial_of_a_drained_group_continues_first_in_another(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    scene.queue(4)
    scene.desk.stop_wanted("stop", lease.number)
    scene.desk.drain("g")
    assert (lease.state, scene.replies()) == ("moving", {"stop": True})
    scene.leave(lease, 0, "interrupted")
    scene.ask("g", size=1, after=lease.number)
    assert not scene.replies(), "the other rank may still need it"
    scene.leave(lease, 1, "interrupted")
    assert scene.replies() == {"g0": None}
    scene.ask("other", start=2)
    assert scene.granted() == [3]


def test_processes_that_ended_before_they_asked_get_no_trial(scene: Scene) -> None:
    scene.queue(0)
    scene.end_group()
    scene.ask()
    assert (scene.granted(), scene.replies()) == ([], {"g0": None})


def test_a_node_lost_before_its_drained_trial_costs_no_restart(scene: Scene) -> None:
    scene.lend(3)
    scene.desk.drain("g")
    scene.end_group(dead={0: "Ray has lost the node"})
    assert not scene.told(TrialLeft)
    scene.ask(start=2)
    assert scene.granted() == [3]


@pytest.mark.parametrize("is_moving", [False, True])
def test_a_canceled_trial_saves_and_leaves_and_does_not_continue(scene: Scene, is_moving: bool) -> None:
    lease = scene.lend(3)
    if is_moving:
        scene.desk.drain("g")
    scene.desk.cancel("run", 3)
    scene.desk.stop_wanted("stop", lease.number)  # its rank 0 asks only now
    assert scene.replies() == {"stop": True}
    scene.leave(lease, 0, "interrupted")
    scene.ask("other", start=2)
    assert (lease.state, scene.granted()) == ("over", [])


def test_a_canceled_trial_leaves_the_queue_and_its_group_at_once(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.desk.stop_wanted("stop", lease.number)
    scene.queue(4, 5)
    for trial in (3, 4, 9):
        scene.desk.cancel("run", trial)
    assert scene.replies() == {"stop": True}
    scene.end_group()  # also if its group ends before it has left
    scene.ask(start=2)
    assert scene.granted() == [5]


@pytest.mark.parametrize("is_moving", [False, True])
def test_a_canceled_trial_whose_group_ends_is_not_queued_again(scene: Scene, is_moving: bool) -> None:
    scene.queue(3)
    scene.ask()
    if is_moving:
        scene.take_up()
        scene.desk.drain("g")
    scene.effects.clear()
    scene.desk.cancel("run", 3)
    scene.end_group()
    scene.ask(start=2)
    assert scene.granted() == []


def test_idle_groups_are_retired_unless_a_trial_of_their_shape_waits(scene: Scene) -> None:
    scene.add("other", shape="other")
    scene.queue(0, client="other")
    scene.lend(3)
    for name in "bcd":
        scene.ask(name)
    scene.desk.next_lease("starting0", "run", "starting", 1, 0, 2, 0)
    scene.desk.retire_idle("run", 2)
    assert scene.replies() == {"d0": None, "c0": None}
    scene.run.queue.update({4: None})
    scene.desk.retire_idle("run", 2)
    assert not scene.group("b").retiring


def test_a_rank_that_outlives_its_group_gets_no_lease(scene: Scene) -> None:
    scene.ask(start=1)
    scene.end_group(start=1)
    scene.queue(0)
    scene.ask(start=1)
    assert scene.replies() == {"g0": None}
    assert scene.granted() == []


def test_a_group_that_died_before_it_took_up_a_trial_gives_it_back(scene: Scene) -> None:
    scene.queue(3)
    scene.ask("dead")
    scene.desk.bind("run", 1, b"")
    scene.end_group("dead")
    scene.ask("alive", start=2)
    messages = [each.message for each in scene.take(Tell)]
    assert not [each for each in messages if isinstance(each, TrialLeft)]
    assert [each.group for each in messages if isinstance(each, LeaseGranted)] == ["dead", "alive"]


def test_ranks_of_a_group_meet_at_the_address_of_the_first(scene: Scene) -> None:
    scene.desk.address("second", 1, None)
    scene.desk.address("of another start", 2, None)
    assert not scene.replies()
    scene.desk.address("first", 1, ("10.0.0.7", 4242))
    scene.desk.address("third", 1, None)
    assert scene.replies() == dict.fromkeys(("first", "second", "third"), ("10.0.0.7", 4242))


def test_an_unfit_process_says_why_and_waits_for_the_end_of_the_run(scene: Scene) -> None:
    why = Unfit(message="no data here")
    scene.desk.broken("call", "run", "g", why)
    [message] = scene.told(WorkerUnfit)
    assert (message.group, message.why) == ("g", why)
    assert not scene.replies()
    scene.desk.close("run")
    assert scene.replies() == {"call": None}
    scene.desk.broken("late", "run", "g", why)
    assert scene.replies() == {"late": None}


def test_a_death_has_its_nodes_and_a_failed_gpu_is_told_to_all(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    ended = GroupEnded(group=lease.group.name, start=lease.group.start, dead={1: ""}, nodes={1: "n1"})
    scene.desk.group_ended("run", ended)
    [left] = scene.told(TrialLeft)
    assert (left.dead, left.nodes) == ((1,), ("n1",))
    scene.desk.gpu_failed("run", 3, "n1")
    assert [(each.trial, each.node) for each in scene.told(GpuFailed)] == [(3, "n1")]


# ----------------------------------------------------------------- groups that train on while a checkpoint is written
def freed(scene: Scene, trial: int, size: int = 1) -> Lease:
    """Lend a group to a trial, which leaves it before its last checkpoint is written; another one gets the group."""
    lease = scene.lend(trial, size=size)
    for rank in range(size):
        scene.leave(lease, rank, "writing")
    return lease


@pytest.mark.parametrize(("outcome", "continues"), [("yielded", True), ("stopped", False), ("completed", False)])
def test_a_freed_group_trains_another_trial_before_the_first_ones_lease_is_over(
    scene: Scene, outcome: LeaseOutcome, continues: bool
) -> None:
    lease = freed(scene, 3, size=2)
    assert [(each.lease, each.trial) for each in scene.told(GroupFreed)] == [(lease.number, 3)]
    other = scene.lend(4, size=2, after=lease.number)
    assert (lease.state, other.group) == ("running", lease.group)
    assert (scene.run.held, len(scene.run.leases)) == (1, 2)
    scene.leave(lease, 0, outcome)
    assert [each.freed for each in scene.told(LeaseOver)] == [True]
    assert (lease.state, other.state, other.group.lease) == ("over", "running", other)
    assert list(scene.run.queue) == ([3] if continues else [])


def test_a_trial_whose_checkpoint_is_written_is_not_granted_again_yet(scene: Scene) -> None:
    lease = freed(scene, 3)
    scene.queue(3, 4)
    scene.ask(after=lease.number)
    assert scene.granted() == [4]
    scene.leave(lease, 0, "stopped")
    scene.ask("other", start=2)
    assert scene.granted() == [3]


def test_a_canceled_trial_that_yields_does_not_continue(scene: Scene) -> None:
    lease = freed(scene, 3)
    scene.desk.cancel("run", 3)
    scene.leave(lease, 0, "yielded")
    assert (lease.state, list(scene.run.queue)) == ("over", [])


def test_the_death_of_a_freed_group_ends_both_leases(scene: Scene) -> None:
    lease = freed(scene, 3)
    scene.lend(4, after=lease.number)
    scene.end_group()
    left = [(each.trial, each.outcome, each.failure and each.failure.kind) for each in scene.told(TrialLeft)]
    assert left == [(3, "errored", "node"), (4, "errored", "died")], "the one that was written is not to blame"
    assert not scene.run.leases


def test_a_driver_learns_that_another_rank_could_not_write_what_was_left(scene: Scene) -> None:
    lease = freed(scene, 3, size=2)
    scene.leave(lease, 0, "errored", failure=COLLECTIVE)
    assert [(each.trial, each.failure) for each in scene.told(TrialLeft)] == [(3, COLLECTIVE)]
    assert lease.state == "over"


def test_a_drained_group_that_ends_before_all_is_written_is_no_failure(scene: Scene) -> None:
    freed(scene, 3)
    scene.desk.drain("g")
    scene.end_group()
    assert (scene.told(TrialLeft), list(scene.run.queue)) == ([], [3])


def test_ranks_that_write_are_not_ended(scene: Scene) -> None:
    lease = freed(scene, 3, size=2)
    scene.ask(size=2, after=lease.number)
    scene.desk.close("run")
    assert not scene.replies()
    scene.leave(lease, 0, "completed")
    assert scene.replies() == {"g0": None, "g1": None}


def test_a_client_that_takes_too_long_to_write_does_not_take_the_group_with_it(scene: Scene) -> None:
    scene.add("a")
    scene.add("b")
    scene.queue(1, client="a")
    scene.ask()
    lease = scene.take_up(client="a")
    scene.leave(lease, 0, "writing")
    scene.queue(2, client="b")
    scene.ask(after=lease.number)
    other = scene.take_up(client="b")
    scene.desk.remove("a")
    scene.desk.evict("a")
    assert "a" not in scene.desk.clients
    assert (lease.state, other.state) == ("over", "running")


def test_a_rank_that_failed_while_the_other_left_ends_the_lease(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    scene.leave(lease, 0, "writing")
    scene.leave(lease, 1, "errored", "boom")
    assert (lease.state, lease.group.retiring) == ("over", True)
    assert [each.outcome for each in scene.told(TrialLeft)] == ["errored"]


@pytest.mark.parametrize(
    ("queued", "max_slots", "closes", "drains", "waits"),
    [
        ((4,), None, False, False, True),
        ((), None, False, False, False),
        ((3,), None, False, False, False),  # itself
        ((4,), 1, False, False, True),
        ((4,), None, True, False, False),
        ((4,), None, False, True, False),
    ],
)
def test_a_trial_leaves_early_only_if_another_one_would_get_its_group(
    scene: Scene, queued: tuple[int, ...], max_slots: float | None, closes: bool, drains: bool, waits: bool
) -> None:
    scene.desk.set_share("run", 42, 1.0, max_slots)
    lease = scene.lend(3)
    scene.queue(*queued)
    if closes:
        scene.desk.close("run")
    if drains:
        scene.desk.drain("g")
    scene.desk.waited_for("call", lease.number)
    scene.desk.waited_for("late", 99)
    assert scene.replies() == {"call": waits, "late": False}
    assert scene.run.held == 1


# --------------------------------------------------------------------------------------------- ranks that fail or hang
def test_ranks_with_invalid_hyperparameters_keep_their_group(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    assert scene.leave(lease, 1, "invalid_hp", "no") == [After(PEERS_GRACE_S, "expire", (lease.number,))]
    assert lease.state == "failed"
    scene.leave(lease, 0, "invalid_hp", "no")
    assert [message.outcome for message in scene.told(TrialLeft)] == ["invalid_hp"]
    assert not lease.group.retiring
    assert scene.lend(4, size=2, after=lease.number).number == lease.number + 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("outcome", "alone"), [("errored", False), ("stopped", True)])
def test_a_rank_that_left_first_retires_the_group_after_a_grace(
    scene: Scene, outcome: LeaseOutcome, alone: bool, rank: int
) -> None:
    lease = scene.lend(3, size=2)
    assert scene.leave(lease, rank, outcome, "boom", alone=alone) == [After(PEERS_GRACE_S, "expire", (lease.number,))]
    assert [(message.outcome, message.error) for message in scene.told(TrialLeft)] == [(outcome, "boom")]
    scene.desk.expire(lease.number)
    assert (lease.state, lease.group.retiring, lease.group.lease) == ("over", True, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_moving_trial_continues_elsewhere_after_a_rank_left_alone(scene: Scene, rank: int) -> None:
    lease = scene.lend(3, size=2)
    scene.ask("other", start=2, size=2)
    scene.desk.drain("g")
    scene.leave(lease, rank, "interrupted", alone=True)
    assert scene.granted() == [], "the other rank may still train it"
    scene.desk.expire(lease.number)
    assert (scene.granted(), lease.group.retiring) == ([3], True)


def test_ranks_that_left_differently_retire_their_group(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    scene.leave(lease, 1, "stopped")
    scene.leave(lease, 0, "completed")
    assert lease.group.retiring


def test_a_stale_process_has_its_group_replaced_without_a_loss(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    scene.leave(lease, 1, "completed", stale="a thread is still running")
    scene.leave(lease, 0, "completed")
    [retired] = scene.told(GroupRetired)
    assert (retired.group, retired.trial, retired.reason) == ("g", 3, "a thread is still running")
    scene.queue(4)
    assert scene.granted() == [], "the next trial is for the processes that replace them"
    scene.end_group(dead={})
    [ended] = scene.told(GroupEnded)
    assert not ended.is_lost
    scene.ask(start=2, size=2)
    assert scene.granted() == [4]


@pytest.mark.parametrize("first", [0, 1])
def test_a_ranks_own_error_counts_before_that_of_a_collective(scene: Scene, first: int) -> None:
    lease = scene.lend(3, size=2)
    for rank in (first, 1 - first):
        if rank == 1:
            scene.leave(lease, 1, "errored", "its own error")
        else:
            scene.leave(lease, 0, "errored", "rank 1 failed", failure=COLLECTIVE)
    assert [(left.outcome, left.error) for left in scene.told(TrialLeft)] == [("errored", "its own error")]


def test_the_error_of_a_collective_counts_where_no_other_comes(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    grace = After(CAUSE_GRACE * PEERS_GRACE_S, "expire", (lease.number,))
    assert scene.leave(lease, 0, "errored", "from 0", failure=COLLECTIVE) == [grace]
    scene.desk.expire(lease.number)
    assert [(left.error, left.failure) for left in scene.told(TrialLeft)] == [("from 0", COLLECTIVE)]
    lease = scene.lend(3, "h", size=2)
    scene.leave(lease, 0, "errored", "from 0", failure=COLLECTIVE)
    scene.leave(lease, 1, "errored", "from 1", failure=COLLECTIVE)
    assert [left.error for left in scene.told(TrialLeft)] == ["from 0"], "later ones may follow from the first"


@pytest.mark.parametrize("order", list(itertools.permutations(["its death", "what the other says", "the grace"])))
def test_a_death_is_the_cause_of_another_ranks_error_in_a_collective(scene: Scene, order: tuple[str, ...]) -> None:
    """Unless the driver had to hear of it before Ray knew of the death."""
    lease = scene.lend(3, size=2)
    graces: list[After] = []
    for event in order:
        match event:
            case "its death":
                scene.end_group(dead={1: ""})
            case "what the other says":
                graces = scene.leave(lease, 0, "errored", "Connection closed by peer", failure=COLLECTIVE)
            case "the grace" if graces:
                scene.desk.expire(lease.number)
    [left] = scene.told(TrialLeft)
    if order == ("what the other says", "the grace", "its death"):
        assert (left.error, left.failure, left.dead) == ("Connection closed by peer", COLLECTIVE, ())
    else:
        assert left.error == "the process of rank 1 of worker group g died"
        # The other rank knows how far the trial came, if it comes to say so.
        batches = 6 if order.index("what the other says") < order.index("its death") else -1
        assert (left.failure, left.dead) == (Failure(kind="died", batches=batches), (1,))


@pytest.mark.parametrize(
    ("cause", "kind"),
    [("", "died"), ("Ray has lost the node", "node"), ("its node was running low on memory", "host_oom")],
)
def test_the_cause_of_a_death_is_the_kind_of_failure(scene: Scene, cause: str, kind: FailureKind) -> None:
    scene.lend(3)
    scene.end_group(dead={0: cause})
    [left] = scene.told(TrialLeft)
    assert (left.failure, left.dead) == (Failure(kind=kind), (0,))
    assert left.error == f"a process of worker group g died{f': {cause}' if cause else ''}"


@pytest.mark.parametrize(
    ("size", "dead", "own", "error"),
    [
        (2, {}, "", "a process of worker group g died"),
        (4, {1: "x", 2: "y"}, "", "the processes of ranks 1, 2 of worker group g died: x"),
        (2, {}, "ConnectionLost: 10.0.0.7:1", "a process of worker group g ended: ConnectionLost: 10.0.0.7:1"),
    ],
)
def test_a_deaths_error_names_its_ranks_or_how_they_ended(
    scene: Scene, size: int, dead: dict[int, str], own: str, error: str
) -> None:
    lease = scene.lend(3, size=size)
    scene.leave(lease, 0, "errored", "Connection reset by peer", failure=COLLECTIVE)
    scene.end_group(dead=dead, error=own)
    assert [(left.error, left.failure) for left in scene.told(TrialLeft)] == [(error, Failure(kind="died", batches=6))]


# -------------------------------------------------------------------------------------------------------- many clients
def have(scene: Scene, groups: int, shape: str = "") -> None:
    """So many groups ask for trials, which run."""
    for number in range(groups):
        scene.ask(f"{shape}{number}", start=number, shape=shape)
    begin(scene)


def begin(scene: Scene) -> None:
    """All leases are taken up."""
    for client in list(scene.desk.clients.values()):
        for number in list(client.leases):
            scene.desk.bind(client.name, number, b"")
            scene.desk.begun(None, number)


def finish(scene: Scene, lease: Lease, outcome: LeaseOutcome = "completed") -> None:
    """A trial leaves, and its group asks for another, which begins."""
    scene.leave(lease, 0, outcome)
    scene.ask(lease.group.name, start=lease.group.start, after=lease.number)
    begin(scene)


def trials(client: Client) -> list[int]:
    return sorted(lease.trial for lease in client.leases.values())


def save_and_leave(scene: Scene) -> list[tuple[str, int]]:
    """Trials that are to save do, and their groups ask for others; returns which did."""
    leases = [lease for client in scene.desk.clients.values() for lease in client.leases.values()]
    moving = [lease for lease in leases if lease.state == "moving"]
    for lease in moving:
        finish(scene, lease, "interrupted")
    return [(lease.client.name, lease.trial) for lease in moving]


def test_trials_go_to_groups_of_their_shape_alone(scene: Scene) -> None:
    two = scene.add("of two slots", shape="2")
    scene.queue(0, client=two.name)
    have(scene, 2)
    assert not two.leases
    have(scene, 1, shape="2")
    assert trials(two) == [0]


def test_messages_go_to_the_client_concerned_and_the_groups_owner(
    scene: Scene,
) -> None:
    scene.add("other", endpoint=("host", 1, b"key"))
    scene.queue(7, client="other")
    scene.ask()
    lease = scene.take_up(client="other")
    assert scene.replies() == {"g0": ("other", ("host", 1, b"key"), b"parameters")}
    scene.leave(lease, 0, "completed", stale="a thread is still running")
    assert [(each.client, type(each.message)) for each in scene.take(Tell)] == [
        ("run", GroupReady),
        ("other", LeaseGranted),
        ("run", LeaseGranted),
        ("other", TrialLeft),
        ("run", TrialLeft),
        ("run", GroupRetired),
        ("other", LeaseOver),
    ]


@pytest.mark.parametrize(("weights", "groups"), [((1, 1, 2), 2), ((1, 3), 2), ((1, 1, 1), 1)])
def test_shares_are_by_weight_over_time_if_there_are_few_groups(
    scene: Scene, weights: tuple[int, ...], groups: int
) -> None:
    clients = [scene.add(f"weight-{weight}-{number}", weight=weight) for number, weight in enumerate(weights)]
    for client in clients:
        scene.queue(*range(8000), client=client.name)
    have(scene, groups)
    seconds = dict.fromkeys((client.name for client in clients), 0)
    for _ in range(1000):  # trials of two seconds
        for client in clients:
            seconds[client.name] += 2 * len(client.leases)
        scene.desk.demands({client.name: seconds[client.name] / client.weight for client in clients})
        for lease in [lease for client in clients for lease in client.leases.values()]:
            scene.leave(lease, 0, "completed")
            scene.ask(lease.group.name, start=lease.group.start, after=lease.number)
            scene.effects.clear()
    due = [2000 * groups * weight / sum(weights) for weight in weights]
    assert list(seconds.values()) == pytest.approx(due, abs=2 * QUANTUM)


def test_a_higher_priority_takes_groups_at_once(scene: Scene) -> None:
    usual, urgent = scene.add("usual"), scene.add("urgent", priority=1)
    scene.queue(0, 1, 2, client="usual")
    have(scene, 3)
    scene.queue(8, 9, client="urgent")
    assert save_and_leave(scene) == [("usual", 1), ("usual", 2)], "the latest ones"
    assert (trials(urgent), sorted(usual.queue)) == ([8, 9], [1, 2])
    for lease in list(urgent.leases.values()):
        finish(scene, lease)
    assert trials(usual) == [0, 1, 2]


def test_a_higher_priority_takes_no_more_than_its_limit(scene: Scene) -> None:
    scene.add("usual")
    scene.add("urgent", priority=1, max_slots=1)
    scene.queue(0, 1, 2, client="usual")
    have(scene, 3)
    scene.queue(7, 8, 9, client="urgent")
    assert save_and_leave(scene) == [("usual", 2)]
    assert save_and_leave(scene) == []


def test_clients_of_an_account_hold_no_more_slots_than_it_may(scene: Scene) -> None:
    first, second = (scene.add(name, account="agent", account_slots=3) for name in ("first", "second"))
    other = scene.add("other")
    scene.queue(0, 1, client="first")
    scene.queue(0, 1, client="second")
    have(scene, 5)
    assert (len(first.leases), len(second.leases)) == (2, 1)
    scene.queue(0, 1, client="other")
    assert len(other.leases) == 2, "it has no account"
    finish(scene, next(iter(first.leases.values())))
    assert len(second.leases) == 2


def test_a_large_group_of_an_account_is_not_starved_by_its_small_ones(scene: Scene) -> None:
    small = scene.add("small", account="agent", account_slots=2)
    large = scene.add("large", account="agent", account_slots=2, size=2, shape="large")
    scene.queue(0, 1, 2, 3, client="small")
    have(scene, 2)
    scene.queue(9, client="large")
    scene.ask("wide", shape="large", start=9)
    finish(scene, next(iter(small.leases.values())))
    assert (len(small.leases), len(large.leases)) == (1, 0), "the slot that returns is kept for it"
    finish(scene, next(iter(small.leases.values())))
    assert (len(small.leases), trials(large)) == (0, [9])


def test_an_equal_priority_waits_for_the_end_of_a_trial(scene: Scene) -> None:
    first, second = scene.add("first"), scene.add("second", weight=100)
    scene.queue(0, 1, 2, client="first")
    have(scene, 2)
    scene.queue(0, client="second")
    assert save_and_leave(scene) == []
    finish(scene, next(iter(first.leases.values())))
    assert len(second.leases) == 1


def test_a_client_is_removed_once_its_trials_have_left(scene: Scene) -> None:
    scene.add("other")
    lease = scene.lend(3, client="other")
    scene.desk.stop_wanted("stop", lease.number)
    for _ in range(2):
        scene.desk.remove("other")
    assert scene.replies() == {"stop": True}
    assert scene.take(After) == [After(LEAVE_S, "evict", ("other",))]
    assert not scene.take(ClientLeft)
    scene.leave(lease, 0, "interrupted")
    assert [left.client for left in scene.take(ClientLeft)] == ["other"]
    scene.desk.remove("other")
    scene.desk.evict("other")
    assert list(scene.desk.clients) == ["run"]


def test_a_trial_that_outstays_its_removed_client_has_its_group_end(scene: Scene) -> None:
    scene.add("other")
    scene.lend(3, client="other")
    scene.desk.remove("other")
    scene.desk.evict("other")
    [ended] = scene.told(GroupEnded)
    assert (ended.group, ended.is_lost) == ("g", False)
    assert [left.client for left in scene.take(ClientLeft)] == ["other"]


def test_all_clients_of_a_shape_hear_that_it_is_unfit(scene: Scene) -> None:
    for name, shape in (("a", "x"), ("b", "y")):
        scene.add(name, shape=shape)
    why = Unfit(message="no torch")
    scene.desk.unfit("x", why)
    assert [(each.client, each.message.why) for each in scene.take(Tell)] == [("a", why)]  # type: ignore[union-attr]


def test_a_shrinking_owner_ends_idle_groups_then_low_priorities(scene: Scene) -> None:
    scene.add("low", priority=50)
    scene.add("high", priority=1)
    for client, trial, name in (("high", 0, "a"), ("low", 1, "b"), ("low", 2, "c")):
        scene.lend(trial, name, client=client)
    scene.ask("idle")
    ended = []
    for keep in (4, 3, 2, 1):
        scene.desk.shrink("run", keep, at_once=False)
        ended.append(" ".join(name for name in ("a", "b", "c", "idle") if scene.group(name).retiring))
    assert ended == ["", "idle", "c idle", "b c idle"]


def test_a_shrinking_owner_in_haste_has_trials_save_and_leave(scene: Scene) -> None:
    leases = [scene.lend(trial, name) for trial, name in enumerate("ab")]
    scene.desk.shrink("run", 1, at_once=False)
    assert [(lease.state, lease.group.retiring) for lease in leases] == [("running", False), ("running", True)]
    for _ in range(2):  # it does not matter how often
        scene.desk.shrink("run", 1, at_once=True)
    assert [lease.state for lease in leases] == ["running", "moving"]
    scene.leave(leases[1], 0, "interrupted")
    assert list(scene.run.queue) == [1]


# ------------------------------------------------------------------------------------------------------- new processes
def test_a_trial_that_needs_new_processes_renews_a_used_group(scene: Scene) -> None:
    lease = scene.lend(0)
    scene.ask(after=lease.number)
    scene.leave(lease, 0, "completed")
    scene.effects.clear()
    scene.desk.need_new("run", [1])
    scene.queue(1)
    [retired] = [each.message for each in scene.take(Tell)]
    assert isinstance(retired, GroupRetired)
    assert (retired.group, retired.reason) == ("g", "")
    assert scene.replies() == {"g0": None}
    scene.end_group(dead={})
    scene.ask(start=2)
    assert scene.granted() == [1]


def test_only_one_used_group_ends_for_a_trial(scene: Scene) -> None:
    for lease in [scene.lend(10, "a"), scene.lend(11, "b", start=2)]:
        scene.leave(lease, 0, "completed")
        scene.ask(lease.group.name, start=lease.group.start, after=lease.number)
    scene.effects.clear()
    scene.desk.need_new("run", [1])
    scene.queue(1, 2)
    told = [each.message for each in scene.take(Tell)]
    [retired] = [each for each in told if isinstance(each, GroupRetired)]
    [granted] = [each for each in told if isinstance(each, LeaseGranted)]
    assert granted.trial == 2
    assert {retired.group, granted.group} == {"a", "b"}


def test_another_used_group_ends_if_a_renewed_one_is_lost(scene: Scene) -> None:
    first, second = scene.lend(10, "a"), scene.lend(11, "b", start=2)
    scene.leave(first, 0, "completed")
    scene.ask("a", after=first.number)
    scene.desk.need_new("run", [1])
    scene.queue(1)
    scene.end_group("a", dead={})
    scene.end_group("a", start=3)
    scene.effects.clear()
    scene.leave(second, 0, "completed")
    scene.ask("b", start=2, after=second.number)
    assert [each.group for each in scene.told(GroupRetired)] == ["b"]


@pytest.mark.parametrize("size", [1, 2])
def test_an_import_that_fails_in_used_processes_is_tried_in_new_ones(scene: Scene, size: int) -> None:
    lease = scene.lend(0, size=size)
    late = scene.leave(lease, size - 1, "unloaded", alone=True)
    for rank in range(size - 1):
        scene.leave(lease, rank, "unloaded", alone=True)
    assert [each.method for each in late] == ["expire"] * (size - 1)
    told = [each.message for each in scene.take(Tell)]
    assert [each.outcome for each in told if isinstance(each, TrialLeft)] == ["interrupted"]
    assert [each.reason for each in told if isinstance(each, GroupRetired)] == [""]
    scene.ask(size=size, after=lease.number)
    assert scene.replies() == {f"g{rank}": None for rank in range(size)}
    scene.end_group(dead={})
    scene.ask(start=2, size=size)
    assert scene.granted() == [0]


def demand(name: str, groups: int = 100, **fields: float) -> Demand:
    return Demand(name=name, groups=groups, **fields)  # type: ignore[arg-type]


def test_equal_weights_have_equal_shares_and_the_first_the_rest() -> None:
    assert Shares().divide([demand("a"), demand("b"), demand("c")], slots=8) == {"a": 3, "b": 3, "c": 2}


def test_shares_are_by_weight() -> None:
    demands = [demand("a"), demand("b"), demand("c", weight=2)]
    assert Shares().divide(demands, slots=8) == {"a": 2, "b": 2, "c": 4}


def test_shares_count_slots_not_groups() -> None:
    assert Shares().divide([demand("large", size=4), demand("small")], slots=8) == {"large": 1, "small": 4}


def test_what_one_does_not_need_goes_to_the_others() -> None:
    assert Shares().divide([demand("a", 1), demand("b"), demand("c", 0)], slots=6) == {"a": 1, "b": 5, "c": 0}


def test_a_higher_priority_has_all_that_it_needs_first() -> None:
    demands = [demand("default"), demand("urgent", 3, priority=1), demand("later", priority=99)]
    assert Shares().divide(demands, slots=5) == {"default": 2, "urgent": 3, "later": 0}


@pytest.mark.parametrize(("size", "expected"), [(1, 5), (2, 2), (0.25, 20)])
def test_nobody_has_more_slots_than_its_limit(size: float, expected: int) -> None:
    assert Shares().divide([demand("a", size=size, max_slots=5)], slots=64) == {"a": expected}


def test_the_experiments_of_an_account_share_its_limit_in_slots() -> None:
    mine = [Demand(name=name, groups=9, size=2, unit=2, account="agent", account_slots=3) for name in "ab"]
    assert Shares().divide([*mine, demand("other", 3)], slots=20) == {"a": 2, "b": 1, "other": 3}


def test_a_group_that_fits_nowhere_gets_nothing_and_holds_nothing_up() -> None:
    assert Shares().divide([demand("huge", size=16), demand("a")], slots=8) == {"huge": 0, "a": 8}


def test_trials_that_share_a_slot_are_a_fraction_of_it() -> None:
    assert Shares().divide([demand("quarters", size=0.25), demand("whole")], slots=2) == {"quarters": 4, "whole": 1}


def turns(demands: list[Demand], slots: int, seconds: int) -> dict[str, float]:
    """The slot-seconds that each has in so many seconds."""
    shares, had = Shares(), dict.fromkeys((each.name for each in demands), 0.0)
    for _ in range(seconds):
        given = shares.divide(demands, slots)
        held = {each.name: given[each.name] * each.size for each in demands}
        shares.passed(1.0, held, {each.name: each.weight for each in demands})
        for name, now in held.items():
            had[name] += now
    return had


def test_a_large_group_is_not_starved_by_small_ones_nor_they_by_it() -> None:
    had = turns([demand("small"), demand("large", size=4)], slots=4, seconds=4000)
    assert had["small"] == pytest.approx(8000, abs=4 * QUANTUM)
    assert had["large"] == pytest.approx(8000, abs=4 * QUANTUM)


def test_turns_are_by_weight() -> None:
    had = turns([demand("small", weight=3), demand("large", size=4)], slots=4, seconds=4000)
    assert had["small"] / had["large"] == pytest.approx(3, rel=0.1)


def test_the_slot_that_is_left_over_goes_round() -> None:
    had = turns([demand("a"), demand("b"), demand("c")], slots=4, seconds=3000)
    assert all(each == pytest.approx(4000, abs=2 * QUANTUM) for each in had.values())


def test_whoever_comes_later_has_not_saved_up_for_what_it_did_not_ask() -> None:
    shares, a, large = Shares(), demand("a"), demand("large", size=4)
    for _ in range(100):
        shares.divide([a], slots=4)
        shares.passed(60.0, {"a": 4}, {"a": 1.0})
    had = {"a": 0.0, "large": 0.0}
    for _ in range(1000):
        given = shares.divide([a, large], slots=4)
        held = {"a": given["a"] * 1.0, "large": given["large"] * 4.0}
        shares.passed(1.0, held, {"a": 1.0, "large": 1.0})
        had = {name: had[name] + held[name] for name in had}
    assert had["large"] == pytest.approx(2000, abs=4 * QUANTUM)
