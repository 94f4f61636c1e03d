"""An experiment that is created where there is one continues it, on this machine or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray.errors import ConfigError
from dray.experiment.experiment import Experiment
from dray.records.directory import ExperimentDirectory
from dray.records.mirror import Mirror
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
