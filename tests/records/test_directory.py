"""An experiment's directory: made whole or not at all, with a copy of the code and nothing else. One that
is deleted while its experiment runs is the one error of its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.code import ignore
from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.errors import ConfigError, DirectoryGone, NoExperiment
from dray.experiment.checkpoint_source import with_storage
from dray.records.directory import ExperimentDirectory, new_path
from tests.storage.power import Disk

CONFIG = load_config(
    {
        "name": "digits & more",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}},
        "reproducibility": {"experiment_seed": 3},
    }
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    for name in ("model_def.py", "parts/layers.py", ".git/config", "__pycache__/model_def.pyc", ".venv/lib/big.py"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(f"# {name}")
    return code


def files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_create_keeps_the_config_and_the_code_and_no_clutter(tmp_path: Path, code: Path) -> None:
    directory = ExperimentDirectory.create(tmp_path / "e", CONFIG, code)
    assert files(directory.path) == ["code/model_def.py", "code/parts/layers.py", "experiment.yaml"]
    assert (directory.code / "parts" / "layers.py").read_text() == "# parts/layers.py"
    assert ExperimentDirectory.open(tmp_path / "e").config() == CONFIG


def test_a_new_directory_survives_a_power_failure(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    directory = ExperimentDirectory.create(tmp_path / "e", CONFIG, code)
    left = disk.leaves(directory.path, tmp_path / "left")
    assert files(left) == files(directory.path)
    assert all((left / name).read_bytes() == (directory.path / name).read_bytes() for name in files(left))


def test_results_inside_the_model_directory_are_not_copied(code: Path) -> None:
    directory = ExperimentDirectory.create(code / "results", CONFIG, code)
    assert files(directory.code) == ["model_def.py", "parts/layers.py"]


def test_directory_of_another_experiment_is_refused(tmp_path: Path, code: Path) -> None:
    ExperimentDirectory.create(tmp_path / "e", CONFIG, code).journal.write_text("{}\n")
    with pytest.raises(ConfigError, match="already has an experiment; resume it, or give another directory"):
        ExperimentDirectory.create(tmp_path / "e", CONFIG, code)


def test_a_killed_creation_is_no_experiment_and_can_be_repeated(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        ExperimentDirectory.create(tmp_path / "e", CONFIG, code)
    with pytest.raises(NoExperiment, match="no experiment in"):
        ExperimentDirectory.open(tmp_path / "e")
    assert ExperimentDirectory.create(tmp_path / "e", CONFIG, code).config() == CONFIG


def test_directory_of_data_is_not_taken_for_code(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignore, "MAX_CODE_BYTES", 1 << 20)
    with (code / "parts" / "images.bin").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(ConfigError, match=r"model_dir: .* has at least 2\.0 MiB of files, more than the 1 MiB"):
        ExperimentDirectory.create(tmp_path / "e", CONFIG, code)
    assert not (tmp_path / "e").exists()


def test_new_path_is_below_dray_home_and_another_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    paths = [new_path(CONFIG) for _ in range(5)]  # two are the same by chance, once in 65,536 times
    assert {path.parent for path in paths} == {tmp_path}
    assert len(set(paths)) > 1
    assert paths[0].name.startswith("digits---more-")


@pytest.mark.parametrize(("name", "found"), [(".hidden", "hidden-2"), ("../../x", "x-2"), ("..", "experiment-2")])
def test_no_name_makes_a_directory_that_the_list_does_not_show(name: str, found: str) -> None:
    assert new_path(load_config({**CONFIG.to_dict(), "name": name})).name.startswith(found)


def test_new_path_is_below_the_configs_storage_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "home"))
    storage = {"type": "directory", "container_path": str(tmp_path / "storage")}
    config = load_config({**CONFIG.to_dict(), "checkpoint_storage": storage})
    assert new_path(config).parent == tmp_path / "storage"
    config = load_config({**CONFIG.to_dict(), "checkpoint_storage": "s3://bucket/results"})
    assert new_path(config).parent == tmp_path / "home"


def test_an_experiment_without_storage_uses_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    def where(config: ExperimentConfig, given: str | None = None) -> str | None:
        location = with_storage(config, given).checkpoint_storage.location
        return location and location.uri

    ours = load_config({**CONFIG.to_dict(), "checkpoint_storage": {"type": "s3", "bucket": "ours"}})
    keeps = load_config({**CONFIG.to_dict(), "checkpoint_storage": {"save_trial_latest": 3}})
    assert where(CONFIG) is None
    monkeypatch.setenv("DRAY_STORAGE", "s3://everybodys/results")
    assert where(CONFIG) == "s3://everybodys/results"
    assert with_storage(keeps, None).checkpoint_storage.save_trial_latest == 3
    assert where(ours) == "s3://ours"
    assert where(CONFIG, "gs://given") == "gs://given"
    monkeypatch.setenv("DRAY_STORAGE", "")
    assert where(CONFIG) is None
    monkeypatch.setenv("DRAY_STORAGE", "s3://")
    with pytest.raises(ConfigError, match="DRAY_STORAGE: s3:// has no bucket"):
        where(CONFIG)


def test_checkpoints_in_a_store_are_below_the_experiments_name(tmp_path: Path) -> None:
    storage = {"type": "s3", "bucket": "bucket", "prefix": "results", "access_key": "KEY", "secret_key": "S3CR3T"}
    config = load_config({**CONFIG.to_dict(), "checkpoint_storage": storage})
    ExperimentDirectory.create(tmp_path / "digits-1", config, None)
    opened = ExperimentDirectory.open(tmp_path / "digits-1")
    assert opened.store(7).id_of(352) == "s3://bucket/results/digits-1/trial_7/checkpoint_352"
    assert dict(opened.storage.secrets) == {"access_key": "KEY", "secret_key": "S3CR3T"}
    assert "S3CR3T" not in opened.config_file.read_text()
    assert opened.storage_file.stat().st_mode & 0o777 == 0o600
    assert opened.config().checkpoint_storage.location is not None
    ExperimentDirectory.create(tmp_path / "local", CONFIG, None)
    store = ExperimentDirectory.open(tmp_path / "local").store(7)
    assert store.id_of(352) == str(tmp_path / "local" / "trial_7" / "checkpoint_352")


TRIALS = Path(__file__).parents[1] / "ray" / "trials"


def experiment(path: Path) -> dray.Experiment:
    config = {
        "name": "lost",
        "entrypoint": "recorded:Recorded",
        "hyperparameters": {"global_batch_size": 8, "record": "-", "pause_s": 0.0, "lr": 0.1},
        "searcher": {"name": "random", "metric": "error", "max_length": {"batches": 10}, "max_trials": 5},
    }
    return dray.Experiment(config, model_dir=TRIALS, path=path)


def _deleted(self: dray.Experiment, config: Any, directory: Any, *_: Any) -> None:
    shutil.rmtree(self.path)
    (self.path / "trial_0").mkdir(parents=True)  # as a trial does that still runs
    directory.config_file.read_text()


def test_errors_caused_by_a_deleted_directory_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = experiment(tmp_path / "experiment")
    monkeypatch.setattr(dray.Experiment, "_run", _deleted)
    with pytest.raises(DirectoryGone, match="was deleted or moved while it ran") as raised:
        lost.run()
    assert raised.value.__suppress_context__
    assert str(tmp_path / "experiment") in str(raised.value)


def test_an_error_is_unchanged_if_the_directory_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = experiment(tmp_path / "experiment")
    monkeypatch.setattr(dray.Experiment, "_run", lambda *_: (_ for _ in ()).throw(FileNotFoundError("another file")))
    with pytest.raises(FileNotFoundError, match="another file"):
        lost.run()
