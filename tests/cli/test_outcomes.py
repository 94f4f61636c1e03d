"""What the commands say of an experiment in which trials failed or diverged."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.errors import ExperimentError
from dray.records.listing import StoredExperiment
from dray.records.result import Result
from dray.report.data import ReportData
from searchers.events import Exited, Started
from tests.cli.conftest import checkpoint
from tests.cli.said import Said
from tests.records.test_result import Story, config

Dray = Callable[..., Said]


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Trials 0 and 2 failed, after validations better than those of 1, which completed; 3 runs."""
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    story = Story(tmp_path / "results" / "bad-luck", config())
    for trial, error in enumerate((0.125, 0.5, 0.25)):
        story.happen(Started(trial=trial))
        story.validate(trial, 10, error, decides=True, save=False)
        checkpoint(story.directory.store(trial), 10)
    story.validate(1, 20, 0.75, save=False)
    story.happen(Exited(trial=0, reason="errored"), Exited(trial=2, reason="errored"))
    story.happen(Exited(trial=1, reason="completed"), Started(trial=3))
    return story


def test_a_failed_trial_is_the_best_nowhere(story: Story, dray: Dray) -> None:
    assert story.result.best_trial.trial_id == 1
    about = dray("e", "describe", "bad-luck", "--json").value
    assert (about["best"]["trial"], about["best"]["batches"], about["best_trial"], about["failed"]) == (1, 10, 1, 2)
    [listed] = dray("e", "list", "--json").value
    assert (listed["best_trial"], listed["best_metric"], listed["failed"]) == (1, 0.5, 2)
    assert dray("t", "describe", "bad-luck", "best", "--json").value["trial"] == 1
    assert dray("c", "export", "bad-luck", "-o", "best").code == 0
    assert "trial_1/" in Path("best/checkpoint.json").read_text()
    seen = ReportData(StoredExperiment.here(story.directory).read())
    assert (seen.best, seen.ranked["trial_id"].tolist()) == (1, [1, 0, 2])
    ranked = dray("t", "list", "bad-luck", "--best", "--json").value
    assert [each["trial"] for each in ranked] == [1, 0, 2], "those that failed are listed last"


def test_describe_counts_failures_first(story: Story, dray: Dray) -> None:
    lines = dray("e", "describe", "bad-luck").out.splitlines()
    assert lines[1].split(maxsplit=1) == ["failed", "2 of 4 trials failed"]
    table = lines[lines.index("best trials by error:") + 2 :]
    assert [line.split()[:4] for line in table] == [["1", "completed", "10", "0.5"]]


def test_list_counts_failures_and_names_the_metric(story: Story, dray: Dray) -> None:
    heading, row = dray("e", "list").out.splitlines()
    assert heading.split() == ["#", "name", "state", "trials", "best", "metric", "started"]
    assert " 3/4, 2 failed   0.5  error   " in row


def test_without_a_sound_trial_there_is_no_best_but_a_number_still_exports(story: Story, dray: Dray) -> None:
    story.write({"event": "exited", "trial": 1, "reason": "errored", "actions": []})
    journal = story.directory.journal
    kept = [line for line in journal.read_text().splitlines() if '"completed"' not in line]
    journal.write_text("".join(line + "\n" for line in kept))
    message = "no best trial, because every trial that validated failed; the best of these is trial 0 (error 0.125)"
    with pytest.raises(ExperimentError, match="every trial that validated failed"):
        _ = Result(story.directory.path).best_trial
    assert message in dray("e", "describe", "bad-luck").out
    assert dray("e", "describe", "bad-luck", "--json").value["best"] is None
    assert message in dray("c", "export", "bad-luck").is_one_line()
    assert dray("c", "export", "bad-luck", "0", "-o", "failed").code == 0


@pytest.fixture
def diverged(story: Story) -> Story:
    """Trial 3's error is NaN from batch 15 on; its training loss was infinite once, and trial 1's accuracy is NaN."""
    story.validate(3, 5, 0.375)
    story.validate(3, 10, math.inf, save=False)
    story.validate(3, 12, 0.25, save=False)
    story.validate(3, 15, math.nan, save=False)
    story.validate(3, 20, math.nan, save=False)
    undefined = {"batches": 20, "epochs": 5.0, "kind": "validation", "name": "accuracy", "value": math.nan, "time": 0.0}
    story.metrics.append(1, [undefined])
    return story


def test_figures_of_the_machine_are_printed_if_asked_for(story: Story, dray: Dray) -> None:
    row = {"batches": 5, "epochs": 1.0, "kind": "system", "name": "mfu_percent", "value": 41.5, "time": 0.0}
    story.metrics.append(1, [row])
    lines = dray("t", "metrics", "bad-luck", 1, "--kind", "system").out.splitlines()
    assert [line.split() for line in lines] == [["batches", "epochs", "mfu_percent"], ["5", "1", "41.5"]]


def test_a_trial_with_nan_is_flagged_from_its_first_such_report(diverged: Story, dray: Dray) -> None:
    trials = diverged.result.trials.set_index("trial_id")
    assert trials["nan_since"].dropna().to_dict() == {3: 15}
    assert math.isnan(trials.loc[3, "metric"]), "the last value, not the last finite one"
    assert trials.loc[3, "best_metric"] == 0.25
    assert dray("e", "describe", "bad-luck", "--json").value["diverged"] == {"3": 15}
    message = "1 trial diverged: NaN since batch 15 (trial 3)"
    lines = dray("e", "describe", "bad-luck").out.splitlines()
    assert lines[2].split(maxsplit=1) == ["diverged", message]
    about = dray("t", "describe", "bad-luck", 3).out
    assert "NaN since batch 15" in about
    assert "validation error = NaN" in about
    metrics = dray("t", "metrics", "bad-luck", 3, "--kind", "validation", "--name", "error").out.splitlines()
    assert [line.split()[-1] for line in metrics] == ["error", "0.375", "inf", "0.25", "NaN", "NaN"]
    assert "NaN since" not in dray("t", "describe", "bad-luck", 1).out
    rows = [line.split() for line in dray("t", "list", "bad-luck").out.splitlines()]
    assert rows[0][:6] == ["trial", "state", "batches", "last", "best", "NaN"]
    assert rows[4][:6] == ["3", "RUNNING", "20", "NaN", "0.25", "15"]


def test_a_loss_in_training_counts_and_one_that_recovers_does_not(story: Story) -> None:
    def train(batches: int, loss: float) -> None:
        row = {"batches": batches, "epochs": 1.0, "kind": "training", "name": "train_loss", "value": loss, "time": 0.0}
        story.metrics.append(1, [row, {**row, "name": "grad_norm", "value": math.inf}])

    for batches, loss in ((21, math.inf), (22, 1.0), (23, math.nan)):
        train(batches, loss)
    assert story.result.trials.set_index("trial_id")["nan_since"].dropna().to_dict() == {1: 23}
    train(24, 1.0)
    assert story.result.trials["nan_since"].isna().all()
