"""`searcher.warm_start`: an experiment starts from what earlier ones learned, and keeps that in its journal."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.cli import description
from dray.cli.reader import read_experiment
from dray.config.load import load_config
from dray.errors import ConfigError, ExperimentError
from dray.experiment.local import run_local
from dray.experiment.open_search import OpenSearch
from dray.experiment.warm_start import read_sources, with_whole_paths
from dray.records.directory import ExperimentDirectory, results_root
from searchers.events import Exited, Reported, Started
from searchers.journal import Journal
from tests.experiment.test_local import TRIAL
from tests.report.simulated import simulated

LR = {"type": "log", "base": 10, "minval": -4, "maxval": -1}


def config(*warm_start: object, hyperparameters: dict[str, Any] | None = None, **searcher: Any) -> dict[str, Any]:
    return {
        "name": "warm",
        "entrypoint": "recorded:Recorded",
        "hyperparameters": {"global_batch_size": 64, "lr": LR} if hyperparameters is None else hyperparameters,
        "searcher": {
            "name": "asha",
            "sampler": "multi_fidelity",
            "metric": "validation_loss",
            "max_length": {"epochs": 8},
            "max_trials": 8,
            "num_rungs": 2,
            "max_concurrent_trials": 1,
            "warm_start": list(warm_start),
            **searcher,
        },
        "reproducibility": {"experiment_seed": 7},
    }


def faults(*warm_start: object, **fields: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read_sources(load_config(config(*warm_start, **fields)))
    return dict(caught.value.faults)


class Experiment(dray.Experiment):
    """Instead of on Ray, each trial is computed; after every four of them the run ends."""

    def _run(self, opened: OpenSearch, *_: Any) -> None:
        search = opened.search
        for trial in [view.id for view in search.trials.values() if not view.ended]:
            search.on(Started(trial=trial))
            for step in search.method.rungs:
                lr = float(search.params(trial)["lr"])  # type: ignore[arg-type]
                search.on(Reported(trial=trial, step=step, value=abs(math.log10(lr) + 2.2)))
                if search.trials[trial].stop_requested:
                    break
            search.on(Exited(trial=trial, reason="stopped" if search.trials[trial].stop_requested else "completed"))
        if search.done is None:
            raise ExperimentError("cut off")


TRIALS = Path(__file__).parents[1] / "ray" / "trials"


def off(path: Path) -> list[float]:
    """How far the learning rates of the trials are from the best one, in powers of ten."""
    started = [record for record in Journal.read(path / "journal.jsonl") if record["event"] == "started"]
    return [abs(math.log10(record["hparams"]["lr"]) + 2.2) for record in started]  # type: ignore[index]


def test_an_experiment_starts_at_the_best_of_an_earlier_one_and_never_reads_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = simulated(tmp_path / "earlier", 24)
    path = tmp_path / "experiment"
    experiment = Experiment(config(str(earlier.path)), model_dir=TRIALS, path=path)
    shutil.rmtree(earlier.path)
    for _ in range(10):
        with contextlib.suppress(ExperimentError):
            experiment.run()
            break
    records = Journal.read(path / "journal.jsonl")
    assert [record["event"] for record in records[:3]] == ["opened", "warm_start", "start"]
    assert sum(record["event"] == "opened" for record in records) > 1, "it was resumed"
    assert sum(record["event"] == "warm_start" for record in records) == 1
    assert all(each < 0.4 for each in (off(path)[0], off(path)[4]))  # the first two of the best
    Experiment(config(str(earlier.path)), model_dir=TRIALS, path=path)  # resumed by its path
    with read_experiment(path) as read:
        [found] = description.as_json(read)["warm_start"]
        assert (found["name"], found["weight"] > 0.3) == ("earlier", True)
        description.describe(read)
    assert f"warm start  earlier {found['weight']:.2f}" in capsys.readouterr().out


def test_a_local_run_has_the_hyperparameters_that_the_search_would_begin_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = simulated(tmp_path / "earlier", 24)
    (tmp_path / "my_weight.py").write_text(TRIAL)
    loaded = {**config(str(earlier.path), metric="error"), "entrypoint": "my_weight:OneWeight"}
    with caplog.at_level(logging.INFO, "dray.experiment.local"):
        run_local(load_config(loaded), tmp_path, path=tmp_path / "run")
    [(_, hparams)] = [record.args for record in caplog.records if record.message.startswith("trial 0")]
    assert abs(math.log10(hparams["lr"]) + 2.2) < 0.4


def test_experiments_are_named_as_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    path = simulated(results_root() / "digits-1", 8).path
    by_name, by_part, by_path = read_sources(load_config(config("digits-1", "digi", str(path))))
    assert by_name == by_part == by_path
    assert by_name.name == "digits-1"
    assert by_name.lengths == (1 / 16, 1 / 4, 1)
    assert len(by_name.trials) == 8


def test_what_teaches_nothing_is_refused_by_path_all_at_once(tmp_path: Path) -> None:
    useful = simulated(tmp_path / "useful", 8).path
    empty = ExperimentDirectory.create(tmp_path / "empty", load_config(config()), None).path
    assert faults(str(useful), str(empty), f"{tmp_path}/none") == {
        "searcher.warm_start[1]": "empty has no results; remove it from the list",
        "searcher.warm_start[2]": f"{tmp_path}/none can't be read: no such directory: {tmp_path}/none",
    }
    other = {"dropout": {"type": "double", "minval": 0, "maxval": 1}}
    assert faults(str(useful), hyperparameters=other) == {
        "searcher.warm_start[0]": "useful has none of this experiment's hyperparameters, dropout; "
        "remove it from the list"
    }
    elsewhere = {"lr": {"type": "log", "base": 10, "minval": -9, "maxval": -7}}
    assert faults(str(useful), hyperparameters=elsewhere) == {
        "searcher.warm_start[0]": "useful has no trial within the ranges of this experiment's hyperparameters; "
        "remove it from the list"
    }


def test_another_metric_is_allowed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    earlier = simulated(tmp_path / "earlier", 8).path
    with caplog.at_level(logging.WARNING):
        assert read_sources(load_config(config(str(earlier))))
        assert caplog.messages == []
        read_sources(load_config(config(str(earlier), metric="accuracy", smaller_is_better=False)))
    assert caplog.messages == [
        "searcher.warm_start[0]: earlier has optimized validation_loss, not accuracy; what is best in one must be best "
        "in the other"
    ]


def test_for_a_server_relative_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    named = with_whole_paths(load_config(config("latest", 3, "./a", "b/c", "s3://bucket/d"))).searcher
    assert named.warm_start == ["latest", "3", f"{tmp_path}/a", f"{tmp_path}/b/c", "s3://bucket/d"]  # type: ignore[attr-defined]
