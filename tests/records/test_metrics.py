"""The metrics of an experiment: appended by one process that may be killed, read by others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from dray.records import metrics as metrics_log
from dray.records.metrics import TAIL, MetricsLog, read_metrics
from searchers.errors import DamagedFile
from tests.storage.power import Disk


def row(batches: int, name: str = "loss", value: float | None = 0.5, kind: str = "training") -> dict[str, Any]:
    return {"batches": batches, "epochs": batches / 10, "kind": kind, "name": name, "value": value, "time": 100.0}


def values(directory: Path) -> list[tuple[int, int, float]]:
    table = read_metrics(directory)
    return list(table[["trial_id", "batches", "value"]].itertuples(index=False, name=None))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "ROWS_PER_PART", 3)


def test_rows_can_be_read_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(3, [row(10), row(10, "accuracy", 0.9, "validation")])
    table = read_metrics(tmp_path)
    assert table.to_dict("records") == [
        {"trial_id": 3, **row(10)},
        {"trial_id": 3, **row(10, "accuracy", 0.9, "validation")},
    ]
    log.close()
    assert read_metrics(tmp_path).equals(table)


def test_columns_and_types_are_documented_even_without_rows(tmp_path: Path) -> None:
    empty = read_metrics(tmp_path)
    assert empty.empty
    MetricsLog(tmp_path).append(0, [row(1)])
    for table in (empty, read_metrics(tmp_path)):
        assert list(table.columns) == ["trial_id", "batches", "epochs", "kind", "name", "value", "time"]
        assert [str(kind) for kind in table.dtypes[["trial_id", "batches", "epochs", "value", "time"]]] == [
            "int64",
            "int64",
            "float64",
            "float64",
            "float64",
        ]


def test_of_repeated_rows_the_last_counts(tmp_path: Path, small_parts: None) -> None:
    log = MetricsLog(tmp_path)
    log.append(0, [row(1, value=0.1), row(2, value=0.2), row(3, value=0.3)])
    assert list(tmp_path.glob("part-*.parquet"))
    log.append(0, [row(2, value=0.7)])
    assert values(tmp_path) == [(0, 1, 0.1), (0, 2, 0.7), (0, 3, 0.3)]
    log.append(0, [row(3, value=0.8), row(3, value=0.9)])
    assert values(tmp_path) == [(0, 1, 0.1), (0, 2, 0.7), (0, 3, 0.9)]


def test_many_rows_become_parquet_parts(tmp_path: Path, small_parts: None) -> None:
    log = MetricsLog(tmp_path)
    for batches in range(1, 8):
        log.append(0, [row(batches)])
    parts = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert parts == ["part-00001.parquet", "part-00002.parquet"]
    assert pd.read_parquet(tmp_path / parts[0])["batches"].tolist() == [1, 2, 3]
    assert [found[1] for found in values(tmp_path)] == list(range(1, 8))
    log.close()
    assert (tmp_path / TAIL).stat().st_size == 0
    assert [found[1] for found in values(tmp_path)] == list(range(1, 8))


def test_later_process_fills_the_part_that_is_not_full(tmp_path: Path, small_parts: None) -> None:
    for batches in (1, 2, 3, 4):
        log = MetricsLog(tmp_path)
        log.append(0, [row(batches)])
        log.close()
    assert [pd.read_parquet(path)["batches"].tolist() for path in sorted(tmp_path.glob("*.parquet"))] == [
        [1, 2, 3],
        [4],
    ]
    assert [found[1] for found in values(tmp_path)] == [1, 2, 3, 4]


def test_rows_are_packed_in_time_without_another_row(tmp_path: Path) -> None:
    now = [0.0]
    log = MetricsLog(tmp_path, clock=lambda: now[0])
    log.append(0, [row(1)])
    log.pack()
    assert plain(tmp_path) == [(1, 0.5)], "the first at once"
    log.append(0, [row(2)])
    log.pack()
    assert plain(tmp_path) == [(1, 0.5)]
    now[0] += metrics_log.PACK_EVERY_S
    log.pack()
    assert plain(tmp_path) == [(1, 0.5), (2, 0.5)]
    assert (tmp_path / TAIL).stat().st_size == 0


def plain(directory: Path) -> list[tuple[int, float]]:
    """What a tool sees that knows nothing of us."""
    table = duckdb.sql(f"SELECT batches, value FROM read_parquet('{directory}/*.parquet') ORDER BY ALL").fetchall()
    assert sorted(pd.read_parquet(directory)["value"].tolist()) == sorted(value for _, value in table)
    return table


def test_other_tools_read_repeated_rows_once(tmp_path: Path, small_parts: None) -> None:
    log = MetricsLog(tmp_path)
    for batches in range(1, 9):
        log.append(0, [row(batches, value=0.0)])
    log.append(1, [row(1, value=0.0)])
    # It goes on from batch 4, and so does the experiment, in a process that has yet to learn what there is.
    log.append(0, [row(5, value=0.5), row(6, value=0.6)])
    log.close()
    again = MetricsLog(tmp_path)
    again.append(0, [row(7, value=0.7), row(8, value=0.8)])
    again.close()
    told = [(1, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (5, 0.5), (6, 0.6), (7, 0.7), (8, 0.8)]
    assert plain(tmp_path) == told
    assert sorted((batches, value) for _, batches, value in values(tmp_path)) == told


def test_a_torn_last_line_is_skipped_and_cut_off(tmp_path: Path) -> None:
    MetricsLog(tmp_path).append(0, [row(1), row(2)])
    with (tmp_path / TAIL).open("ab") as file:
        file.write(json.dumps({"trial_id": 0, **row(3)}).encode()[:30])
    assert [found[1] for found in values(tmp_path)] == [1, 2]
    log = MetricsLog(tmp_path)
    log.append(0, [row(4)])
    assert [found[1] for found in values(tmp_path)] == [1, 2, 4]


def test_a_part_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    left: list[bytes] = []
    real = os.replace

    def replace(unnamed: Path, path: Path) -> None:
        left.append(disk.holds(unnamed))
        real(unnamed, path)
        assert left[-1] == path.read_bytes()

    monkeypatch.setattr(os, "replace", replace)
    log = MetricsLog(tmp_path)
    log.append(0, [row(1), row(2)])
    log.close()
    assert len(left) == 1


@pytest.mark.parametrize("killed_in", ["write", "replace", "rename"])
def test_kill_while_packing_neither_loses_nor_repeats_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    log = MetricsLog(tmp_path)
    log.append(0, [row(1), row(2)])

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if killed_in == "write":
            patch.setattr(metrics_log.pq, "write_table", killed)
        elif killed_in == "replace":
            patch.setattr(os, "replace", killed)
        else:
            patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            log.close()
    assert [found[1] for found in values(tmp_path)] == [1, 2]
    again = MetricsLog(tmp_path)
    again.append(0, [row(3)])
    again.close()
    assert [found[1] for found in values(tmp_path)] == [1, 2, 3]


def test_a_damaged_part_is_an_error_that_names_it(tmp_path: Path) -> None:
    part = tmp_path / "part-00001.parquet"
    part.write_bytes(b"PAR1")
    for reading in (read_metrics, MetricsLog):
        with pytest.raises(DamagedFile, match=rf"^{part} can't be read: .*Parquet"):
            reading(tmp_path)


def test_a_part_that_was_moved_away_costs_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "ROWS_PER_PART", 2)
    log = MetricsLog(tmp_path)
    for first in (1, 3, 5):
        log.append(0, [row(first), row(first + 1)])
    log.close()
    (tmp_path / "part-00002.parquet").unlink()
    again = MetricsLog(tmp_path)
    again.append(0, [row(2, value=0.7), row(7)])
    again.close()
    assert [found[1:] for found in values(tmp_path)] == [(1, 0.5), (2, 0.7), (5, 0.5), (6, 0.5), (7, 0.5)]


def test_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(0, [row(1, value=float("inf")), row(2, value=float("-inf")), row(3, value=float("nan"))])
    for _ in range(2):
        found = read_metrics(tmp_path)["value"]
        assert found[0] == float("inf")
        assert found[1] == float("-inf")
        assert pd.isna(found[2])
        log.close()


def test_no_rows_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(0, [])
    log.close()
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == [TAIL]


def test_resource_usage_is_apart_from_metrics(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(0, [row(1), row(1, "cpu_cores", 0.9, metrics_log.SYSTEM)])
    assert read_metrics(tmp_path)["name"].tolist() == ["loss"]
    assert metrics_log.read_system(tmp_path)["name"].tolist() == ["cpu_cores"]


def test_one_metric_is_read_from_parts_and_tail(tmp_path: Path, small_parts: None) -> None:
    log = MetricsLog(tmp_path)
    for trial in range(4):
        for batches in range(1, 5):
            log.append(
                trial,
                [
                    row(batches, value=trial + batches / 10),
                    row(batches, "other"),
                    row(batches, kind=metrics_log.SYSTEM),
                ],
            )
    log.append(0, [row(5)])
    assert list(tmp_path.glob("part-*.parquet"))
    assert (tmp_path / TAIL).stat().st_size
    whole = read_metrics(tmp_path)
    mine = whole[whole["name"] == "loss"].reset_index(drop=True)
    kind = mine["kind"][0]
    assert len(mine) == 17
    pd.testing.assert_frame_equal(metrics_log.read_series(tmp_path, kind, "loss"), mine)
    some = mine[mine["trial_id"].isin([1, 3])].reset_index(drop=True)
    pd.testing.assert_frame_equal(metrics_log.read_series(tmp_path, kind, "loss", [1, 3]), some)
    assert set(metrics_log.read_system(tmp_path, [2])["trial_id"]) == {2}
    assert metrics_log.read_series(tmp_path, kind, "none").empty


def test_rows_are_sorted_even_by_a_key_of_more_than_64_bits(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(2**26, [row(2**40), row(3), row(3, value=0.7)])
    log.append(0, [row(2**40)])
    assert values(tmp_path) == [(0, 2**40, 0.5), (2**26, 3, 0.7), (2**26, 2**40, 0.5)]
