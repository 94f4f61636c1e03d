"""Secrets of a config: given to trials, and kept in one file of the experiment's owner, which stays where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.core import ClusterInfo, TrialInfo
from dray.errors import ConfigError
from dray.experiment.experiment import Experiment
from dray.masking import MASK
from dray.records.copies import download
from dray.records.directory import ExperimentDirectory
from dray.records.listing import open_experiment
from dray.records.secrets import LARGEST, hide_in, with_secrets
from dray.storage import Location
from tests.report.simulated import simulated

TOKEN = "c4n4ry-t0k3n"
CONFIG: dict[str, Any] = {
    "name": "secret",
    "entrypoint": "python3 train.py",
    "data": {"path": "/data", "secrets": {"token": TOKEN, "day": "2026-11-21"}},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 2}},
}


def model_dir(directory: Path) -> Path:
    """A model's code, with the config and a driver in it, and two links out of it."""
    outside, inside = directory / "outside.yaml", directory / "model"
    (inside / "package").mkdir(parents=True)
    outside.write_text(f"token: {TOKEN}\n")
    (inside / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (inside / "package" / "driver.py").write_text(f"TOKEN = {TOKEN!r}\n")
    (inside / "train.py").write_text("import dray\n")
    (inside / "linked.yaml").symlink_to(outside)
    (inside / "gone.yaml").symlink_to(directory / "gone")
    (inside / "weights.bin").write_bytes(b"\0\xff" + TOKEN.encode() + b"\0")
    (inside / "config.yaml").chmod(0o640)
    return inside


def holding(directory: Path) -> set[str]:
    """The files that have the token."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix() for path in files if TOKEN.encode() in path.read_bytes()}


def test_secrets_are_only_in_the_owners_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = model_dir(tmp_path)
    given = holding(tmp_path)
    directory = ExperimentDirectory.create(tmp_path / "experiment", load_config(CONFIG), code)
    assert holding(directory.path) == {"secrets.yaml"}
    assert directory.secrets_file.stat().st_mode & 0o777 == 0o600
    assert holding(tmp_path) - {"experiment/secrets.yaml"} == given, "and the user's own are as they were"
    [told] = caplog.messages
    assert "secrets in the experiment's copy of the code are replaced by xxx" in told
    assert "config.yaml, linked.yaml, package/driver.py and 1 more" in told
    assert TOKEN not in told
    copy = yaml.safe_load((directory.code / "config.yaml").read_text())
    assert copy == {**CONFIG, "data": {**CONFIG["data"], "secrets": {"token": "x" * 12, "day": "x" * 10}}}
    assert (directory.code / "config.yaml").stat().st_mode & 0o777 == 0o640
    assert (directory.code / "weights.bin").stat().st_size == (code / "weights.bin").stat().st_size
    assert (directory.code / "train.py").read_text() == "import dray\n"


def test_credentials_of_a_store_are_not_in_the_copied_code(tmp_path: Path) -> None:
    code = model_dir(tmp_path)
    storage = {"type": "s3", "bucket": "bucket", "access_key": "AKIA0123456789", "secret_key": TOKEN}
    config = load_config({**CONFIG, "data": {}, "checkpoint_storage": storage})
    assert holding(ExperimentDirectory.create(tmp_path / "experiment", config, code).path) == {"storage.json"}


def test_resume_restores_secrets(tmp_path: Path) -> None:
    directory = ExperimentDirectory.create(tmp_path / "experiment", load_config(CONFIG), model_dir(tmp_path))
    assert directory.config().data["secrets"] == {"token": MASK, "day": MASK}
    experiment = Experiment.resume(directory.path)
    assert experiment._config.data == CONFIG["data"]  # noqa: SLF001 - what its trials get


def test_values_of_environment_variables_are_secrets(tmp_path: Path) -> None:
    variables = {"cuda": ["NCCL_DEBUG=INFO", "PROXY"], "MY_API_KEY": TOKEN, "DATA": "/mnt/pictures"}
    raw = {**CONFIG, "data": {}, "environment": {"environment_variables": variables}}
    config, code = load_config(raw), model_dir(tmp_path)
    (code / "train.py").write_text(f"KEY = {TOKEN!r}\nDATA = '/mnt/pictures'\n")
    directory = ExperimentDirectory.create(tmp_path / "experiment", config, code)
    assert holding(directory.path) == {"secrets.yaml"}
    masked = {"cuda": {"NCCL_DEBUG": MASK, "PROXY": None}, "MY_API_KEY": MASK, "DATA": MASK}
    assert directory.config().environment.environment_variables == masked
    # What is no secret by its name is no word that code is searched for.
    assert (directory.code / "train.py").read_text() == f"KEY = '{'x' * len(TOKEN)}'\nDATA = '/mnt/pictures'\n"
    resumed = Experiment.resume(directory.path)
    assert resumed._config.environment == config.environment  # noqa: SLF001 - what its trials get
    assert TOKEN not in f"{config!r} {config} {config.to_dict()}"
    with pytest.raises(ConfigError, match=r"environment\.environment_variables\.MY_API_KEY: is masked"):
        Experiment(directory.config_file, model_dir=code)


def test_missing_secrets_are_named_with_the_file_to_write(tmp_path: Path) -> None:
    directory = ExperimentDirectory.create(tmp_path / "experiment", load_config(CONFIG), model_dir(tmp_path))
    directory.secrets_file.unlink()
    with pytest.raises(ConfigError) as told:
        Experiment.resume(directory.path)
    assert [fault.path for fault in told.value.faults] == ["data.secrets.token", "data.secrets.day"]
    assert str(directory.secrets_file) in told.value.faults[0].what
    directory.secrets_file.write_text(f"token: {TOKEN}\nday: '{MASK}'\n")
    with pytest.raises(ConfigError) as told:
        Experiment.resume(directory.path)
    assert [fault.path for fault in told.value.faults] == ["data.secrets.day"]
    directory.secrets_file.write_text(f"token: {TOKEN}\n")
    directory.secrets_file.chmod(0o644)
    assert with_secrets(directory.config(), directory.secrets_file).data["secrets"] == {"token": TOKEN}
    assert directory.secrets_file.stat().st_mode & 0o777 == 0o600, "it was written by hand"


def test_a_new_experiment_of_a_masked_config_is_refused(tmp_path: Path) -> None:
    config = ExperimentDirectory.create(tmp_path / "experiment", load_config(CONFIG), None).config_file
    with pytest.raises(ConfigError, match=r"data\.secrets\.token: is masked"):
        Experiment(config, model_dir=model_dir(tmp_path))


def test_a_copy_of_an_experiment_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = simulated(tmp_path / "experiment", 4)
    directory.secrets_file.write_text(f"token: {TOKEN}\n")
    with open_experiment(str(directory.path)) as it:
        assert download(it, tmp_path / "copy") == []
    assert holding(tmp_path / "copy") == set()


def test_secrets_are_in_no_text_of_a_config() -> None:
    config = load_config(CONFIG)
    for shown in (repr(config), str(config), str(config.to_dict())):
        assert TOKEN not in shown
    assert config.data["secrets"]["token"] == TOKEN, "but the trial has them"


def test_secrets_are_in_no_text_of_the_cluster_info() -> None:
    data = CONFIG["data"]
    info = ClusterInfo(trial=TrialInfo(trial_id=1, experiment_id=1, trial_seed=1, config=CONFIG), user_data=data)
    assert TOKEN not in repr(info)
    assert info.trial.config["data"] == info.user_data == data


def test_a_file_too_large_for_code_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b" " * LARGEST + TOKEN.encode())
    (tmp_path / "text").write_text(TOKEN)
    assert hide_in(tmp_path, [TOKEN]) == ["text"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"data": f"secrets: {TOKEN}"}, "data"),
        ({"checkpoint_storage": {"type": "s3", "bucket": f"KEY:{TOKEN}@bucket"}}, "checkpoint_storage.bucket"),
        ({"checkpoint_storage": {"type": "uri", "storage_path": f"s3://K:{TOKEN}"}}, "checkpoint_storage"),
        ({"checkpoint_storage": f"s3://bucket?secret_key={TOKEN}&regoin=x"}, "checkpoint_storage"),
        ({"checkpoint_storage": f"memory://bucket?password={TOKEN}"}, "checkpoint_storage"),
        (
            {"checkpoint_storage": {"type": "s3", "bucket": "b", "endpoint_url": f"http://me:{TOKEN}@minio"}},
            "checkpoint_storage.endpoint_url",
        ),
        (
            {"checkpoint_storage": {"type": "azure", "container": "c", "account_url": f"https://me.net?sig={TOKEN}"}},
            "checkpoint_storage.account_url",
        ),
        ({"loggers": {"mlflow": {"tracking_uri": f"http://me:{TOKEN}@mlflow"}}}, "loggers.mlflow.tracking_uri"),
    ],
)
def test_refusing_a_config_with_secrets_does_not_show_them(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config({**CONFIG, **fields})
    assert [fault.path for fault in told.value.faults] == [path]
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize("field", ["source_checkpoint_uuid", "source_trial_id"])
def test_source_checkpoint_may_not_contain_credentials(field: str, tmp_path: Path) -> None:
    searcher = {**CONFIG["searcher"], field: f"s3://KEY:{TOKEN}@bucket/trial_1/checkpoint_2"}
    with pytest.raises(ConfigError, match=rf"searcher\.{field}: must not contain credentials") as told:
        Experiment({**CONFIG, "searcher": searcher}, model_dir=model_dir(tmp_path))
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize(
    ("given", "uri", "secrets"),
    [
        (f"s3://KEY:{TOKEN}/x+@bucket/a", "s3://bucket/a", {"access_key": "KEY", "secret_key": f"{TOKEN}/x+"}),
        (f"s3://KEY:{TOKEN}%2Fx@bucket/a", "s3://bucket/a", {"access_key": "KEY", "secret_key": f"{TOKEN}/x"}),
        (f"az://c?account_name=me&account_key={TOKEN}", "az://c?account_name=me", {"account_key": TOKEN}),
        (f"az://c/p?sas_token={TOKEN}&account_name=me", "az://c/p?account_name=me", {"sas_token": TOKEN}),
    ],
)
def test_credentials_of_a_uri_are_not_shown(given: str, uri: str, secrets: dict[str, str]) -> None:
    for storage in (given, {"type": "uri", "storage_path": given}):
        config = load_config({**CONFIG, "data": {}, "checkpoint_storage": storage})
        location = config.checkpoint_storage.location
        assert location is not None
        assert (str(location), dict(location.secrets)) == (uri, secrets)
        for shown in (repr(config), str(config.to_dict()), repr(location), repr(Location.of(given))):
            assert TOKEN not in shown
