"""Which group trains which trial, and which lease counts: the desk's decisions, without asyncio."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from dray.desk.client import Client
from dray.desk.failure import Failure, FailureKind
from dray.desk.lease import Group, Lease, State
from dray.desk.leases import CAUSE_GRACE, PEERS_GRACE_S, Leases
from dray.desk.messages import (
    Departure,
    DeskReport,
    GroupEnded,
    GroupReady,
    GroupRetired,
    LeaseGranted,
    LeaseOutcome,
    Message,
    ReportReceived,
    TrialLeft,
)
from dray.desk.results import PendingResults
from dray.desk.shares import QUANTUM

COLLECTIVE = Failure(kind="collective", where="RuntimeError at model.py:3 in train_batch", batches=6)
M = TypeVar("M")


class Scene:
    """The queue, the groups and the leases, and what the driver has been told."""

    def __init__(self) -> None:
        self.woken: set[object] = set()
        self.leases = Leases(self.woken.add)
        self.clients: list[Client] = []
        self.client = self.add("run")

    def add(self, name: str, **share: Any) -> Client:
        self.clients.append(Client(name=name, results=PendingResults(lambda: None), **share))
        self.leases.add(self.clients[-1])
        return self.clients[-1]

    def news(self) -> list[Message]:
        """Messages since the last call."""
        news, self.client.messages = self.client.messages, []
        return news

    def news_of(self, kind: type[M]) -> list[M]:
        return [message for message in self.news() if isinstance(message, kind)]

    def ask(self, group: str = "g", *, start: int = 1, size: int = 1, after: int = 0) -> Group | None:
        """All ranks of a group ask for a lease."""
        [*_, found] = [self.leases.ask(self.client, group, start, rank, size, first=not after) for rank in range(size)]
        return found

    def lend(self, trial: int, group: str = "g", *, start: int = 1, size: int = 1, after: int = 0) -> Lease:
        """Queue a trial, which the ranks of a group get and take up."""
        self.leases.enqueue(self.client, [trial], first=False)
        state = self.ask(group, start=start, size=size, after=after)
        [granted] = self.news_of(LeaseGranted)
        assert (granted.trial, granted.group) == (trial, group)
        self.leases.bind(granted.lease, {"number": granted.lease})
        assert state is not None
        assert state.lease is not None
        state.idle.clear()  # they have got it
        self.leases.begin(granted.lease)
        return state.lease

    def leave(
        self,
        lease: Lease,
        rank: int,
        outcome: LeaseOutcome,
        error: str = "",
        *,
        failure: Failure | None = None,
        alone: bool = False,
        stale: str = "",
    ) -> float | None:
        departure = Departure(outcome=outcome, error=error, failure=failure, alone=alone, stale=stale)
        return self.leases.leave(lease.number, rank, departure)

    def report(self, lease: Lease, number: int) -> None:
        """Rank 0 reports, and waits for a decision."""
        self.leases.report(lease, DeskReport(), is_final=False)
        lease.decisions[number] = None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def granted(news: Sequence[Message]) -> list[int]:
    return [message.trial for message in news if isinstance(message, LeaseGranted)]


# ----------------------------------------------------------------------------------------------------------- the queue
def test_trials_are_granted_in_queue_order_and_a_restarted_one_goes_first(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [0, 1], first=False)
    scene.leases.enqueue(scene.client, [7, 8], first=True)
    for group in "abcd":
        scene.ask(group)
    assert granted(scene.news()) == [7, 8, 0, 1]


def test_each_free_group_gets_a_trial_also_one_that_was_replaced(scene: Scene) -> None:
    first = scene.lend(0, "a")
    for group in "bc":
        scene.ask(group, start=ord(group))
    scene.leave(first, 0, "completed")
    scene.ask("a", after=first.number)
    scene.leases.end_group(scene.client, "b", ord("b"), {}, "")
    scene.ask("b", start=99)  # the one in its place
    scene.news()
    scene.leases.enqueue(scene.client, [1, 2, 3, 4], first=False)
    leases = scene.news_of(LeaseGranted)
    assert sorted(lease.group for lease in leases) == ["a", "b", "c"]
    assert [lease.trial for lease in leases] == [1, 2, 3]
    assert list(scene.client.queue) == [4]


def test_a_lease_says_which_gpus_the_group_has(scene: Scene) -> None:
    types = []
    for trial, (group, start, arrives) in enumerate([("g", 1, "A100"), ("h", 2, ""), ("g", 3, "L4")]):
        scene.leases.arrive(scene.client, group, "node", arrives)
        scene.ask(group, start=start)
        scene.leases.enqueue(scene.client, [trial], first=False)
        types += [message.gpu_type for message in scene.news_of(LeaseGranted)]
        scene.leases.end_group(scene.client, group, start, {}, "")
        scene.client.withdraw([trial])  # the group ended before it took the trial up
    assert types == ["A100", "", "L4"]


def test_no_lease_is_granted_before_every_rank_asks(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [0], first=False)
    scene.leases.ask(scene.client, "g", 1, 0, 2, first=True)
    assert scene.news() == []
    scene.leases.ask(scene.client, "g", 1, 1, 2, first=True)
    ready, lease = scene.news()
    assert isinstance(ready, GroupReady)
    assert isinstance(lease, LeaseGranted)


def test_a_withdrawn_trial_is_not_granted(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [3, 4, 5], first=False)
    scene.client.withdraw([3, 5, 9])
    scene.ask("a")
    scene.ask("b")
    assert granted(scene.news()) == [4]
    assert not scene.client.queue


def test_a_trial_stopped_while_queued_again_is_not_granted(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.report(lease, 1)
    scene.leave(lease, 0, "errored", "boom")
    scene.leases.enqueue(scene.client, [3], first=True)
    scene.leases.decide(scene.client, 3, 1, "stop")
    scene.news()
    scene.ask(after=lease.number)
    assert scene.news() == []


def test_closing_ends_leases_that_nobody_took_up_and_grants_no_more(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [3], first=False)
    group = scene.ask()
    assert group is not None
    assert group.lease is not None
    waiting = group.lease
    scene.news()
    running = scene.lend(4, "h")
    scene.leases.close(scene.client)
    assert (waiting.state, running.state) == (State.OVER, State.RUNNING)
    assert {waiting, running, group, running.group} <= scene.woken
    scene.leases.enqueue(scene.client, [5], first=False)
    assert granted(scene.news()) == []
    assert scene.client.leases
    scene.leave(running, 0, "interrupted")
    assert not scene.client.leases


# ------------------------------------------------------------------------------------------------------- states, fences
def test_a_lease_goes_from_granted_to_over(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [3], first=False)
    group = scene.ask(size=2)
    assert group is not None
    lease = group.lease
    assert lease is not None
    states = [lease.state]
    scene.leases.bind(lease.number, {})
    scene.leases.begin(lease.number)
    states.append(lease.state)
    scene.leave(lease, 0, "completed")
    states.append(lease.state)
    scene.leave(lease, 1, "completed")
    states.append(lease.state)
    assert states == [State.GRANTED, State.RUNNING, State.CONCLUDED, State.OVER]
    assert group.lease is None
    assert [message.outcome for message in scene.news_of(TrialLeft)] == ["completed"]


def test_what_comes_from_an_ended_lease_changes_nothing(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leave(lease, 0, "completed")
    scene.news()
    scene.leases.begin(lease.number)
    scene.leases.bind(lease.number, {"late": True})
    scene.leases.recorded({lease.number: 1})
    scene.leases.expire(lease.number)
    assert scene.leave(lease, 0, "errored", "late") is None
    assert (lease.state, scene.leases.live(lease.number), scene.news()) == (State.OVER, None, [])


def test_a_restarted_trial_is_fenced_from_its_earlier_lease_in_another_group(scene: Scene) -> None:
    old = scene.lend(3, "g", size=2)
    scene.leave(old, 0, "errored", "boom")
    new = scene.lend(3, "h")
    assert scene.leases.get(old.number) is old, "its rank 1 has not left"
    assert (scene.leases.live(old.number), scene.leases.live(new.number)) == (None, new)
    scene.leave(old, 1, "errored", "boom")
    assert scene.leases.live(new.number) is new


def test_errors_after_the_final_report_do_not_count(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leases.report(lease, DeskReport(final=True), is_final=True)
    states = [lease.state]
    scene.leases.end_group(scene.client, "g", 1, {0: ""}, "")
    assert scene.news_of(TrialLeft) == []
    assert [*states, lease.state] == [State.CONCLUDED, State.OVER]


def test_reports_count_until_the_driver_has_recorded_them(scene: Scene) -> None:
    lease = scene.lend(3)
    for _ in range(3):
        scene.leases.report(lease, DeskReport(), is_final=False)
    assert [message.trial for message in scene.news_of(ReportReceived)] == [3, 3, 3]
    scene.leases.recorded({lease.number: 2})
    assert lease.unrecorded == 1


# ------------------------------------------------------------------------------------------------pausing and stopping
def test_the_reply_to_a_report_is_the_decision_or_the_end(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.report(lease, 1)
    assert scene.leases.reply(lease, 1) is None
    scene.leases.decide(scene.client, 3, 1, "continue")
    assert scene.leases.reply(lease, 1) == "continue"
    scene.report(lease, 2)
    scene.leases.close(scene.client)
    assert scene.leases.reply(lease, 2) == "interrupt"
    scene.leases.decide(scene.client, 3, 2, "pause")
    assert lease.state is State.RUNNING, "it saves"
    scene.leases.end_group(scene.client, "g", 1, {0: ""}, "")
    scene.report(lease, 3)
    assert scene.leases.reply(lease, 3) == "fenced"


def test_a_trial_resumed_while_it_still_saves_waits_until_it_has_left(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.report(lease, 1)
    scene.leases.decide(scene.client, 3, 1, "pause")
    scene.leases.enqueue(scene.client, [3, 4], first=True)
    scene.ask("free")
    assert granted(scene.news()) == [4]
    assert scene.leases.live(lease.number) is lease, "it continues from what it saves now"
    scene.leave(lease, 0, "paused")
    scene.ask(after=lease.number)
    left, again = scene.news()
    assert isinstance(left, TrialLeft)
    assert left.outcome == "paused"
    assert isinstance(again, LeaseGranted)
    assert again.trial == 3


def test_a_trial_that_dies_while_it_saves_is_not_waited_for(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.report(lease, 1)
    scene.leases.decide(scene.client, 3, 1, "pause")
    scene.leases.enqueue(scene.client, [3], first=True)
    scene.leases.end_group(scene.client, "g", 1, {0: ""}, "")
    scene.ask(start=2)
    news = scene.news()
    assert [message.outcome for message in news if isinstance(message, TrialLeft)] == ["errored"]
    assert granted(news) == [3]


def test_a_restart_that_crosses_its_trials_pause_is_taken_back(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.report(lease, 1)
    scene.leave(lease, 0, "errored", "boom")
    again = scene.lend(3, after=lease.number)
    scene.leases.decide(scene.client, 3, 1, "pause")
    assert again.state is State.OVER
    scene.ask(after=again.number)
    scene.leases.enqueue(scene.client, [4], first=False)
    assert granted(scene.news()) == [4]


# -----------------------------------------------------------------------------------------------groups that drain, end
def test_the_trial_of_a_drained_group_continues_first_in_another(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leases.enqueue(scene.client, [4], first=False)
    scene.leases.drain("g")
    assert lease.state is State.MOVING
    assert lease in scene.woken
    scene.leave(lease, 0, "interrupted")
    group = scene.ask(after=lease.number)
    assert group is not None
    assert group.retiring
    scene.ask("other", start=2)
    news = scene.news()
    assert granted(news) == [3]
    assert [message.outcome for message in news if isinstance(message, TrialLeft)] == ["interrupted"]


def test_a_node_that_goes_before_its_drained_trial_has_left_costs_no_restart(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leases.drain("g")
    scene.leases.end_group(scene.client, "g", 1, {0: "Ray has lost the node"}, "")
    scene.ask(start=2)
    news = scene.news()
    assert granted(news) == [3]
    assert not [message for message in news if isinstance(message, TrialLeft)]
    assert scene.leases.live(lease.number) is None


@pytest.mark.parametrize("end", ["its death", "the grace", "an error of the other"])
def test_a_drained_trial_that_has_saved_continues_however_its_other_ranks_end(scene: Scene, end: str) -> None:
    lease = scene.lend(3, size=2)
    scene.leases.drain("g")
    scene.leave(lease, 0, "interrupted", alone=True)
    scene.ask("other", start=2)
    assert granted(scene.news()) == [], "the other rank has not left"
    match end:
        case "its death":
            scene.leases.end_group(scene.client, "g", 1, {1: ""}, "")
        case "the grace":
            scene.leases.expire(lease.number)
        case _:
            scene.leave(lease, 1, "errored", "Connection closed by peer", failure=COLLECTIVE)
    news = scene.news()
    assert granted(news) == [3]
    assert not [message for message in news if isinstance(message, TrialLeft)]


def test_a_drained_trial_that_fails_while_it_saves_has_failed(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leases.drain("g")
    scene.leave(lease, 0, "errored", "disk full")
    assert [message.outcome for message in scene.news_of(TrialLeft)] == ["errored"]
    assert not scene.client.queue, "whether it restarts is for the driver"


def test_a_drained_group_whose_lease_nobody_took_up_gives_the_trial_back(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [3], first=False)
    group = scene.ask()
    scene.leases.drain("g")
    assert group is not None
    assert (group.lease, group.retiring, tuple(scene.client.queue)) == (None, True, (3,))


def test_a_group_without_a_trial_drains_at_once(scene: Scene) -> None:
    group = scene.ask()
    for name in ("g", "g", "unknown"):
        scene.leases.drain(name)
    assert group is not None
    assert group.retiring
    assert group in scene.woken
    scene.news()
    scene.leases.enqueue(scene.client, [3], first=False)
    assert scene.news() == []


def test_idle_groups_are_retired_unless_a_trial_waits_for_one(scene: Scene) -> None:
    scene.lend(3)
    idle = [scene.ask(name) for name in ("b", "c", "d")]
    scene.leases.ask(scene.client, "starting", 1, 0, 2, first=True)
    scene.leases.retire_idle(scene.client, 2)
    assert [group.retiring for group in idle if group] == [False, True, True]
    scene.leases.enqueue(scene.client, [4, 5], first=False)
    assert [message.group for message in scene.news_of(LeaseGranted)] == ["b"]
    scene.ask("e")
    scene.ask("f")
    scene.leases.enqueue(scene.client, [6], first=False)
    scene.leases.retire_idle(scene.client, 2)
    assert granted(scene.news()) == [5, 6]


def test_the_end_of_a_groups_processes_ends_and_fences_its_lease(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leases.end_group(scene.client, "g", 1, {0: ""}, "")
    left, ended = scene.news()
    assert isinstance(left, TrialLeft)
    assert (left.trial, left.outcome) == (3, "errored")
    assert isinstance(ended, GroupEnded)
    assert (ended.group, ended.start, ended.dead, ended.error, ended.is_lost) == ("g", 1, (0,), "", True)
    assert scene.leases.live(lease.number) is None
    assert lease.group.retiring


def test_a_group_that_died_before_it_took_up_a_trial_gives_it_back(scene: Scene) -> None:
    scene.leases.enqueue(scene.client, [3], first=False)
    scene.ask("dead")
    scene.leases.bind(1, {"number": 1})
    scene.leases.end_group(scene.client, "dead", 1, {0: ""}, "")
    scene.ask("alive", start=2)
    news = scene.news()
    assert not [message for message in news if isinstance(message, TrialLeft)]
    assert [message.group for message in news if isinstance(message, LeaseGranted)] == ["dead", "alive"]


def test_processes_that_outlive_their_start_are_sent_away_and_displace_nobody(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.leases.end_group(scene.client, "g", 1, {0: "Ray has lost the node"}, "")
    successor = scene.ask(start=2)
    scene.news()
    assert scene.ask(after=lease.number) is None
    assert scene.news() == []
    scene.leases.enqueue(scene.client, [4], first=False)
    assert successor is not None
    assert successor.lease is not None


def test_the_end_of_earlier_processes_is_not_that_of_their_successors(scene: Scene) -> None:
    lease = scene.lend(3, start=2)
    scene.leases.end_group(scene.client, "g", 1, {0: "its node was running low on memory"}, "could not start")
    assert [type(message) for message in scene.news()] == [GroupEnded]
    assert lease.state is State.RUNNING


# -------------------------------------------------------------------------------------------- ranks that fail or hang
def test_ranks_that_fail_alike_end_their_lease_and_with_invalid_hps_keep_their_group(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    assert scene.leave(lease, 1, "invalid_hp", "no") == PEERS_GRACE_S
    assert lease.state is State.FAILED
    scene.leave(lease, 0, "invalid_hp", "no")
    assert [message.outcome for message in scene.news_of(TrialLeft)] == ["invalid_hp"]
    assert not lease.group.retiring
    assert scene.lend(4, size=2, after=lease.number).number == lease.number + 1


@pytest.mark.parametrize(("outcome", "alone"), [("errored", False), ("stopped", True)])
def test_a_rank_that_left_first_retires_the_group_after_a_grace(
    scene: Scene, outcome: LeaseOutcome, alone: bool
) -> None:
    lease = scene.lend(3, size=2)
    assert scene.leave(lease, 0, outcome, "boom", alone=alone) == PEERS_GRACE_S
    assert [(message.outcome, message.error) for message in scene.news_of(TrialLeft)] == [(outcome, "boom")]
    scene.leases.expire(lease.number)
    assert (lease.state, lease.group.retiring, lease.group.lease) == (State.OVER, True, None)


def test_ranks_that_left_differently_retire_their_group(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    scene.leave(lease, 1, "stopped")
    scene.leave(lease, 0, "completed")
    assert lease.group.retiring


def test_a_stale_process_has_its_group_replaced_without_a_loss(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    scene.leave(lease, 1, "completed", stale="a thread is still running")
    scene.leave(lease, 0, "completed")
    left, retired = scene.news()
    assert isinstance(left, TrialLeft)
    assert isinstance(retired, GroupRetired)
    assert (retired.group, retired.trial, retired.reason) == ("g", 3, "a thread is still running")
    scene.leases.enqueue(scene.client, [4], first=False)
    assert lease.group.lease is None, "the next trial is for the processes that replace them"
    scene.leases.end_group(scene.client, "g", 1, {}, "")
    [ended] = scene.news_of(GroupEnded)
    assert not ended.is_lost
    scene.ask(start=2, size=2)
    assert granted(scene.news()) == [4]


@pytest.mark.parametrize("first", [0, 1])
def test_a_ranks_own_error_counts_before_the_error_of_a_collective_that_it_caused(scene: Scene, first: int) -> None:
    lease = scene.lend(3, size=2)
    for rank in (first, 1 - first):
        if rank == 1:
            scene.leave(lease, 1, "errored", "its own error")
        else:
            scene.leave(lease, 0, "errored", "rank 1 failed", failure=COLLECTIVE)
    [left] = scene.news_of(TrialLeft)
    assert (left.outcome, left.error) == ("errored", "its own error")


def test_the_error_of_a_collective_counts_where_no_other_comes(scene: Scene) -> None:
    lease = scene.lend(3, size=2)
    assert scene.leave(lease, 0, "errored", "from 0", failure=COLLECTIVE) == CAUSE_GRACE * PEERS_GRACE_S
    scene.leases.expire(lease.number)
    [left] = scene.news_of(TrialLeft)
    assert (left.error, left.failure) == ("from 0", COLLECTIVE)
    lease = scene.lend(3, "h", size=2)
    scene.leave(lease, 0, "errored", "from 0", failure=COLLECTIVE)
    scene.leave(lease, 1, "errored", "from 1", failure=COLLECTIVE)
    [left] = scene.news_of(TrialLeft)
    assert left.error == "from 0", "later ones may follow from the first"


@pytest.mark.parametrize("order", list(itertools.permutations(["its death", "what the other says", "the grace"])))
def test_a_death_is_the_cause_of_another_ranks_error_in_a_collective(scene: Scene, order: tuple[str, ...]) -> None:
    """Unless the driver had to be told before Ray knew of the death."""
    lease = scene.lend(3, size=2)
    grace = None
    for event in order:
        match event:
            case "its death":
                scene.leases.end_group(scene.client, "g", 1, {1: ""}, "")
            case "what the other says":
                grace = scene.leave(lease, 0, "errored", "Connection closed by peer", failure=COLLECTIVE)
            case "the grace" if grace is not None:
                scene.leases.expire(lease.number)
    [left] = scene.news_of(TrialLeft)
    if order == ("what the other says", "the grace", "its death"):
        assert (left.error, left.failure, left.dead) == ("Connection closed by peer", COLLECTIVE, ())
    else:
        assert left.error == "the process of rank 1 of worker group g died"
        # The other rank knows how far the trial came, if it comes to say so.
        batches = 6 if order.index("what the other says") < order.index("its death") else -1
        assert (left.failure, left.dead) == (Failure(kind="died", batches=batches), (1,))


def test_a_failed_trial_is_reported_once_and_with_its_own_error_even_if_a_process_died(scene: Scene) -> None:
    failure = Failure(kind="hung", where="KeyError at model.py:3 in train_batch", batches=7)
    lease = scene.lend(3, size=2)
    scene.leave(lease, 0, "errored", "KeyError: 'x'", failure=failure)
    scene.leases.end_group(scene.client, "g", 1, {1: ""}, "")
    [left] = scene.news_of(TrialLeft)
    assert (left.error, left.failure, left.dead) == ("KeyError: 'x'", failure, ())


@pytest.mark.parametrize(
    ("cause", "kind"), [("", "died"), ("Ray has lost the node", "node"), ("its node was running low on memory", "oom")]
)
def test_the_cause_of_a_death_is_the_kind_of_failure(scene: Scene, cause: str, kind: FailureKind) -> None:
    scene.lend(3)
    scene.leases.end_group(scene.client, "g", 1, {0: cause}, "")
    [left] = scene.news_of(TrialLeft)
    assert (left.failure, left.dead) == (Failure(kind=kind), (0,))
    assert left.error == f"a process of worker group g died{f': {cause}' if cause else ''}"


@pytest.mark.parametrize(
    ("size", "dead", "error"),
    [
        (2, {}, "a process of worker group g died"),
        (4, {1: "x", 2: "y"}, "the processes of ranks 1, 2 of worker group g died: x"),
    ],
)
def test_the_error_names_the_ranks_that_died(scene: Scene, size: int, dead: dict[int, str], error: str) -> None:
    lease = scene.lend(3, size=size)
    scene.leave(lease, 0, "errored", "Connection reset by peer", failure=COLLECTIVE)
    scene.leases.end_group(scene.client, "g", 1, dead, "")
    [left] = scene.news_of(TrialLeft)
    assert (left.error, left.failure) == (error, Failure(kind="died", batches=6))
    assert scene.lend(3, "h", start=2).number == lease.number + 1


# ----------------------------------------------------------------------------------------------------------- the best
def test_only_a_strictly_better_score_is_the_best_of_the_experiment(scene: Scene) -> None:
    lease = scene.lend(3)
    scene.client.best = 0.5
    assert [scene.client.improves(lease, score) for score in (0.5, 0.4, 0.45, 0.3)] == [False, True, False, True]
    assert scene.client.best == 0.3


def test_the_best_score_counts_again_if_its_trial_was_killed_before_it_could_save(scene: Scene) -> None:
    first = scene.lend(3)
    found = [scene.client.improves(first, 0.4), scene.client.improves(first, 0.4)]
    scene.leave(first, 0, "errored", "killed")
    other = scene.lend(4, after=first.number)
    found.append(scene.client.improves(other, 0.4))
    scene.leave(other, 0, "errored", "killed")
    again = scene.lend(3, after=other.number)
    found += [scene.client.improves(again, 0.4), scene.client.improves(again, 0.4)]
    assert found == [True, False, False, True, False]


def test_parameters_reach_only_the_current_lease_of_a_trial(scene: Scene) -> None:
    old = scene.lend(3, size=2)
    scene.leave(old, 1, "errored", "boom")
    scene.lend(3, "h")
    late: dict[str, Any] = {"late": True}
    scene.leases.bind(old.number, late)
    assert old.parameters != late


# -------------------------------------------------------------------------------------------------------- many clients
def queue(scene: Scene, client: Client, *trials: int) -> None:
    scene.leases.enqueue(client, trials, first=False)


def have(scene: Scene, groups: int, shape: str = "") -> None:
    """So many groups of the scene's client ask for trials, which run."""
    for number in range(groups):
        group = scene.leases.ask(scene.client, f"{shape}{number}", number, 0, 1, first=True, shape=shape)
        assert group is not None
        take(scene, group)


def take(scene: Scene, group: Group) -> None:
    if group.lease is not None:
        group.idle.clear()
        scene.leases.begin(group.lease.number)


def save_and_leave(scene: Scene) -> list[tuple[str, int]]:
    """Trials that are asked to save do, and their groups ask for others; returns which did."""
    asked = [
        lease
        for client in scene.clients
        for lease in list(client.leases.values())
        if lease.state is State.MOVING and not lease.group.retiring
    ]
    for lease in asked:
        scene.leave(lease, 0, "interrupted")
        state = scene.leases.ask(scene.client, lease.group.name, lease.group.start, 0, 1, first=False)
        assert state is not None
        take(scene, state)
    return [(lease.client.name, lease.trial) for lease in asked]


def test_trials_go_to_groups_of_their_shape_alone(scene: Scene) -> None:
    two = scene.add("of two slots", shape="2")
    queue(scene, two, 0)
    have(scene, 2)
    assert not two.leases
    have(scene, 1, shape="2")
    assert [lease.trial for lease in two.leases.values()] == [0]


def test_events_go_to_the_client_that_they_concern(scene: Scene) -> None:
    other = scene.add("other")
    queue(scene, other, 7)
    have(scene, 1)
    [lease] = other.leases.values()
    scene.leave(lease, 0, "completed", stale="a thread is still running")
    assert [type(message) for message in other.messages] == [LeaseGranted, TrialLeft]
    assert [type(message) for message in scene.news()] == [GroupReady, GroupRetired]


def test_groups_are_shared_by_weight(scene: Scene) -> None:
    clients = [scene.add("a"), scene.add("b"), scene.add("c", weight=2)]
    for client in clients:
        queue(scene, client, *range(8))
    have(scene, 8)
    assert [len(client.leases) for client in clients] == [2, 2, 4]


@pytest.mark.parametrize(("weights", "groups"), [((1, 1, 2), 2), ((1, 3), 2), ((1, 1, 1), 1)])
def test_shares_are_by_weight_over_time_if_there_are_few_groups(
    scene: Scene, weights: tuple[int, ...], groups: int
) -> None:
    clients = [scene.add(f"weight-{weight}-{number}", weight=weight) for number, weight in enumerate(weights)]
    for client in clients:
        queue(scene, client, *range(8000))
    have(scene, groups)
    seconds = dict.fromkeys((client.name for client in clients), 0)
    for _ in range(1000):  # trials of two seconds
        for client in clients:
            seconds[client.name] += 2 * len(client.leases)
            client.had = seconds[client.name] / client.weight
        for lease in [lease for client in clients for lease in list(client.leases.values())]:
            scene.leave(lease, 0, "completed")
            scene.leases.ask(scene.client, lease.group.name, lease.group.start, 0, 1, first=False)
    due = [2000 * groups * weight / sum(weights) for weight in weights]
    assert list(seconds.values()) == pytest.approx(due, abs=2 * QUANTUM)


def test_a_client_has_no_more_slots_than_its_limit(scene: Scene) -> None:
    limited = scene.add("limited", max_slots=3)
    queue(scene, limited, *range(8))
    have(scene, 8)
    assert len(limited.leases) == 3


def test_a_higher_priority_takes_groups_at_once_and_the_others_continue_later(scene: Scene) -> None:
    usual, urgent = scene.add("usual"), scene.add("urgent", priority=1)
    queue(scene, usual, 0, 1, 2)
    have(scene, 3)
    queue(scene, urgent, 8, 9)
    assert save_and_leave(scene) == [("usual", 1), ("usual", 2)], "the latest ones"
    assert [lease.trial for lease in urgent.leases.values()] == [8, 9]
    assert sorted(usual.queue) == [1, 2]
    for lease in list(urgent.leases.values()):
        scene.leave(lease, 0, "completed")
        scene.leases.ask(scene.client, lease.group.name, lease.group.start, 0, 1, first=False)
    assert sorted(lease.trial for lease in usual.leases.values()) == [0, 1, 2]


def test_a_higher_priority_takes_no_more_than_its_limit(scene: Scene) -> None:
    usual, urgent = scene.add("usual"), scene.add("urgent", priority=1, max_slots=1)
    queue(scene, usual, 0, 1, 2)
    have(scene, 3)
    queue(scene, urgent, 7, 8, 9)
    assert save_and_leave(scene) == [("usual", 2)]
    assert save_and_leave(scene) == []


def test_an_equal_priority_waits_for_the_end_of_a_trial(scene: Scene) -> None:
    first, second = scene.add("first"), scene.add("second", weight=100)
    queue(scene, first, 0, 1, 2)
    have(scene, 2)
    queue(scene, second, 0)
    assert save_and_leave(scene) == []
    lease = next(iter(first.leases.values()))
    scene.leave(lease, 0, "completed")
    scene.leases.ask(scene.client, lease.group.name, lease.group.start, 0, 1, first=False)
    assert len(second.leases) == 1


def test_a_client_that_closes_leaves_the_groups_to_the_others(scene: Scene) -> None:
    a, b = scene.add("a"), scene.add("b")
    queue(scene, a, 0, 1)
    queue(scene, b, 0)
    have(scene, 1)
    [lease] = a.leases.values()
    scene.leases.close(a)
    assert scene.leases.reply(lease, 1) == "interrupt"
    scene.leave(lease, 0, "interrupted")
    group = scene.leases.ask(scene.client, lease.group.name, lease.group.start, 0, 1, first=False)
    assert group is not None
    assert group.lease is not None
    assert group.lease.client is b


# ---------------------------------------------------------------------------------------------- groups for others
def test_a_shrinking_owner_ends_idle_groups_and_then_those_of_the_lowest_priority(scene: Scene) -> None:
    low, high = scene.add("low", priority=50), scene.add("high", priority=1)
    groups: list[Any] = []
    for client, trial, name in ((high, 0, "a"), (low, 1, "b"), (low, 2, "c")):
        scene.leases.enqueue(client, [trial], first=False)
        group = scene.ask(name)
        assert group is not None
        assert group.lease is not None
        group.idle.clear()
        scene.leases.begin(group.lease.number)
        groups.append(group)
    groups.append(scene.ask("idle"))
    ended: list[str] = []
    for keep in (4, 3, 2, 1):
        scene.leases.shrink(scene.client, keep, at_once=False)
        ended.append(" ".join(group.name for group in groups if group.retiring))
    assert ended == ["", "idle", "c idle", "b c idle"]
    assert {lease.state for client in (low, high) for lease in client.leases.values()} == {State.RUNNING}


def test_a_shrinking_owner_that_must_be_quick_has_trials_save_and_leave(scene: Scene) -> None:
    leases = [scene.lend(trial, name) for trial, name in enumerate("ab")]
    scene.leases.shrink(scene.client, 1, at_once=False)
    assert [(lease.state, lease.group.retiring) for lease in leases] == [(State.RUNNING, False), (State.RUNNING, True)]
    for _ in range(2):  # it does not matter how often
        scene.leases.shrink(scene.client, 1, at_once=True)
    assert [lease.state for lease in leases] == [State.RUNNING, State.MOVING]
    scene.leave(leases[1], 0, "interrupted")
    assert tuple(scene.client.queue) == (1,)


def test_evicted_trials_are_fenced_and_their_groups_end(scene: Scene) -> None:
    owner, borrower = scene.client, scene.add("borrower")
    scene.leases.enqueue(borrower, [0], first=False)
    group = scene.ask()
    assert group is not None
    assert group.lease is not None
    lease = group.lease
    scene.leases.begin(lease.number)
    scene.news()
    scene.leases.evict(borrower)
    assert (scene.leases.live(lease.number), borrower.leases) == (None, {})
    [ended] = [message for message in owner.messages if isinstance(message, GroupEnded)]
    assert (ended.group, ended.is_lost) == ("g", False)


def test_idle_groups_stay_only_for_trials_of_their_shape(scene: Scene) -> None:
    other = scene.add("other", shape="other")
    group = scene.ask()
    scene.leases.enqueue(other, [0], first=False)
    scene.leases.retire_idle(scene.client, 1)
    assert group is not None
    assert group.retiring
