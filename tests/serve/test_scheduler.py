"""What a server decides about its experiments: which has a process, what its end means, what users may do."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dray.leases.effects import Say
from dray.leases.shares import Demand
from dray.serve.control import Share
from dray.serve.effects import Ended, SchedulerEffect, SetShare, SignalProcess, StartProcess
from dray.serve.queue import Queue
from dray.serve.refusals import WrongState
from dray.serve.scheduler import MAX_DEATHS, MAX_PROCESSES, ProcessEnd, Scheduler

DIED = ProcessEnd(kind="died", error="killed by signal 9")


class Scene:
    """A server, what it emitted, and what the desk knows of the runs. The queue's journal may be on a full disk."""

    def __init__(self, slots: float = 1) -> None:
        self.slots = slots
        self.records: list[Mapping[str, Any]] = []
        self.disk_is_full = False
        self.effects: list[SchedulerEffect] = []
        self.demands: dict[str, Demand] = {}
        self.queue = Queue([], self._append, clock=lambda: 0.0)
        self.scheduler = Scheduler(self.queue, self.effects.append, is_preempted=lambda demand: self.is_preempted)
        self.is_preempted = False

    def _append(self, record: Mapping[str, Any]) -> None:
        if self.disk_is_full:
            raise OSError(28, "No space left on device")
        self.records.append(record)

    def submit(self, *names: str, share: Share | None = None) -> None:
        """Experiments that the processes that created them do not run."""
        for name in names:
            self.scheduler.submit(Path(name), share or Share(), has_process=False)

    def demand(self, name: str, *, has: int = 0, waits: int = 0) -> None:
        """What the desk says of an experiment's run."""
        self.demands[f"{name}-run"] = Demand(name=f"{name}-run", groups=has + waits, has=has, shape="x", unit=2)

    def step(self) -> list[SchedulerEffect]:
        """What follows from a look at the desk."""
        self.effects.clear()
        self.scheduler.step(self.demands, self.slots)
        return list(self.effects)

    def started(self) -> list[str]:
        return [each.name for each in self.step() if isinstance(each, StartProcess)]

    def state(self, name: str) -> str:
        return self.scheduler.experiment(name).state


@pytest.fixture
def scene() -> Scene:
    return Scene()


# ----------------------------------------------------------------------------------------------------------- processes
def test_there_is_one_process_more_than_slots_and_one_for_those_that_make_others_yield(scene: Scene) -> None:
    scene.submit("a", "b", "c")
    assert scene.started() == ["a", "b"]
    assert scene.started() == []
    scene.submit("d", share=Share(priority=1))
    assert scene.started() == ["d"]
    scene.scheduler.ended("a", ProcessEnd(kind="COMPLETED"))
    scene.scheduler.ended("b", ProcessEnd(kind="COMPLETED"))
    assert scene.started() == ["c"]


def test_no_process_starts_before_the_last_ones_trials_have_left(scene: Scene) -> None:
    scene.submit("a")
    scene.started()
    scene.demand("a", has=1)
    scene.step()
    scene.scheduler.ended("a", DIED)
    assert scene.started() == []
    scene.scheduler.left("a-run")
    scene.demands.clear()
    assert scene.started() == ["a"]


def test_a_server_that_ends_lets_processes_save_and_starts_none(scene: Scene) -> None:
    scene.submit("a", "b", "c")
    assert scene.started() == ["a", "b"]
    scene.effects.clear()
    scene.scheduler.close()
    assert scene.effects == [SignalProcess("a", signal.SIGTERM), SignalProcess("b", signal.SIGTERM)]
    scene.scheduler.ended("a", ProcessEnd(kind="stopped"))
    assert scene.started() == []
    assert scene.queue.item("a").state == "run"


def test_the_priority_counts_before_the_order_and_there_is_a_most(scene: Scene) -> None:
    scene.slots = 1000
    scene.submit(*map(str, range(MAX_PROCESSES)))
    scene.submit("urgent", share=Share(priority=1))
    started = scene.started()
    assert (started[0], len(started)) == ("urgent", MAX_PROCESSES)


def test_a_process_that_dies_again_and_again_without_training_fails_its_experiment(scene: Scene) -> None:
    scene.submit("a")
    for deaths in range(1, MAX_DEATHS + 1):
        assert scene.started() == ["a"]
        scene.scheduler.ended("a", DIED)
        assert scene.scheduler.experiment("a").restarts == deaths
    assert scene.started() == []
    failed = scene.scheduler.experiment("a")
    assert (failed.state, failed.error) == ("ERROR", "killed by signal 9; it has died 3 times in a row")
    assert scene.scheduler.act("a", "activate").restarts == 0
    assert scene.started() == ["a"]


def test_training_in_between_and_a_full_disk_do_not_count(scene: Scene) -> None:
    scene.submit("a")
    for _ in range(3 * MAX_DEATHS):
        assert scene.started() == ["a"]
        scene.demand("a", has=1)
        scene.step()
        scene.scheduler.ended("a", DIED)
        scene.demands.clear()
        scene.scheduler.left("a-run")
    assert scene.started() == ["a"]
    scene.scheduler.disk("the disk is full")
    scene.scheduler.disk("")
    scene.scheduler.ended("a", DIED)  # of it, perhaps after there was room again
    assert scene.scheduler.experiment("a").restarts == 1


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (ProcessEnd(kind="COMPLETED"), "COMPLETED"),
        (ProcessEnd(kind="ERROR", error="every trial failed"), "ERROR"),
        (ProcessEnd(kind="failed", error="no such class"), "ERROR"),
        (ProcessEnd(kind="stopped"), "QUEUED"),
    ],
)
def test_the_end_of_a_process_is_that_of_its_experiment_unless_it_was_stopped(
    scene: Scene, end: ProcessEnd, state: str
) -> None:
    scene.submit("a")
    scene.step()
    scene.scheduler.ended("a", end)
    found = scene.scheduler.experiment("a")
    assert (found.state, found.error) == (state, end.error)


def test_on_a_full_disk_no_process_starts_and_users_read_why(scene: Scene) -> None:
    scene.submit("a")
    scene.scheduler.disk("the disk is full")
    scene.scheduler.disk("the disk is full")
    assert [type(each) for each in scene.effects] == [Say]
    assert scene.started() == []
    assert scene.scheduler.experiment("a").error.startswith("the disk is full: experiments that wait")
    scene.scheduler.disk("")
    assert scene.effects == [Say("the disk has room again")]
    assert scene.started() == ["a"]


def test_an_extension_is_kept_until_its_process_has_opened_the_experiment(scene: Scene) -> None:
    scene.submit("a")
    scene.scheduler.extend("a", {"max_trials": 8})
    assert scene.step() == [StartProcess("a", Path("a"), {"max_trials": 8})]
    with pytest.raises(WrongState, match="a is RUNNING; stop it first"):
        scene.scheduler.extend("a", {"max_trials": 9})
    scene.scheduler.ended("a", DIED)
    assert scene.step() == [StartProcess("a", Path("a"), {"max_trials": 8})], "it may have died before"
    scene.demand("a", waits=1)
    scene.step()
    assert scene.queue.item("a").extension == {}


def test_an_experiment_whose_search_has_a_request_runs_again(scene: Scene) -> None:
    scene.submit("a")
    assert scene.started() == ["a"]
    scene.scheduler.act("a", "activate")
    assert scene.started() == [], "it runs already"
    scene.scheduler.ended("a", ProcessEnd(kind="COMPLETED"))
    assert scene.started() == []
    assert scene.scheduler.act("a", "activate").state == "QUEUED"
    assert scene.started() == ["a"]


# ----------------------------------------------------------------------------------------------------------- the verbs
@pytest.mark.parametrize(("wanted", "state"), [("pause", "PAUSED"), ("stop", "STOPPED")])
def test_an_experiment_stops_at_once_if_it_waits_and_once_its_process_has_ended_otherwise(
    scene: Scene, wanted: Any, state: str
) -> None:
    scene.slots = 0
    scene.submit("runs", "waits")
    scene.step()
    scene.effects.clear()
    assert scene.scheduler.act("waits", wanted).state == state
    assert scene.scheduler.act("runs", wanted).state == "STOPPING"
    scene.scheduler.act("runs", "stop")
    assert scene.effects == [SignalProcess("runs", signal.SIGTERM), SignalProcess("runs", signal.SIGKILL)]
    scene.scheduler.act("runs", wanted)
    scene.scheduler.ended("runs", DIED)
    assert (scene.state("runs"), scene.scheduler.experiment("runs").restarts) == (state, 0)
    assert scene.started() == []
    scene.scheduler.act("runs", "activate")
    assert scene.started() == ["runs"]


def test_a_share_that_a_user_sets_reaches_the_desk_until_it_has_it(scene: Scene) -> None:
    scene.submit("a")
    scene.step()
    scene.demand("a", waits=1)
    scene.scheduler.change("a", {"priority": 1, "weight": 2.0, "max_slots": 3})
    assert scene.step() == [SetShare("a-run", 1, 2.0, 6)]
    assert scene.step() == [SetShare("a-run", 1, 2.0, 6)]


def test_deleted_experiments_are_forgotten_unless_they_run(scene: Scene) -> None:
    scene.slots = 0
    scene.submit("runs", "waits")
    scene.step()
    scene.scheduler.deleted(["runs", "waits"])
    assert [each.name for each in scene.scheduler.experiments()] == ["runs"]


def test_the_state_says_what_an_experiment_waits_for(scene: Scene) -> None:
    scene.submit("a")
    states = [scene.state("a")]
    scene.step()
    for has, waits, is_preempted in ((0, 2, True), (2, 0, False), (0, 0, False), (0, 2, True), (0, 2, False)):
        scene.is_preempted = is_preempted
        scene.demand("a", has=has, waits=waits)
        scene.step()
        states.append(scene.state("a"))
    assert states == ["QUEUED", "QUEUED", "RUNNING", "RUNNING", "PREEMPTED", "RESTARTING"]
    assert scene.scheduler.counts() == {"RESTARTING": 1}
    found = scene.scheduler.experiment("a")
    assert (found.slots, found.waiting) == (0, 2)
    scene.demands.clear()
    scene.scheduler.ended("a", DIED)
    scene.scheduler.left("a-run")
    scene.step()
    assert scene.state("a") == "RESTARTING"
    assert scene.scheduler.experiment("a").error == DIED.error
    scene.demand("a", has=2, waits=0)
    scene.step()
    assert (scene.state("a"), scene.scheduler.experiment("a").error) == ("RUNNING", "")


# ------------------------------------------------------------------------------------------------------ its alerts
def ends(scene: Scene, name: str, *ends: ProcessEnd) -> list[Ended]:
    """What is told when an experiment's processes end like this, one after another."""
    scene.submit(name)
    scene.effects.clear()
    for end in ends:
        scene.scheduler.step(scene.demands, 1)
        scene.scheduler.ended(name, end)
    return [each for each in scene.effects if isinstance(each, Ended)]


def test_the_end_of_an_experiment_is_told_once(scene: Scene) -> None:
    assert ends(scene, "a", ProcessEnd(kind="COMPLETED")) == [Ended("a", "completed")]
    assert ends(scene, "b", ProcessEnd(kind="ERROR", error="all failed")) == [Ended("b", "failed", "all failed")]
    assert ends(scene, "c", ProcessEnd(kind="failed", error="no such file")) == [Ended("c", "failed", "no such file")]
    why = f"killed by signal 9; it has died {MAX_DEATHS} times in a row"
    assert ends(scene, "d", *[DIED] * MAX_DEATHS) == [Ended("d", "failed", why, by_server=True)]
    assert ends(scene, "e", ProcessEnd(kind="stopped")) == [], "by the end of the server"


def test_an_experiment_that_a_user_stops_is_told_and_not_one_that_is_paused(scene: Scene) -> None:
    scene.submit("a", "b")
    scene.step()
    for name, verb in (("a", "stop"), ("b", "pause")):
        scene.scheduler.act(name, verb)  # type: ignore[arg-type]
    scene.effects.clear()
    for name in ("a", "b"):
        scene.scheduler.ended(name, ProcessEnd(kind="stopped"))
    assert [each for each in scene.effects if isinstance(each, Ended)] == [Ended("a", "stopped")]


def test_an_end_that_could_not_be_recorded_is_not_told_yet(scene: Scene) -> None:
    scene.submit("a")
    scene.step()
    scene.disk_is_full = True
    with pytest.raises(OSError, match="No space"):
        scene.scheduler.ended("a", ProcessEnd(kind="COMPLETED"))
    assert not [each for each in scene.effects if isinstance(each, Ended)]
