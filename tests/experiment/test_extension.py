"""What can be said of an extension, and of a constraint, before Ray starts: on the directory of a finished search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.config.load import load_config
from dray.config.search import build_search
from dray.errors import ConfigError
from dray.records.directory import ExperimentDirectory
from searchers import Exited, Journal, Reported, Started

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "hyperparameters": {"global_batch_size": 2, "lr": {"type": "double", "minval": 0, "maxval": 1}},
    "searcher": {
        "name": "asha",
        "metric": "loss",
        "max_length": {"epochs": 4},
        "max_trials": 4,
        "num_rungs": 2,
        "divisor": 2,
    },
    "reproducibility": {"experiment_seed": 7},
}


class Trial:
    """Stands for a trial's class: nothing is trained here."""


def finished(path: Path, **opened: Any) -> Path:
    """The directory of a search that has ended, as a driver leaves it: trial 0 is the best, the others are stopped."""
    config = load_config(CONFIG)
    directory = ExperimentDirectory.create(path, config, None)
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "version": "0", **opened, "time": 0.0})
        search = build_search(config, lambda record: journal.append({**record, "time": 0.0}))
        search.start()
        while search.done is None:
            view = next(view for view in search.trials.values() if not view.ended)
            if view.stop_requested:
                search.on(Exited(trial=view.id, reason="stopped"))
                continue
            search.on(Started(trial=view.id))
            for step in (2, 4):
                search.on(Reported(trial=view.id, step=step, value=view.id / 10))
                if search.trials[view.id].stop_requested:
                    break
            else:
                search.on(Exited(trial=view.id, reason="completed"))
    return path


def resume(path: Path, **arguments: Any) -> dray.Experiment:
    return dray.Experiment.resume(path, trial=Trial, **arguments)  # type: ignore[arg-type]


def test_a_finished_experiment_says_how_to_extend_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished(tmp_path / "experiment")
    resume(path).run()
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == f"already ended; extend with: dray experiment extend {path} --max-trials N (or --max-length N)"
    assert second.startswith("4 trials (3 pruned, 1 completed)")


@pytest.mark.parametrize(
    ("budget", "field"),
    [({"max_trials": 3}, "searcher.max_trials"), ({"max_length": 3}, "searcher.max_length")],
)
def test_a_smaller_budget_is_refused_and_changes_nothing(tmp_path: Path, budget: dict[str, int], field: str) -> None:
    path = finished(tmp_path / "experiment")
    with pytest.raises(ConfigError, match="The extension has 1 error") as caught:
        resume(path, **budget).run()
    assert [fault.path for fault in caught.value.faults] == [field]
    events = [record["event"] for record in Journal.read(path / "journal.jsonl")]
    assert "extended" not in events


def test_an_unchanged_budget_is_no_extension(tmp_path: Path) -> None:
    path = finished(tmp_path / "experiment")
    assert len(resume(path, max_trials=4, max_length=4).run().trials) == 4
    assert "extended" not in [record["event"] for record in Journal.read(path / "journal.jsonl")]


def test_an_experiment_with_a_constraint_is_resumed_with_one(tmp_path: Path) -> None:
    path = finished(tmp_path / "experiment", constraint="constraint=small")
    with pytest.raises(ConfigError, match="created with constraint=small") as caught:
        resume(path).run()
    assert [fault.path for fault in caught.value.faults] == ["constraint"]
    assert resume(path, constraint=lambda point: True).run().path == path


def test_stopped_trials_have_ended_even_if_the_driver_died_before_recording_it(tmp_path: Path) -> None:
    path = finished(tmp_path / "experiment")
    file = path / "journal.jsonl"
    *before, last = file.read_bytes().splitlines(keepends=True)
    assert b'"reason":"stopped"' in last
    file.write_bytes(b"".join(before))
    result = resume(path).run()
    assert result.trials["state"].tolist() == ["COMPLETED", "PRUNED", "PRUNED", "PRUNED"]
    end = {"event": "exited", "trial": 3, "reason": "stopped", "actions": [{"action": "done", "reason": "completed"}]}
    assert {name: value for name, value in Journal.read(file)[-1].items() if name != "time"} == end


@pytest.mark.slow
def test_ray_is_not_started_for_any_of_this(tmp_path: Path) -> None:
    path = finished(tmp_path / "experiment")
    code = (
        "import sys, dray; from tests.experiment.test_extension import Trial\n"
        "try: dray.Experiment.resume(sys.argv[1], trial=Trial, max_trials=1).run()\n"
        "except dray.ConfigError: assert 'ray' not in sys.modules\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=ROOT, timeout=50)
