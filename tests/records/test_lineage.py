"""Trials that were requested: where each fork comes from, and how they are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from dray.cli import app
from dray.records.overview import Overview
from dray.records.result import Result
from dray.records.trial_record import lineage, relatives
from dray.text import fields_of
from searchers.events import Requested, Source, Started
from tests.records.repeated import repeated
from tests.records.test_repeats import VALUES, runs
from tests.records.test_result import Story, config, told


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A random search for 4 trials, of which one was invalid and was replaced; trial 5 is a fork, trial 6 was added."""
    story = told(tmp_path, config())
    story.search.request(Requested(source=Source(trial=0, step=10, batches=10), hparams={"lr": 0.15}))
    story.search.request(Requested())
    story.happen(Started(trial=5))
    story.validate(5, 15, 0.125)
    return story


def test_a_fork_has_its_source_in_the_table_and_in_json(story: Story) -> None:
    table = story.result.trials.set_index("trial_id")
    assert (table.loc[5, "source_trial"], table.loc[5, "source_batches"]) == (0, 10)
    assert table["source_trial"].dtype == table["source_batches"].dtype == pd.Int64Dtype()
    assert table["source_trial"].isna().tolist() == [True] * 5 + [False, True]
    fork, added = (story.result.reader.trials[trial].to_json() for trial in (5, 6))
    assert (fork["source_trial"], fork["source_batches"]) == (0, 10)
    assert (added["source_trial"], added["source_batches"]) == (None, None)


def test_a_fork_is_described_with_its_source(story: Story) -> None:
    described = CliRunner().invoke(app, ["trial", "describe", str(story.directory.path), "5"]).output
    assert "forked from      trial 0 at batch 10\n" in described
    assert "forked from" not in CliRunner().invoke(app, ["trial", "describe", str(story.directory.path), "0"]).output
    found = json.loads(CliRunner().invoke(app, ["trial", "describe", str(story.directory.path), "5", "--json"]).output)
    assert (found["source_trial"], found["source_batches"]) == (0, 10)


def test_requests_are_in_the_log(story: Story) -> None:
    story.search.request(Requested(trial=3))
    story.journal.append({"event": "rejected", "id": "1", "error": "trial 9 was never created"})
    said = CliRunner().invoke(app, ["experiment", "logs", str(story.directory.path)]).output
    assert [line.partition("request")[2] for line in said.splitlines() if "request" in line] == [
        "ed: trial 5, from trial 0 at batch 10, lr=0.15",
        "ed: trial 6",
        "ed: stop trial 3",
        " rejected: trial 9 was never created",
    ]


def test_requested_trials_are_counted_in_the_total_everywhere(story: Story) -> None:
    seen = story.result.overview
    # Without requests the search ends with 5 trials, because the invalid one was replaced.
    assert (seen.max_trials, seen.requested, seen.trials, seen.total) == (4, 2, 7, 7)
    assert seen.total == 7
    assert Overview.from_json(fields_of(seen)) == seen
    described = CliRunner().invoke(app, ["experiment", "describe", str(story.directory.path)]).output
    assert "3 of 7 ended" in described


def test_a_request_to_stop_adds_no_trial(story: Story) -> None:
    story.search.request(Requested(trial=3))
    assert story.result.overview.requested == 2


def test_relatives_are_followed_in_both_directions(story: Story) -> None:
    story.search.request(Requested(source=Source(trial=5, step=15, batches=15), hparams={}))
    story.search.request(Requested(source=Source(trial=0, step=10, batches=10), hparams={}))
    trials = story.result.reader.trials
    assert lineage(trials, 7)["ancestors"] == [{"trial": 5, "batches": 15}, {"trial": 0, "batches": 10}]
    found = lineage(trials, 0)
    assert found == {
        "ancestors": [],
        "children": [{"trial": 5, "batches": 10}, {"trial": 8, "batches": 10}],
        "repeats": [],
    }
    assert relatives(found["children"]) == "trial 5 at batch 10, trial 8 at batch 10"
    text = CliRunner().invoke(app, ["trial", "describe", str(story.directory.path), "0"]).stdout
    assert "trial 5 at batch 10, trial 8 at batch 10" in " ".join(text.split())
    text = CliRunner().invoke(app, ["trial", "describe", str(story.directory.path), "7", "--json"]).stdout
    assert json.loads(text)["lineage"]["ancestors"][0] == {"trial": 5, "batches": 15}


def test_repeats_of_a_trial_are_its_relatives(tmp_path: Path) -> None:
    directory = repeated(tmp_path / "again", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01))
    trials = Result(directory.path).reader.trials
    found = lineage(trials, 1)["repeats"]
    assert [(each["trial"], each["seed"]) for each in found] == [
        (each.id, each.repeat.seed) for each in trials.values() if each.repeat and each.repeat.trial == 1
    ]
    assert relatives(found).startswith(f"trial {found[0]['trial']} (seed 1)")
