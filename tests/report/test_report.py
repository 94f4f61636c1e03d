"""The report on an experiment: one file, which has the page of a server and its answers."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from pathlib import Path

import pytest

from dray.errors import NoExperiment
from dray.records.result import Result
from dray.report import report, write_report
from searchers.events import Exited, Started
from tests.records.test_result import Story, config, told
from tests.report.simulated import simulated
from tests.report.written import Written

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>window.hacked = 1</script><!--<script>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("report") / "experiment", 48).path


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_report_is_one_file_which_loads_nothing(path: Path, tmp_path: Path) -> None:
    file = write_report(path, tmp_path / "r.html")
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"]
    assert file.stat().st_size < 1_000_000
    written = Written(file)
    assert written.addresses == []
    assert not re.search(r"@import|url\(", written.style)
    policy = dict(each.split(" ", 1) for each in written.policy.split("; "))
    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["style-src"]) == (hash_of(written.script), hash_of(written.style))
    for owner in ("Leon Sorokin", "MIT Licensed"):
        assert owner in written.script


def test_report_has_what_the_experiment_has(path: Path, tmp_path: Path) -> None:
    written = Written(write_report(path, tmp_path / "r.html"))
    trials, about = Result(path).trials, written.about
    best = trials.loc[trials["best_metric"].idxmin()]
    assert (about["best_trial"], about["best_metric"]) == (best["trial_id"], best["best_metric"])
    assert about["path"] == str(path)
    ranked = trials.sort_values("best_metric", kind="stable")["trial_id"].tolist()
    assert [row["trial"] for row in written.answers["/trials", "rank"]["trials"]] == ranked[:10]
    searched = written.answers["/config",]
    assert ["lr", "0.0001 to 0.1, log"] in searched["space"]
    assert ["global_batch_size", "64"] in searched["space"]
    assert ["length of a trial", "16 epochs; compared at 1, 4"] in searched["facts"]
    assert searched["config"] == (path / "experiment.yaml").read_text()
    assert {kind: list(written.figures(kind)) for kind in ("history", "parallel", "importance", "rungs", "slots")} == {
        "history": ["history"], "parallel": ["parallel"], "importance": ["importance"], "rungs": ["rungs"],
        "slots": ["shares", "groups"],
    }  # fmt: skip
    assert list(written.figures("slices")) == ["slice lr", "slice hidden", "slice optimizer"]
    others = ["training accuracy", "training loss", "validation accuracy"]
    assert written.answers["/curves", "bands"]["metrics"] == others
    for metric in others:
        assert len(written.answers["/curves", metric, "individual"]["curves"]) == len(trials)


def test_metrics_with_too_large_curves_are_left_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_CURVES", 1)
    first = Written(write_report(path, tmp_path / "r.html")).answers["/curves", "bands"]
    assert (first["metrics"], first["notes"][-1]) == ([], "Of 3 other metrics, this file has 0.")


def test_report_of_a_running_experiment_with_hostile_text(tmp_path: Path) -> None:
    story = told(tmp_path, config(slots=0.25).model_copy(update={"name": HOSTILE}))
    story.write({"event": "restarted", "trial": 3, "error": f"ValueError: {HOSTILE}"})
    file = write_report(story.directory.path)
    written = Written(file)
    assert file == story.directory.path / "report.html"
    assert written.about["state"] == "RUNNING"
    assert written.title == f"{HOSTILE}: error"
    assert HOSTILE not in file.read_text()
    failures = written.answers["/failures",]
    assert f"ValueError: {HOSTILE}" in [group["error"] for group in failures["groups"]]
    assert ["slots per trial", "1/4 slot"] in written.answers["/config",]["facts"]
    story.journal.close()
    assert Written(write_report(story.directory.path)).about["state"] == "STOPPED"


def test_report_shows_what_failed_and_diverged(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    story.validate(1, 10, 0.125)  # better than all others, but it failed
    story.validate(3, 20, math.nan)
    story.happen(Exited(trial=3, reason="completed"), Started(trial=4), Exited(trial=4, reason="completed"))
    story.journal.close()
    written = Written(write_report(story.directory.path))
    about = written.about
    assert (about["state"], about["failed"], about["best_trial"], about["best_metric"]) == ("PARTLY_FAILED", 1, 0, 0.25)
    assert about["diverged"] == "1 trial diverged: NaN since batch 20 (trial 3)"
    assert written.figures("history")["history"]["data"][1]["y"][-1] == 0.25


def test_report_before_anything_was_measured(tmp_path: Path) -> None:
    written = Written(write_report(Story(tmp_path / "experiment", config()).directory.path))
    assert written.about["best_metric"] is None
    assert written.answers["/trials", "rank"] == {"trials": []}
    assert written.answers["/curves", "bands"]["of"] == 0
    assert all(written.figures(kind) == {} for kind in ("history", "parallel", "slices", "rungs", "slots"))


def test_a_missing_experiment_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoExperiment, match="no experiment in"):
        write_report(tmp_path)
