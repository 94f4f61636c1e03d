"""What is read out of an experiment's directory, while it runs or years later."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.config.search import build_search
from dray.errors import ExperimentError, NoExperiment
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.metrics import MetricsLog
from dray.records.numbering import take_number
from dray.records.result import Result
from dray.storage import CheckpointStore
from searchers.events import Action, Event, Exited, Reported, Started
from searchers.journal import Journal


def config(*, smaller_is_better: bool = True, slots: float = 1) -> ExperimentConfig:
    return load_config(
        {
            "hyperparameters": {
                "lr": {"type": "double", "minval": 0.1, "maxval": 0.2},
                "net": {"depth": {"type": "int", "minval": 1, "maxval": 3}, "norm": None},
                "layers": [1, 2],
            },
            "searcher": {
                "name": "random",
                "metric": "error",
                "smaller_is_better": smaller_is_better,
                "max_length": {"batches": 20},
                "max_trials": 4,
                "max_concurrent_trials": 4,
            },
            "resources": {"slots_per_trial": slots},
            "reproducibility": {"experiment_seed": 1},
        }
    )


class Story:
    """An experiment's directory, written as the driver writes it; the clock ticks once an event."""

    def __init__(self, path: Path, config: ExperimentConfig, began: float = 1000.0) -> None:
        self.directory = ExperimentDirectory.create(path, config, None)
        self.metrics = MetricsLog(self.directory.metrics)
        self.journal = Journal(self.directory.journal)
        self.clock, self.metric = began, config.searcher.first_metric
        self.search = build_search(config, self.write)
        self.created = self.search.start()

    def write(self, record: dict[str, Any]) -> None:
        self.clock += 1
        self.journal.append({**record, "time": self.clock})

    def happen(self, *events: Event) -> list[Action]:
        return [action for event in events for action in self.search.on(event)]

    def validate(self, trial: int, batches: int, error: float, *, decides: bool = False, save: bool = True) -> None:
        rows = [
            ("training", "loss", 2 * error),
            ("validation", self.metric, error),
            ("validation", "accuracy", 1 - error),
        ]
        self.metrics.append(
            trial,
            [
                {"batches": batches, "epochs": batches / 4, "kind": kind, "name": name, "value": value, "time": 0.0}
                for kind, name, value in rows
            ],
        )
        if decides:
            self.happen(Reported(trial=trial, step=batches, value=error))
        if save:
            store = CheckpointStore(self.directory.trial(trial))
            store.commit(store.stage(batches), batches)

    @property
    def result(self) -> Result:
        return Result(self.directory.path)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return told(tmp_path, config())


def told(tmp_path: Path, config: ExperimentConfig) -> Story:
    """Trial 0 completed and its best was in the middle; 1 ended in errors; 2 was invalid; 3 runs; 4 waits."""
    story = Story(tmp_path / "experiment", config)
    story.happen(Started(trial=0), Started(trial=1))
    story.validate(0, 10, 0.25)
    story.write({"event": "restarted", "trial": 1, "error": "no"})
    story.happen(Started(trial=1))
    story.validate(0, 20, 0.5, decides=True)
    story.happen(Exited(trial=0, reason="completed"))
    story.write({"event": "gave_up", "trial": 1, "error": "no"})
    story.happen(Exited(trial=1, reason="errored"))
    story.happen(Started(trial=2))
    story.validate(2, 10, 0.0, save=False)
    story.happen(Exited(trial=2, reason="invalid_hp"))
    story.happen(Started(trial=3))
    story.validate(3, 10, 0.375)
    return story


def test_a_trial_out_of_memory_has_failed_and_is_ranked_last(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", config())
    story.happen(Started(trial=0), Started(trial=1))
    story.validate(0, 10, 0.25)
    story.validate(1, 10, 0.125)
    story.happen(Exited(trial=1, reason="out_of_memory"))
    reader = StoredExperiment.here(story.directory).read()
    assert reader.failure_summary() == f"1 of {len(reader.trials)} trials failed"
    assert "1 out of memory" in reader.state_summary()
    assert [trial.id for trial in reader.ranked()] == [0, 1]
    assert [trial.id for trial in reader.eligible()] == [0]


def test_hyperparameters_are_columns_with_dotted_names(story: Story) -> None:
    trials = story.result.trials
    columns = [column for column in trials.columns if column.startswith("hparams.")]
    assert columns == ["hparams.lr", "hparams.net.depth", "hparams.net.norm", "hparams.layers"], "in the config's order"
    expected = story.search.trials[3].hparams
    assert expected is not None
    assert trials.loc[3, "hparams.lr"] == expected["lr"]
    assert trials.loc[3, "hparams.layers"] == [1, 2]
    assert pd.isna(trials.loc[4, "hparams.lr"]), "drawn when it starts"


def test_times_are_those_of_the_first_start_and_of_the_end(story: Story) -> None:
    rows = story.result.trials.set_index("trial_id")
    # In the story, each record is a second after the one before; the first is the search's start.
    seconds = (rows[["started", "ended"]] - pd.Timestamp(1000, unit="s")) / pd.Timedelta(seconds=1)
    assert seconds.loc[0].tolist() == [2, 7]
    assert seconds.loc[1].tolist() == [3, 9]
    assert seconds.loc[3, "started"] == 12
    assert rows["ended"].isna().tolist() == [False, False, False, True, True]


def test_best_trial_is_ranked_by_its_best_validation(story: Story) -> None:
    best = story.result.best_trial
    assert (best.trial_id, best.metric, best.best_batches, best.batches) == (0, 0.25, 10, 20)
    assert best.hparams == story.search.trials[0].hparams
    assert Path(best.checkpoint.path) == story.directory.path / "trial_0" / "checkpoint_10"


def test_largest_is_the_best_if_the_search_maximises(tmp_path: Path) -> None:
    best = told(tmp_path, config(smaller_is_better=False)).result.best_trial
    assert (best.trial_id, best.metric, best.best_batches, best.batches) == (0, 0.5, 20, 20)


@pytest.mark.parametrize("fault", ["not kept", "no manifest", "cut", "changed"])
def test_another_checkpoint_is_used_only_on_request(story: Story, fault: str) -> None:
    story.validate(3, 15, 0.125, save=False)
    place, store = story.directory.trial(3) / "checkpoint_15", story.directory.store(3)
    if fault != "not kept":
        (staging := store.stage(15)).joinpath("state").write_bytes(b"state")
        store.commit(staging, 15)
    if fault == "no manifest":
        (place / "manifest.json").unlink()
    elif fault != "not kept":
        (place / "state").write_bytes(b"stat" if fault == "cut" else b"stale")
    best = story.result.best_trial
    assert (best.trial_id, best.best_batches, best.metric) == (3, 15, 0.125)
    for use in (lambda: best.checkpoint, story.result.load_best_trial):
        with pytest.raises(ExperimentError) as error:
            use()
        says = str(error.value)
        assert "the best checkpoint of trial 3 of experiment, after 15 batches (error 0.125), can't be used: " in says
        assert f": {place} " in says
        assert "; there are checkpoints after 10 batches (error 0.375); to take another one, say so: --at last" in says
    assert Path(best.checkpoint_at(10).path).name == "checkpoint_10"


def test_no_best_trial_is_an_error_that_says_why(tmp_path: Path) -> None:
    story = Story(tmp_path / "e", config())
    with pytest.raises(ExperimentError, match=r"no trial of .* has validated yet"):
        _ = story.result.best_trial
    story.happen(Started(trial=0))
    story.validate(0, 10, 0.5, save=False)
    with pytest.raises(ExperimentError, match=r"the best checkpoint of trial 0 of e, .* does not exist.*no others"):
        _ = story.result.best_trial.checkpoint


def test_a_result_is_found_as_the_command_finds_it(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    monkeypatch.chdir("/")
    number = take_number(story.directory.path)
    assert number is not None
    for name in (number, str(number), "latest", "experiment", "perim", Path("experiment"), str(story.directory.path)):
        assert Result(name).path == story.directory.path
    with pytest.raises(NoExperiment, match="no experiment 'digits'") as raised:
        Result("digits")
    assert "config" not in str(raised.value)


def test_a_result_shows_its_name_state_trials_and_best(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    take_number(story.directory.path)
    story.journal.close()
    shown = "1: experiment, STOPPED, 3 of 5 trials ended, best error 0.25 by trial 0"
    result = story.result
    assert repr(result) == f"<dray.Result {shown}>"
    html = result._repr_html_()
    assert f"<b>{shown}</b>" in html
    assert re.findall("<th>(.*?)</th>", html) == [
        "trial",
        "state",
        "batches",
        "best at",
        "best error",
        "lr",
        "net.depth",
    ]
    cells = re.findall("<td>(.*?)</td>", html)
    assert cells[:5] == ["0", "COMPLETED", "20", "10", "0.25"]
    assert cells[7:12] == ["3", "RUNNING", "10", "10", "0.375"]


def test_a_result_shows_its_path_if_its_files_are_gone(story: Story) -> None:
    result = story.result
    story.directory.config_file.unlink()
    assert repr(result) == f"<dray.Result {story.directory.path}>"
    assert str(story.directory.path) in result._repr_html_()
