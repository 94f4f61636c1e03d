"""What worker groups did when, out of what the driver heard and what trials told of their time."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dray.figures.slot_time import by_gpu_type
from dray.records import timeline
from dray.records.timeline import FILE, Timeline, leases, read_timeline, slot_seconds


def system(*samples: tuple[int, float, dict[str, float]]) -> pd.DataFrame:
    """Trial, when, and the seconds by phase."""
    rows = [
        {"trial_id": trial, "batches": 1, "name": name, "value": value, "time": at}
        for trial, at, seconds in samples
        for name, value in seconds.items()
    ]
    return pd.DataFrame(rows, columns=["trial_id", "batches", "name", "value", "time"])


def write(directory: Path, events: str) -> None:
    """Events, separated by semicolons: when, the event, the group, and its slots or its trial, with the type of GPU."""
    lines = []
    for event in events.split("; "):
        at, name, *more = event.split()
        fields: dict[str, Any] = {"time": float(at), "event": name, **dict(zip(["group"], more, strict=False))}
        if name == "starts":
            fields["slots"] = 1
        if more[1:]:
            fields["slots" if name == "starts" else "trial"] = json.loads(more[1])
        lines.append(json.dumps(fields | ({"gpu_type": more[2]} if more[2:] else {})) + "\n")
    (directory / FILE).write_text("".join(lines))


def read(directory: Path, events: str, *samples: Any) -> list[tuple[Any, ...]]:
    write(directory, events)
    return list(read_timeline(directory, system(*samples)).drop(columns="gpu_type").itertuples(index=False, name=None))


def test_a_group_boots_idles_and_has_trials(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "0 opened; 1 starts g 2; 5 joined g; 6 granted g 3; 20 left g 3; 21 closed",
        (3, 10.0, {"starting_s": 1.0, "training_s": 2.0, "data_s": 0.5, "batches_per_second": 7.0}),
        (3, 18.0, {"training_s": 4.0, "validating_s": 3.0, "checkpointing_s": 1.0}),
    )
    assert found == [
        ("g", 2, -1, "booting", 1, 5),
        ("g", 2, -1, "idle", 5, 6),
        ("g", 2, 3, "starting", 6, 6.5),
        ("g", 2, 3, "starting", 6.5, 7.5),
        ("g", 2, 3, "training", 7.5, 9.5),
        ("g", 2, 3, "data", 9.5, 10),
        ("g", 2, 3, "training", 10, 14),
        ("g", 2, 3, "validating", 14, 17),
        ("g", 2, 3, "checkpointing", 17, 18),
        ("g", 2, 3, "ending", 18, 20),
        ("g", 2, -1, "idle", 20, 21),
    ]


def test_a_share_of_a_slot_counts_as_such(tmp_path: Path) -> None:
    assert read(tmp_path, "0 starts g 0.25; 8 closed") == [("g", 0.25, -1, "booting", 0, 8)]


def test_reported_phases_fit_their_lease_and_gaps_are_waiting(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "0 starts g; 0 joined g; 1 granted g 0; 8 left g 0",
        (0, 3.0, {"training_s": 3.0, "validating_s": 1.0}),  # by a clock that runs ahead of the desk's
        (0, 8.0, {"training_s": 3.0}),
    )
    assert found[1:] == [
        ("g", 1, 0, "training", 1, 2.5),
        ("g", 1, 0, "validating", 2.5, 3),
        ("g", 1, 0, "waiting", 3, 5),
        ("g", 1, 0, "training", 5, 8),
    ]


def test_trial_of_a_dead_group_continues_in_another(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "0 starts g; 0 starts h; 1 joined g; 1 granted g 0; 4 left g 0; 4 ends g; 4 starts g; 5 joined h; "
        "5 granted h 0; 7 joined g; 9 left h 0; 9 ends g; 9 closed",
        (0, 3.0, {"training_s": 2.0}),
        (0, 9.0, {"training_s": 4.0}),
    )
    by_group = {name: [row[2:] for row in found if row[0] == name] for name in ("g", "h")}
    assert by_group["g"] == [
        (-1, "booting", 0, 1),
        (0, "training", 1, 3),
        (0, "ending", 3, 4),
        (-1, "booting", 4, 7),
        (-1, "idle", 7, 9),
    ]
    assert by_group["h"] == [(-1, "booting", 0, 5), (0, "training", 5, 9)]


def test_leases_of_a_trial_are_those_of_all_its_groups(tmp_path: Path) -> None:
    write(tmp_path, "0 opened; 1 starts g 2; 1 starts h 1; 2 granted g 3; 5 left g 3; 6 granted h 3; 9 granted g 4")
    found = leases(tmp_path, [3.0, 11.0])
    assert found == {3: [(2, 5, 2), (6, 11, 1)], 4: [(9, 11, 2)]}, "up to the last report"
    assert slot_seconds(found[3], [1.0, 4.0, 5.5, 8.0, 20.0]) == [0, 4, 6, 8, 11]
    assert slot_seconds((), [1.0]) == [0]


def test_a_killed_run_ends_at_its_last_known_event(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "0 opened; 0 starts g; 2 joined g; 3 granted g 1; 100 opened; 100 starts g; 101 joined g",
        (1, 50.0, {"training_s": 47.0}),
        (1, 102.0, {"validating_s": 1.0}),
    )
    assert found == [
        ("g", 1, -1, "booting", 0, 2),
        ("g", 1, -1, "idle", 2, 3),
        ("g", 1, 1, "training", 3, 50),
        ("g", 1, -1, "booting", 100, 101),
        ("g", 1, -1, "idle", 101, 102),
    ]


def test_a_lent_group_is_recorded_for_the_time_of_its_leases(tmp_path: Path) -> None:
    notes = Timeline(tmp_path)
    began = time.time()
    for trial in range(2):
        notes.starts("g", 2, began + 10 * trial)
        notes.granted("g", trial, began + 10 * trial)
        notes.left("g", trial, began + 10 * trial + 4)
        notes.ends("g", began + 10 * trial + 4)
    table = read_timeline(tmp_path, system())
    assert table["trial_id"].tolist() == [0, 1]
    assert table["slots"].tolist() == [2, 2]
    assert (table["start"] - began).round(3).tolist() == [0, 10]
    assert (table["end"] - began).round(3).tolist() == [4, 14]


def test_a_full_disk_delays_events_but_loses_none(tmp_path: Path) -> None:
    notes = Timeline(tmp_path)
    limit = (tmp_path / FILE).stat().st_size + 10
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        notes.starts("g", 2, 1.0)
        notes.ready("g", 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    notes.ends("g")
    events = [json.loads(line)["event"] for line in (tmp_path / FILE).read_text().splitlines()]
    assert events == ["opened", "starts", "joined", "ends"]


def test_the_timeline_is_read_while_the_driver_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10, 100))
    monkeypatch.setattr(timeline.time, "time", lambda: float(next(clock)))
    notes = Timeline(tmp_path)  # at 10
    notes.starts("g", 2)  # at 11
    notes.ready("g", 20)
    notes.granted("g", 4, 21)
    notes.left("g", 4, 30)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"event": "gran')
    table = read_timeline(tmp_path, system())
    assert table["phase"].tolist() == ["booting", "idle", "starting"]
    assert table["trial_id"].tolist() == [-1, -1, 4]
    assert table[["start", "end"]].to_numpy().tolist() == [[11, 20], [20, 21], [21, 30]]
    again = Timeline(tmp_path)
    again.close()
    assert read_timeline(tmp_path, system()).equals(table), "the torn line is cut off"


def test_trial_has_all_gpu_types_that_it_ran_on(tmp_path: Path) -> None:
    # g died; the next group of the name is elsewhere.
    write(
        tmp_path,
        "0 opened; 1 starts g 1; 2 starts h 1; 3 joined g; 4 granted g 0 A100; 5 ends g; 6 starts g 1; "
        "7 granted g 0 L4; 8 left g 0; 9 granted g 1 L4; 10 closed",
    )
    table = read_timeline(tmp_path, system())
    types = {(row.group, row.start): row.gpu_type for row in table.itertuples()}
    g = dict.fromkeys([("g", 1), ("g", 3), ("g", 4)], "A100") | dict.fromkeys(
        [("g", 6), ("g", 7), ("g", 8), ("g", 9)], "L4"
    )
    assert types == g | {("h", 2): ""}
    assert timeline.gpu_types(tmp_path) == {0: "A100, L4", 1: "L4"}
    spent = {kind: (time, training) for kind, time, training in by_gpu_type(table)[1:]}
    assert spent.keys() == {"A100", "L4", "unknown"}
    assert spent["A100"] == ("0:04", "0.0%")


def test_an_experiment_without_a_timeline_has_an_empty_one(tmp_path: Path) -> None:
    assert list(read_timeline(tmp_path, system()).columns) == list(timeline.COLUMNS)
