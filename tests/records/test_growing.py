"""Metrics that are followed while they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray.records.growing import GrowingMetrics
from dray.records.metrics import TAIL, MetricsLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def row(batches: int) -> dict[str, Any]:
    return {"batches": batches, "epochs": 1.0, "kind": "training", "name": "loss", "value": 0.5, "time": 0.0}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> MetricsLog:
    return MetricsLog(tmp_path, clock=clock)


def pack(log: MetricsLog, clock: Clock) -> None:
    clock.now += 60
    log.pack()


def new(reader: GrowingMetrics) -> tuple[list[int] | None, list[int]]:
    """The batches of the rows in parts, if they were read, and of those in the tail."""
    parts, rows = reader.new_rows()
    return None if parts is None else parts["batches"].to_pylist(), [each["batches"] for each in rows]


def test_after_the_first_time_only_new_rows_are_read(tmp_path: Path, log: MetricsLog, clock: Clock) -> None:
    log.append(0, [row(1)])
    pack(log, clock)
    log.append(0, [row(2)])
    reader = GrowingMetrics(tmp_path)
    assert new(reader) == ([1], [2])
    assert new(reader) == (None, [])
    log.append(0, [row(3)])
    assert new(reader) == (None, [3])


def test_rows_that_are_moved_before_they_were_read_are_read(tmp_path: Path, log: MetricsLog, clock: Clock) -> None:
    reader = GrowingMetrics(tmp_path)
    log.append(0, [row(1)])
    assert new(reader) == ([], [1])
    log.append(0, [row(2)])
    pack(log, clock)
    log.append(0, [row(3)])
    assert new(reader) == (None, [2, 3])
    pack(log, clock)
    assert new(reader) == (None, [])


def test_all_is_read_again_if_rows_were_moved_twice(tmp_path: Path, log: MetricsLog, clock: Clock) -> None:
    reader = GrowingMetrics(tmp_path)
    log.append(0, [row(1)])
    new(reader)
    for batches in (2, 3):
        log.append(0, [row(batches)])
        pack(log, clock)
    log.append(0, [row(4)])
    assert new(reader) == ([1, 2, 3], [4])


def test_half_a_line_waits_for_its_other_half(tmp_path: Path, log: MetricsLog) -> None:
    log.append(0, [row(1)])
    whole = (tmp_path / TAIL).read_bytes()
    reader = GrowingMetrics(tmp_path)
    new(reader)
    with (tmp_path / TAIL).open("ab") as file:
        file.write(whole[:20])
        file.flush()
        assert new(reader) == (None, [])
        file.write(whole[20:])
    assert new(reader) == (None, [1])


def test_an_experiment_that_has_reported_nothing_has_no_rows(tmp_path: Path) -> None:
    assert new(GrowingMetrics(tmp_path / "metrics")) == ([], [])


def test_rows_moved_from_the_first_tail_are_read(tmp_path: Path, clock: Clock) -> None:
    reader = GrowingMetrics(tmp_path)
    assert new(reader) == ([], [])
    log = MetricsLog(tmp_path, clock=clock)
    log.append(0, [row(1)])
    pack(log, clock)
    log.append(0, [row(2)])
    assert new(reader) == ([1], [2])
