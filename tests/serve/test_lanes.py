"""The record of what each slot trained: who sat where, until when, and what a next server still knows."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest

from dray.serve.lanes import KEEP_S, MAX_BARS, Bar, LaneFile, Lanes, merged
from tests.serve.scene import NOON, SceneControl, kind


@pytest.fixture
def scene(tmp_path: Path) -> SceneControl:
    return SceneControl(tmp_path, 4)


def test_each_lease_is_a_bar_on_its_groups_lanes(scene: SceneControl) -> None:
    scene.run("digits", 3)
    scene.settle(60.0)
    scene.finish("digits", count=1)
    view = scene.queue(3600).lanes
    bars = [(bar.experiment, bar.trial, bar.lanes, bar.outcome, bar.ended) for bar in view["bars"]]
    [done, *others] = bars
    assert done[:4] == ("digits", 0, [0], "completed")
    assert 60 < done[4] - NOON < 62
    assert others == [("digits", 1, [1], "", None), ("digits", 2, [2], "", None)]
    assert [(lane["lane"], lane["state"]) for lane in view["lanes"]] == [
        (0, "idle"),
        (1, "training"),
        (2, "training"),
        (3, "idle"),
    ]
    assert view["lanes"][0]["since"] == done[4], "when its trial left"
    assert view["lanes"][3]["since"] == NOON, "since the server's start"
    assert view["from"] == NOON
    assert scene.queue(10).lanes["from"] == scene.now - 10


def test_a_trial_whose_slots_are_taken_is_interrupted_and_continues_elsewhere(scene: SceneControl) -> None:
    scene.run("digits", 4)
    scene.run("urgent", 1, priority=1)
    bars = scene.queue(3600).lanes["bars"]
    [taken] = [bar for bar in bars if bar.outcome == "interrupted"]
    [urgent] = [bar for bar in bars if bar.experiment == "urgent"]
    assert (taken.experiment, taken.lanes) == ("digits", urgent.lanes)
    scene.finish("urgent")
    assert [bar.trial for bar in scene.queue(3600).lanes["bars"]].count(taken.trial) == 2


def test_large_groups_take_several_lanes_and_small_ones_share_one(tmp_path: Path) -> None:
    scene = SceneControl(tmp_path, 4)
    scene.run("big", 1, of=kind(2))
    scene.run("halves", 3, of=kind(1, shared_by=2))
    bars = scene.queue(3600).lanes["bars"]
    places = [(bar.experiment, bar.lanes, bar.part, bar.parts) for bar in bars]
    assert sorted(places) == [
        ("big", [0, 1], 0, 1),
        ("halves", [2], 0, 2),
        ("halves", [2], 1, 2),
        ("halves", [3], 0, 2),
    ]


def test_lanes_of_groups_that_have_ended_are_taken_again(scene: SceneControl) -> None:
    scene.run("digits", 4)
    scene.finish("digits")
    scene.run("big", 1, of=kind(4))
    for _ in range(40):
        scene.settle(1.0)
    [bar] = [bar for bar in scene.queue(3600).lanes["bars"] if bar.experiment == "big"]
    assert bar.lanes == [0, 1, 2, 3]
    assert len(scene.queue(3600).lanes["lanes"]) == 4


def test_a_processs_start_is_no_idle_time(scene: SceneControl) -> None:
    scene.hold = True
    scene.run("digits", 1)
    assert [lane["state"] for lane in scene.queue(3600).lanes["lanes"]] == ["starting", "idle", "idle", "idle"]


def bar(began: float, ended: float | None, experiment: str = "a", trial: int = 0) -> Bar:
    return Bar(experiment=experiment, trial=trial, kind="gpu", lanes=[0], began=began, ended=ended)


def test_short_trials_are_shown_together_and_counted() -> None:
    bars = [bar(0, 1), bar(1, 2), bar(2, 3, "b"), bar(3, 4), bar(4.5, 5), bar(30, 31), bar(31, 300), bar(300, None)]
    found = [(each.experiment, each.began, each.ended, each.trials) for each in merged(bars, 10.0)]
    assert found == [
        ("a", 0, 2, 2),
        ("b", 2, 3, 1),
        ("a", 3, 5, 2),
        ("a", 30, 31, 1),
        ("a", 31, 300, 1),
        ("a", 300, None, 1),
    ]
    assert sum(each.trials for each in merged(bars, 10.0)) == len(bars)
    assert merged(bars, 0.0) == bars
    assert bars[0].trials == 1, "the record is not changed"


def test_the_next_server_knows_what_was_kept_and_the_file_stays_small(tmp_path: Path) -> None:
    path, now = tmp_path / "lanes.jsonl", time.time()
    assert LaneFile(path).kept == []
    scene = SceneControl(tmp_path, 1)
    scene.run("digits", 1)
    scene.finish("digits")
    [kept] = scene.kept
    file = LaneFile(path)
    for number in range(2 * MAX_BARS + 5):
        file.keep({**kept, "trial": number, "ended": now})
    file.keep({**kept, "ended": now - 2 * KEEP_S})
    with path.open("a") as stream:
        stream.write('{"experiment": "to')  # the server was killed
    again = LaneFile(path)
    assert len(path.read_text().splitlines()) == len(again.kept) == MAX_BARS
    assert again.kept[-1]["trial"] == 2 * MAX_BARS + 4
    lanes = Lanes(again.kept, clock=lambda: now + 5)
    view = lanes.view(3600, {"cpu": 1.0})
    assert view["bars"][-1].experiment == "digits"
    assert view["lanes"][0]["since"] == now + 5, "idle since this server's start, not before"


def test_old_bars_are_dropped_and_the_view_says_from_when_it_is_whole() -> None:
    kept = [asdict(bar(each, each + 1)) for each in range(MAX_BARS + 7)]
    view = Lanes(kept, clock=lambda: MAX_BARS + 10.0).view(KEEP_S, {"gpu": 1.0})
    assert view["from"] == 8.0, "when the first that is known has ended"
