"""The queue's order, its reasons and what a change will do: decided by the code that acts, and then it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.config.load import load_config
from dray.records.directory import ExperimentDirectory
from dray.serve.control import Share
from dray.serve.queue_order import guessed, in_order, moved, ties
from dray.serve.quota import Quota
from tests.groups.clusters import cluster
from tests.serve.scene import SceneControl, kind
from tests.serve.test_api import CONFIG

PRIORITIES = st.lists(st.sampled_from((1, 2, 41, 42, 42, 42, 43, 98, 99)), min_size=1, max_size=9)


# ----------------------------------------------------------------------------------------------------------- the order
@settings(max_examples=100, deadline=None)
@given(PRIORITIES, st.data())
def test_a_move_leads_to_the_order_that_was_asked_for_and_keeps_that_of_the_others(
    given: list[int], data: st.DataObject
) -> None:
    priorities = {f"e{number}": each for number, each in enumerate(given)}
    name = data.draw(st.sampled_from(sorted(priorities)))
    others = [each for each in in_order(priorities) if each != name]
    before = data.draw(st.sampled_from([*others, None]))
    changes = moved(priorities, name, before)
    if changes is None:  # only where no priorities are left
        assert {1, 99} & set(given)
        return
    at = len(others) if before is None else others.index(before)
    wanted = [*others[:at], name, *others[at:]]
    assert in_order(priorities | changes) == wanted
    assert all(1 <= each <= 99 and each != priorities[of] for of, each in changes.items())
    alone = [each for each in range(1, 100) if in_order({**priorities, name: each}) == wanted]
    if alone:  # its own priority changes if that is enough, and by the least
        change = min(abs(each - priorities[name]) for each in alone)
        assert len(changes) == (change > 0)
        assert sum(abs(each - priorities[of]) for of, each in changes.items()) <= change


@pytest.mark.parametrize(
    ("name", "before", "changes"),
    [
        ("b", "a", {"b": 41}),
        ("a", "c", {"b": 41}),  # a smaller change than both a and c
        ("c", "b", {"b": 43}),
        ("c", None, {}),
        ("a", None, {"a": 43}),
    ],
)
def test_the_smallest_change_is_made(name: str, before: str | None, changes: dict[str, int]) -> None:
    assert moved({"a": 42, "b": 42, "c": 42}, name, before) == changes


def test_another_changes_only_as_far_as_there_must_be_room() -> None:
    assert moved({"a": 42, "b": 42, "mine": 42, "nightly": 60}, "nightly", "mine") == {"nightly": 42, "mine": 43}


def test_what_may_not_change_stays() -> None:
    queue = {"theirs": 42, "mine": 42, "also-mine": 42}
    assert moved(queue, "also-mine", "mine", lambda name, priority: name != "theirs") == {"mine": 43}
    assert moved(queue, "also-mine", "theirs", lambda name, priority: name != "theirs") == {"also-mine": 41}
    assert moved(queue, "also-mine", "theirs", lambda name, priority: priority >= 42) == {"theirs": 43, "mine": 43}
    assert moved(queue, "also-mine", "theirs", lambda name, priority: name == "mine") is None


def test_those_of_equal_priority_share_whatever_their_order() -> None:
    queue = {"a": 42, "b": 42, "c": 10}
    assert ties(in_order(queue), queue, "b") == (
        "b has priority 42, as a: they share the slots by weight, whatever their order."
    )
    assert ties(in_order(queue), queue, "c") == ""


# ------------------------------------------------------------------------------------------------------------- reasons
@pytest.fixture
def scene(tmp_path: Path) -> SceneControl:
    return SceneControl(tmp_path, 4)


def why(scene: SceneControl) -> dict[str, str]:
    return {each.name: each.why for each in scene.queue(0).entries}


def test_those_that_wait_say_for_what(scene: SceneControl) -> None:
    scene.run("digits", 20)
    scene.run("gpt", 20)
    assert why(scene) == {"digits": "it has all slots itself", "gpt": "gets slots of digits as trials end"}
    scene.finish("digits", count=2)
    assert why(scene)["gpt"] == "has its share: digits of the same priority have theirs"
    scene.run("big", 3, of=kind(4))
    assert why(scene)["big"] == "a trial needs 4 slots, which it gets in its turn, as trials of digits and gpt end"
    assert scene.queue(0).next == "big"
    scene.run("urgent", 8, priority=10, max_slots=2)
    assert scene.has() == {"digits": 2, "gpt": 0, "big": 0, "urgent": 2}
    assert why(scene)["urgent"] == "at its most slots (2)"
    assert why(scene)["big"] == "behind urgent, which has priority 10"
    scene.core.scheduler.act("urgent", "pause")
    assert why(scene)["urgent"] == "its trials save"
    scene.settle()
    assert [each.name for each in scene.queue(0).entries] == ["digits", "gpt", "big", "urgent"], "paused ones are last"
    assert why(scene)["urgent"] == "paused, until somebody activates it"


def test_trials_that_can_never_fit_and_processes_that_start_are_told_apart(scene: SceneControl) -> None:
    scene.slow.add("slow")
    scene.run("slow", 1)
    scene.run("huge", 1, of=kind(8))
    assert why(scene) == {
        "slow": "its process starts",
        "huge": "a trial needs 8 slots of CPUs, and the cluster has 4",
    }
    scene.run("a", 1, of=kind(3))
    scene.run("wide", 2, of=kind(2))
    assert why(scene)["wide"] == "a trial needs 2 slots, and 1 of 4 are free"


def test_experiments_without_a_process_and_those_of_a_token_say_why(tmp_path: Path) -> None:
    scene = SceneControl(tmp_path, 1)
    for name in ("a", "b", "c"):
        scene.run(name, 9)
    assert why(scene)["c"] == "2 experiments run or wait before it, for 1 slot"
    scene.core.scheduler.disk("the disk is full")
    assert why(scene)["c"].startswith("the disk is full")
    limited = SceneControl(tmp_path, 4, quota=Quota(slots=2))
    limited.run("one", 9, owner="alice")
    assert limited.has() == {"one": 2}
    assert why(limited)["one"] == "token alice has its most slots (2)"


# ------------------------------------------------------------------------------------------------------------ foresight
def test_taking_slots_at_once_and_as_trials_end_are_told_apart(scene: SceneControl) -> None:
    scene.run("digits", 20)
    scene.run("gpt", 20)
    scene.finish("digits", count=2)
    share = scene.experiment("gpt").share
    assert scene.foresee({"gpt": replace(share, priority=10)}) == [
        "gpt goes from 2 to 4 slots, at once: trials of digits save, leave, and continue later.",
        "digits goes from 2 to 0 slots.",
    ]
    assert scene.foresee({"gpt": replace(share, weight=3.0)}) == [
        "gpt goes from 2 to 3 slots, as trials of digits end.",
        "digits goes from 2 to 1 slot.",
    ]
    assert scene.foresee({"gpt": replace(share, max_slots=1)}) == [
        "digits goes from 2 to 3 slots, as trials of gpt end.",
        "gpt goes from 2 to 1 slot.",
        "digits gets the next free slot.",
    ]
    assert scene.foresee({"gpt": replace(share, max_slots=2)}) == [
        "No slots move now.",
        "digits gets the next free slot.",
    ]


def test_one_without_a_process_gets_up_to_what_its_config_asks_for(tmp_path: Path) -> None:
    scene = SceneControl(tmp_path, 1)
    for name in ("a", "b", "c"):
        scene.run(name, 9)
    assert scene.foresee({"c": Share(priority=10)}) == [
        "c goes from 0 to up to 1 slot, at once: trials of a save, leave, and continue later; "
        "its process starts first, which takes seconds.",
        "a goes from 1 to 0 slots.",
        "c gets the next free slot.",
    ]


def test_a_demand_is_guessed_from_the_config(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"resources": {"slots_per_trial": 2, "max_slots": 6, "slot": "cpu", "cpus_per_slot": 3}}
    config = load_config({**yaml.safe_load(CONFIG), **fields})
    (tmp_path / "code").mkdir()
    ExperimentDirectory.create(tmp_path / "a-1", config, tmp_path / "code")
    demand = guessed(tmp_path / "a-1", cluster({"CPU": 8.0}))
    assert demand is not None
    assert (demand.size, demand.unit, demand.kind) == (6, 3, "cpu")
    assert guessed(tmp_path / "none", cluster({"CPU": 8.0})) is None


SHARES = st.builds(
    Share,
    priority=st.sampled_from((10, 42, 42, 60)),
    weight=st.sampled_from((0.5, 1.0, 3.0)),
    max_slots=st.sampled_from((None, None, 1, 2)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from((1, 1, 2)), SHARES), min_size=1, max_size=4),
    SHARES,
    st.integers(0, 3),
)
def test_what_is_foreseen_is_what_is_decided_then_and_looking_changes_nothing(
    experiments: list[tuple[int, int, Share]], change: Share, which: int
) -> None:
    scene = SceneControl(Path("results"), 4)
    for number, (trials, slots, share) in enumerate(experiments):
        fields = {"priority": share.priority, "weight": share.weight, "max_slots": share.max_slots}
        scene.run(f"e{number}", trials, of=kind(slots), **fields)
    name = f"e{which % len(experiments)}"
    core = scene.core
    before = (scene.experiments(), dict(core.lender.given), list(scene.records), scene.queue(3600))
    expected = core.parts({name: change}, scene.guess)
    scene.foresee({name: change})
    assert (scene.experiments(), dict(core.lender.given), list(scene.records), scene.queue(3600)) == before
    core.scheduler.change(name, {"priority": change.priority, "weight": change.weight, "max_slots": change.max_slots})
    core.settle()  # sets the shares
    core.settle()  # divides the slots by them
    decided = {
        each.name.removesuffix("-run"): core.lender.given.get(each.name, 0) * each.size
        for each in core.lender.demands.values()
    }
    assert {each: part.slots for each, part in expected.items() if part.is_up} == decided
