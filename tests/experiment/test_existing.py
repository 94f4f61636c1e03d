"""An experiment that is created where there is one, is extended, or has lost records."""

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
from dray.experiment.experiment import Experiment
from dray.records.directory import ExperimentDirectory
from dray.records.mirror import Mirror
from searchers import Exited, Reported, Started
from searchers.journal import Journal

MODEL = "print(1)\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.py").write_text(MODEL)
    return tmp_path / "model"


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    return {
        "entrypoint": "python3 m.py",
        "hyperparameters": {"global_batch_size": 8},
        "searcher": {"name": "random", "metric": "m", "max_length": {"batches": 1}, "max_trials": 2},
        "checkpoint_storage": f"memory://results/{tmp_path.name}",
        "data": {"secrets": {"key": "K3Y"}},
    }


def created(raw: dict[str, Any], model: Path, path: Path) -> tuple[Experiment, ExperimentDirectory]:
    experiment = Experiment(raw, model_dir=model, path=path)
    return experiment, experiment.prepare()


def with_a_trial(directory: ExperimentDirectory, trial: int = 0) -> ExperimentDirectory:
    with Journal(directory.journal) as journal:
        journal.append({"event": "started", "trial": trial})
    save(directory, trial)
    return directory


def save(directory: ExperimentDirectory, trial: int) -> None:
    store = directory.store(trial)
    staging = store.stage(5)
    (staging / "state-dict.pth").write_bytes(b"state")
    store.commit(staging, 5)


def test_the_same_call_on_another_machine_continues_what_is_in_the_store(
    raw: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    first, before = created(raw, model, tmp_path / "one" / "digits")
    Mirror(with_a_trial(before)).close()
    save(before, 1)  # of a trial that began after the last copy
    (model / "m.py").write_text("print(2)\n")
    second, there = created(raw, model, tmp_path / "two" / "digits")
    assert there.path == tmp_path / "two" / "digits"
    assert there.journal.read_bytes() == before.journal.read_bytes()
    assert there.store(0).latest() == before.store(0).latest() is not None
    assert there.store(1).latest() is None
    assert (there.code / "m.py").read_text() == MODEL
    assert second.config == first.config, "with the seed that was drawn, and the secrets"
    assert second.config.data["secrets"] == {"key": "K3Y"}


def test_another_name_or_another_store_has_an_experiment_of_its_own(
    raw: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    Mirror(with_a_trial(created(raw, model, tmp_path / "one" / "digits")[1])).close()
    elsewhere = {**raw, "checkpoint_storage": f"memory://other/{tmp_path.name}"}
    for config, name in ((raw, "letters"), (elsewhere, "digits")):
        _, directory = created(config, model, tmp_path / "two" / name)
        assert not directory.journal.exists()
        assert directory.store(0).latest() is None


def test_the_same_call_continues_a_directory_with_the_seed_that_it_has(
    raw: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    raw["checkpoint_storage"] = str(tmp_path / "results")
    first, before = created(raw, model, tmp_path / "digits")
    with_a_trial(before)
    again, there = created(raw, model, tmp_path / "digits")
    assert len(Journal.read(there.journal)) == 1
    assert again.config == first.config


def test_another_config_is_refused_with_what_differs(raw: dict[str, Any], model: Path, tmp_path: Path) -> None:
    Mirror(with_a_trial(created(raw, model, tmp_path / "one" / "digits")[1])).close()
    raw["searcher"]["max_trials"] = 8
    raw["hyperparameters"]["lr"] = 0.1
    raw["data"] = {"secrets": {"key": "a new one"}}  # no part of the search
    with pytest.raises(ConfigError) as refused:
        created(raw, model, tmp_path / "two" / "digits")
    assert [fault.path for fault in refused.value.faults] == ["hyperparameters.lr", "searcher.max_trials"]
    assert "is 8, but the experiment in" in str(refused.value)
    assert "was created with 2; give another path, or continue it as it is: dray experiment resume" in str(
        refused.value
    )


def test_checkpoints_of_a_driver_that_died_before_its_first_copy_belong_to_no_trial(
    raw: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Their hyperparameters are lost with its seed."""
    with_a_trial(created(raw, model, tmp_path / "one" / "digits")[1])
    _, there = created(raw, model, tmp_path / "two" / "digits")
    assert there.store(0).latest() is None


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
        "import sys, dray; from tests.experiment.test_existing import Trial\n"
        "try: dray.Experiment.resume(sys.argv[1], trial=Trial, max_trials=1).run()\n"
        "except dray.ConfigError: assert 'ray' not in sys.modules\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=ROOT)
