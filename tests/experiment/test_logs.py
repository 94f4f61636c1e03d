"""What trials print, as lines: of several ranks and files in the order of their times, and also while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.experiment.logs import in_short, trial_lines

TRACE = "Traceback (most recent call last):\n...\nE: 1\n"


def at(second: int, text: str) -> str:
    return f"2026-11-21T09:00:{second:02}.000Z {text}"


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_lines_of_several_ranks_come_in_their_order_in_time(tmp_path: Path) -> None:
    write(tmp_path / "rank_0.log", at(1, "one"), at(3, "three"))
    write(tmp_path / "rank_10.log", at(2, "two"), at(4, "four"))
    new = trial_lines(tmp_path)
    assert new(False) == [
        f"rank 0 | {at(1, 'one')}",
        f"rank 10 | {at(2, 'two')}",
        f"rank 0 | {at(3, 'three')}",
        f"rank 10 | {at(4, 'four')}",
    ]
    write(tmp_path / "rank_0.log", at(5, "five"))
    assert new(False) == [f"rank 0 | {at(5, 'five')}"]
    assert trial_lines(tmp_path, rank=10)(True) == [at(2, "two"), at(4, "four")]


def test_files_of_one_rank_from_several_machines_are_one_log(tmp_path: Path) -> None:
    write(tmp_path / "store" / "rank_0.20261121T090003.000Z.log", at(3, "three"))
    write(tmp_path / "store" / "rank_0.20261121T090001.000Z.log", at(1, "one"))
    write(tmp_path / "here" / "rank_0.log", at(5, "five"))
    write(tmp_path / "here" / "another", "no log")
    assert trial_lines(tmp_path / "store", tmp_path / "here")(True) == [at(1, "one"), at(3, "three"), at(5, "five")]


def test_lines_without_a_time_stay_where_they_are(tmp_path: Path) -> None:
    """Those of older versions."""
    write(tmp_path / "rank_0.log", "b", "a", "", "c")
    assert trial_lines(tmp_path)(True) == ["b", "a", "", "c"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (f"E: 1\n  m.py:2, in f\n    x\n\n{TRACE}", ["E: 1", "  m.py:2, in f", "    x"]),
        (
            "c exited\n  m.py:2, in f\n    x\n\nthe end of what it printed (l):\n    | y",
            ["c exited", "  m.py:2, in f", "    x"],
        ),
        ("c exited\n\nthe end of what it printed (l):\n    | (nothing)", ["c exited"]),
        (TRACE, ["E: 1"]),
        ("a process of worker group group-0 died", ["a process of worker group group-0 died"]),
        ("", ["no reason given"]),
        (None, ["no reason given"]),
    ],
    ids=["users", "exit", "exit elsewhere", "ours", "no exception", "empty", "none"],
)
def test_an_error_in_short(error: object, told: list[str]) -> None:
    assert in_short(error) == told
