"""What lists tell of an experiment: how far it is, how long it still takes, how its best value came about, and why it
failed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dray.records.directory import ExperimentDirectory
from dray.records.failures import MOST_TRACEBACK, failure_groups
from dray.records.listing import StoredExperiment
from dray.records.overview import Overview, drawn_by
from dray.records.reader import POINTS, ExperimentReader
from dray.serve.answers import encoded
from searchers.events import Exited, Requested, Started
from tests.records.story import happened
from tests.records.test_result import config, told
from tests.report.simulated import simulated


def cut(directory: ExperimentDirectory, path: Path, share: float) -> tuple[ExperimentReader, float]:
    """An experiment as it was after a share of its time, while it ran; and how long it still took."""
    records = [json.loads(line) for line in directory.journal.read_text().splitlines()]
    begin, end = records[0]["time"], records[-1]["time"]
    now = begin + share * (end - begin)
    path.mkdir()
    (path / "experiment.yaml").write_bytes(directory.config_file.read_bytes())
    journal = [json.dumps(each) + "\n" for each in records if each["time"] <= now]
    (path / "journal.jsonl").write_text("".join(journal))
    (path / "metrics").mkdir()
    rows = [json.loads(line) for line in (directory.metrics / ".packed.jsonl").read_text().splitlines()]
    lines = [json.dumps(each) + "\n" for each in rows if each["time"] <= now]
    (path / "metrics" / ".packed.jsonl").write_text("".join(lines))
    reader = ExperimentReader(ExperimentDirectory(path), is_running=lambda: True)
    reader.refresh()
    return reader, end - now


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_time_left_is_told_at_the_first_look(tmp_path: Path, share: float) -> None:
    reader, left_s = cut(simulated(tmp_path / "whole", 256), tmp_path / "part", share)
    told = reader.overview().left_s
    assert told is not None
    assert math.isclose(told, left_s, rel_tol=0.2), (told, left_s)
    assert told == float(f"{told:.2g}"), "it does not change with each look"


def test_an_experiment_that_does_not_run_has_no_time_left(tmp_path: Path) -> None:
    seen = StoredExperiment.here(simulated(tmp_path / "one", 16)).overview()
    assert seen.left_s is None
    assert Overview(name="a", path="a", state="RUNNING", left_s=3.0).on_server("PREEMPTED", "").left_s is None
    assert Overview(name="a", path="a", state="RUNNING", left_s=3.0).on_server("RUNNING", "").left_s == 3.0


def test_a_budget_ends_before_the_search_does(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "whole", 64)
    text = directory.config_file.read_text().replace("budget: null", "budget: {time: 40s}")
    directory.config_file.write_text(text if "budget: {" in text else f"{text}budget: {{time: 40s}}\n")
    reader, left_s = cut(directory, tmp_path / "part", 0.5)
    events = [{"event": "opened", "time": 1_700_000_000.0}]
    events += [{"event": name, "time": 1_700_000_000.0, "group": "g"} for name in ("starts", "joined")]
    events[1]["slots"] = 1
    events.append({"event": "alive", "time": 1_700_000_030.0})
    (tmp_path / "part" / "metrics" / "_timeline.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert reader.overview().left_s == 10.0 < left_s


def test_the_curve_of_the_best_value_ends_at_the_best(tmp_path: Path) -> None:
    for several in (False, True):
        seen = StoredExperiment.here(simulated(tmp_path / f"of-{several}", 32, several=several)).overview()
        assert seen.best_metric is not None
        assert len(seen.curve) == POINTS
        assert list(seen.curve) == sorted(seen.curve, reverse=True), "smaller is better"
        assert seen.curve[0] > seen.curve[-1] == float(f"{seen.best_metric:.4g}")


def test_values_of_failed_trials_are_not_in_the_curve(tmp_path: Path) -> None:
    seen = StoredExperiment.here(happened(tmp_path / "one")).overview()
    assert seen.curve[-1] == seen.best_metric == 0.126
    assert min(seen.curve) == 0.126, "trial 1 had 0.01, and failed"
    story = told(tmp_path, config())
    reader = ExperimentReader(story.directory, is_running=lambda: True)
    story.validate(3, 5, 0.001)
    reader.refresh()
    assert reader.overview().curve[-1] == 0.001
    story.happen(Exited(trial=3, reason="errored"))
    reader.refresh()
    assert set(reader.overview().curve) == {0.25}


def test_the_most_frequent_error_is_told_with_the_users_line(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    assert StoredExperiment.here(story.directory).overview().failure == "no"
    error = "RuntimeError: CUDA error: device-side assert triggered\n\nTraceback (most recent call last):\n  ..."
    for trial in (3, 3, 3):
        where = "RuntimeError at model_def.py:14 in train_batch"
        story.write({"event": "restarted", "trial": trial, "error": error, "where": where})
    failure = StoredExperiment.here(story.directory).overview().failure
    assert failure == "RuntimeError: CUDA error: device-side assert triggered (model_def.py:14 in train_batch)"


def test_who_ended_a_trial(tmp_path: Path) -> None:
    reader = StoredExperiment.here(happened(tmp_path / "one")).read()
    assert [reader.trials[trial].ended_by for trial in (0, 1, 3, 4, 7)] == [
        None,
        None,
        "search",
        "divergence",
        "interruption",
    ]
    words = ["completed", "failed", "paused", "pruned", "diverged", "completed", "invalid", "interrupted", "waiting"]
    assert [trial.word for trial in reader.trials.values()] == words
    story = told(tmp_path, config())
    story.happen(Started(trial=4))
    story.search.request(Requested(trial=4))
    story.happen(Exited(trial=4, reason="canceled"))
    found = StoredExperiment.here(story.directory).read().trials[4].to_json()
    assert (found["state"], found["ended_by"]) == ("CANCELED", "request")


def test_running_trials_are_interrupted_while_nothing_runs_them(tmp_path: Path) -> None:
    runs, story = [True], told(tmp_path, config())
    reader = ExperimentReader(story.directory, is_running=lambda: runs[0])
    reader.refresh()
    assert (reader.trials[3].ended_by, reader.trials[3].word) == (None, "running")
    runs[0] = False
    reader.refresh()
    assert (reader.trials[3].state, reader.trials[3].word) == ("RUNNING", "interrupted")
    assert (reader.trials[0].word, reader.trials[4].word) == ("completed", "waiting")
    runs[0] = True
    story.happen(Started(trial=3))
    reader.refresh()
    assert reader.trials[3].word == "running"


def test_json_and_back(tmp_path: Path) -> None:
    seen = StoredExperiment.here(simulated(tmp_path / "one", 16)).overview()
    assert (seen.method, seen.sampler, seen.smaller_is_better, seen.labels) == ("asha", "random", True, ())
    assert encoded(Overview.from_json(json.loads(encoded(seen)))) == encoded(seen)


SAMPLERS = [
    ({"name": "asha", "sampler": {"name": "tpe"}}, "tpe"),
    ({"name": "asha", "sampler": "gp"}, "gp"),
    ({"name": "random"}, "random"),
    ({"name": "auto"}, "multi_fidelity"),
    ({"name": "grid"}, None),
    ({"name": "pbt"}, None),
    ({"name": "pbt", "sampler": {"name": "pb2"}}, "pb2"),
]


@pytest.mark.parametrize(("searcher", "name"), SAMPLERS)
def test_what_draws_the_hyperparameters(searcher: dict[str, object], name: str | None) -> None:
    assert drawn_by(searcher) == name


def test_unread_hyperparameters_are_in_the_overview(tmp_path: Path) -> None:
    directory = simulated(tmp_path / "whole", 4)
    reader = ExperimentReader(directory)
    reader.refresh()
    assert reader.overview().unread is None
    expected = (
        "a, b are searched, but no trial has read them; read: lr",
        "a is searched, but no trial has read it; read: lr, b",
        "",
    )
    for unread, read, text in zip(
        (["a", "b"], ["a"], []), (["lr"], ["lr", "b"], ["lr", "b", "a"]), expected, strict=True
    ):
        with directory.journal.open("a") as journal:
            journal.write(json.dumps({"event": "unread", "unread": unread, "read": read}) + "\n")
        reader.refresh()
        assert reader.overview().unread == (text or None)


def record(trial: int, event: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"trial": trial, "event": event, "time": time, **fields}


KEY = """KeyError: 'lrr'
  net/model_def.py:12, in __init__
    lr = hparams["lrr"]

Traceback (most recent call last):
  File "/code/net/model_def.py", line 12, in __init__
KeyError: 'lrr'"""
WHERE = "KeyError at model_def.py:12 in __init__"


def test_failures_are_grouped_by_the_users_line() -> None:
    found = failure_groups(
        [
            record(3, "restarted", 5.0, error="worker died: exit code 1"),
            record(1, "restarted", 10.0, error=KEY, where=WHERE, batches=4),
            record(1, "gave_up", 20.0, error=KEY, where=WHERE, batches=4, why="it failed at the same place again"),
            record(2, "gave_up", 15.0, error=KEY, where=WHERE, batches=-1, kept="COMPLETED"),
        ]
    )
    keys, died = found
    assert (keys.error, keys.file, keys.line, keys.function) == ("KeyError: 'lrr'", "net/model_def.py", 12, "__init__")
    assert keys.code == 'lr = hparams["lrr"]'
    assert (keys.count, keys.restarted, keys.given_up, keys.trials) == (3, 1, 2, [(1, 2), (2, 1)])
    assert (keys.first, keys.last, keys.batches, keys.kept) == (10.0, 20.0, None, ["COMPLETED"])
    assert keys.traceback == KEY
    assert (died.error, died.file, died.code, died.why) == ("worker died: exit code 1", None, None, None)
    assert failure_groups([]) == []


def test_failures_without_an_error_are_a_group() -> None:
    old, long = {"trial": 0, "event": "gave_up"}, record(1, "restarted", 1.0, error="x" * 2 * MOST_TRACEBACK)
    one, other = failure_groups([old, long])
    assert (one.error, one.first, one.traceback, one.trials) == ("no reason given", None, "", [(0, 1)])
    assert len(other.traceback) < MOST_TRACEBACK + 100
