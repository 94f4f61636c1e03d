"""Lines of long logs by their numbers, and the journal for a person."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dray.config.load import load_config
from dray.records import log_index
from dray.records.log_index import MOST_LETTERS, MOST_MATCHES, FileLines, JoinedLines, ListedLines
from dray.records.logs import event_lines


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many blocks, and windows that do not hold all."""
    monkeypatch.setattr(log_index, "BLOCK", 64)
    monkeypatch.setattr(log_index, "MOST_BYTES", 300)


def lines_of(number: int, seed: int = 0) -> list[str]:
    """Lines of 0 to 150 letters: many blocks hold none's end, or several."""
    rng = random.Random(seed)
    return [f"{each} " + "x" * rng.choice((0, 3, 20, 150)) for each in range(1, number + 1)]


def joined(*paths: Path, final: bool = True) -> JoinedLines:
    return JoinedLines([FileLines(path) for path in paths], final=final)


@pytest.mark.usefixtures("small_blocks")
def test_each_line_is_found_by_its_number(tmp_path: Path) -> None:
    lines, path = lines_of(200), tmp_path / "rank_0.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    found = joined(path)
    assert len(found) == 200
    for first in range(1, 201):
        window = found.read(first, 5)
        assert 1 <= len(window) <= 5
        assert window == lines[first - 1 : first - 1 + len(window)]
    offset = 0
    file = FileLines(path)
    file.refresh()
    for number, line in enumerate(lines, 1):
        assert (file.offset_of(number), file.number_at(offset)) == (offset, number)
        offset += len(line) + 1


@pytest.mark.usefixtures("small_blocks")
def test_growing_file_is_counted_on_and_a_replaced_one_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    path.write_text("one\ntwo\nhal")
    file = FileLines(path)
    assert len(JoinedLines([file], final=False)) == 2
    assert len(JoinedLines([file], final=True)) == 3, "the last line has no end"
    written = path.read_text()
    for number in range(100):
        more = "f a line\n" if number == 0 else f"line {number}\nhal" if number == 99 else f"line {number}\n"
        with path.open("a") as added:
            added.write(more)
        written += more
        found = JoinedLines([file], final=False)
        assert len(found) == written.count("\n")
        assert found.read(len(found), 1) == [written.split("\n")[len(found) - 1]]
    path.write_text("anew\n")
    assert JoinedLines([file], final=False).read(1, 10)[0] == "anew"


@pytest.mark.usefixtures("small_blocks")
def test_files_of_a_rank_are_one_log(tmp_path: Path) -> None:
    paths = [tmp_path / f"{each}.log" for each in "abc"]
    paths[0].write_text("1\n2\n3")  # its machine was lost
    paths[1].write_text("")
    paths[2].write_text("4\n5\nhal")
    found = joined(*paths, final=False)
    assert len(found) == 5
    assert [found.read(first, 9) for first in range(1, 6)] == [list("12345")[at:] for at in range(5)]
    assert found.search("5").lines == [(5, "5")]
    assert found.search("hal").lines == [], "it does not count yet"
    assert joined(*paths).search("hal").lines == [(6, "hal")]
    assert found.number_at("c.log", 2) == 5


@pytest.mark.usefixtures("small_blocks")
def test_a_search_finds_all_lines_with_a_text_in_any_case(tmp_path: Path) -> None:
    lines, path = lines_of(300, seed=1), tmp_path / "rank_0.log"
    for at in (7, 8, 150, 299):
        lines[at] += " Out Of Memory, out of memory"
    path.write_text("\n".join(lines))
    for found in (joined(path), ListedLines(lines)):
        matches = found.search("out of memory")
        assert [number for number, _ in matches.lines] == [8, 9, 151, 300]
        assert not matches.more
        assert [number for number, _ in found.search("OUT OF", first=9).lines] == [9, 151, 300]
        assert found.search("nothing").lines == []


def test_windows_and_searches_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    path.write_text("y" * 3_000_000 + "\n" + "match\n" * (MOST_MATCHES + 1))
    found = joined(path)
    [long] = found.read(1, 5)
    assert MOST_LETTERS < len(long) < MOST_LETTERS + 100
    assert "letters are left out" in long
    matches = found.search("match")
    assert (len(matches.lines), matches.lines[0], matches.more) == (MOST_MATCHES, (2, "match"), True)


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_bytes(b"\xff\xfe ok\n")
    assert joined(tmp_path / "rank_0.log").read(1, 1) == ["�� ok"]


@pytest.mark.parametrize(
    ("space", "drawn", "shown"),
    [
        (
            {
                "global_batch_size": 16,
                "clip": {"type": "const", "val": 1.5},
                "optimizer": {"name": "Adam", "lr": {"type": "double", "minval": 0.02, "maxval": 0.2}},
                "width": {"type": "categorical", "vals": [[6, 12], [3]]},
            },
            {"global_batch_size": 16, "clip": 1.5, "optimizer": {"name": "Adam", "lr": 0.1234567}, "width": [6, 12]},
            ": optimizer.lr=0.12346 width=[6, 12]",
        ),
        (
            {"optimizer": {"type": "categorical", "vals": [{"name": "SGD"}, {"name": "Adam", "eps": 0.1}]}},
            {"optimizer": {"name": "Adam", "eps": 0.1}},
            ": optimizer.name=Adam optimizer.eps=0.1",
        ),
        ({"lr": 0.1}, {"lr": 0.1}, ""),
    ],
    ids=["dotted names", "a choice between mappings, in full", "nothing is searched"],
)
def test_start_of_a_trial_shows_what_is_searched(space: Any, drawn: Any, shown: str) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 1}}
    config = load_config({"entrypoint": "a:A", "searcher": searcher, "hyperparameters": space})
    records = [{"event": "started", "trial": 3, "hparams": drawn}]
    assert list(event_lines(config, records)) == [f"trial 3 started{shown}"]


def test_what_a_driver_says_of_all_trials_is_in_the_log() -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 1}}
    config = load_config({"entrypoint": "a:A", "searcher": searcher, "hyperparameters": {"global_batch_size": 16}})
    records = [
        {"event": "new_processes", "trial": 1, "code": None, "text": "the trials get new processes from now on"},
        {"event": "unread", "unread": ["dropuot"], "read": ["lr"]},
    ]
    assert list(event_lines(config, records)) == [
        "the trials get new processes from now on",
        "dropuot is searched, but no trial has read it; read: lr",
    ]
