"""Commands show the trials that were trained again, and how certain their order is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.records.directory import ExperimentDirectory
from dray.report import write_report
from tests.cli.said import Said
from tests.records.repeated import repeated
from tests.records.test_repeats import VALUES, runs
from tests.report.written import Written

Dray = Callable[..., Said]
WHAT = "trial 3 is the best of 3 over 3 seeds, but not distinguishable from trial 2"


@pytest.fixture
def again(home: Path) -> Path:
    return repeated(home / "again-1", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01)).path


def test_describe_shows_the_finalists(again: Path, dray: Dray) -> None:
    shown = dray("e", "describe", "again").out
    assert re.search(rf"^trained again: {WHAT}$", shown, re.M)
    assert re.search(r"^ +1 +0.55 \(-0.32 .. 1.42\) +3 of 3 +0.350 \(0.275 .. 0.425\) +5, 8, 11$", shown, re.M)
    assert "error 0.20 (-0.69 .. 1.09), mean of 3 seeds; -0.11 after 20 of 20 batches in its best run" in shown
    found = dray("e", "describe", "again", "--json").value
    assert found["best"]["trial"] == found["best_trial"] == 3
    assert found["best"]["metric"] == found["best_metric"] == pytest.approx(0.2)
    assert found["best"]["best_by"] == found["best_by"] == "mean of 3 seeds"
    assert found["best"]["checkpoint"] == str(again / "trial_13" / "checkpoint_20"), "of its best run, a repeat"
    assert Path(dray("checkpoint", "download", "again", "-o", "copy").out.strip()).is_dir()
    assert found["repeats_summary"] == WHAT
    assert [row["trial"] for row in found["repeats"]] == [3, 2, 1]
    assert [row["distinguishable"] for row in found["repeats"]] == [None, False, True]


def test_describe_says_that_nothing_was_repeated_yet(again: Path, dray: Dray) -> None:
    directory = ExperimentDirectory.open(again)
    directory.journal.write_text("".join(directory.journal.read_text().splitlines(keepends=True)[:8]))
    shown = dray("e", "describe", "again").out
    assert "trained again: no trial yet, since repeats begin when all trials have ended" in shown
    found = dray("e", "describe", "again", "--json").value
    assert (found["repeats"], found["best"]["repeated"], found["num_repeats"]) == ([], None, 9)


def test_list_says_what_a_trial_repeats(again: Path, dray: Dray) -> None:
    shown = dray("t", "list", "again").out
    assert re.search(r"^ +5 +COMPLETED .* trial 1, seed 1 +lr=", shown, re.M)
    [first] = [row for row in dray("t", "list", "again", "--json").value if row["trial"] == 5]
    assert (first["repeat_of"], first["repeat"]) == (1, 1)
    assert re.search(r"repeat of +trial 1, seed 1", dray("t", "describe", "again", 5).out)


def test_journal_says_which_trials_are_repeated(again: Path, dray: Dray) -> None:
    assert "trial 4 completed -> repeat trial 1, 2, 3" in dray("e", "logs", "again").out


def test_report_shows_the_finalists(again: Path, tmp_path: Path) -> None:
    about = Written(write_report(again, tmp_path / "report.html")).about
    assert about["repeats_summary"] == WHAT
    assert "0.350 (0.275 .. 0.425)" in [each["difference_text"] for each in about["repeats"]]
