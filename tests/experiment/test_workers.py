"""What is sent to the workers of a cluster; that it comes there, tests/cluster/test_code_travels.py shows."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dray.code.factory import FromDirectory, Sent
from dray.code.packages import Package
from dray.config.entrypoint import parse_entrypoint
from dray.config.load import load_config
from dray.errors import ConfigError
from dray.experiment import workers
from dray.records.directory import ExperimentDirectory

CONFIG = load_config({"name": "digits", "searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}})


class Sender:
    """In the place of a cluster: keeps what is put into its store."""

    def __init__(self) -> None:
        self.packages: list[list[str]] = []
        self.said: list[str] = []

    def package(self, directory: Path, links: tuple[tuple[str, str], ...] = ()) -> Package:
        files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        self.packages.append(files)
        return Package(uri="gcs://_ray_pkg_1.zip", links=links)

    def runtime_env(self, *packages: Package) -> dict[str, Any]:
        return {"py_modules": ["dray", *(package.uri for package in packages)]}

    def send(self, what: str | type, path: Path) -> tuple[FromDirectory | Sent, dict[str, Any]]:
        """Send an entrypoint, or a class of a script."""
        trial: Any = what if isinstance(what, type) else None
        config = CONFIG if isinstance(what, type) else CONFIG.model_copy(update={"entrypoint": parse_entrypoint(what)})
        return workers.send_code(trial, ExperimentDirectory(path), config, self.said.append, local=False)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    sender = Sender()
    monkeypatch.setattr(workers, "package", sender.package)
    monkeypatch.setattr(workers, "runtime_env", sender.runtime_env)
    return sender


@pytest.fixture
def script(tmp_path: Path) -> Iterator[type]:
    """A class of <tmp_path>/user/project/driver.py."""
    project = tmp_path / "user" / "project"
    (project / "parts").mkdir(parents=True)
    for name in ("driver.py", "helpers.py", "parts/layers.py", ".env"):
        (project / name).write_text("")
    module = ModuleType("a_script")
    module.__file__ = str(project / "driver.py")
    sys.modules["a_script"] = module
    exec("class Mine: ...", module.__dict__)
    yield module.__dict__["Mine"]
    del sys.modules["a_script"]


def test_the_experiments_copy_of_the_model_directory_is_sent(sender: Sender, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_def.py").write_text("x = 1\n")
    (model / "data").symlink_to("/mnt/data")
    directory = ExperimentDirectory.create(tmp_path / "e", CONFIG, model)
    (model / "model_def.py").unlink()
    load, runtime_env = sender.send("model_def:X", tmp_path / "e")
    expected = Package(uri="gcs://_ray_pkg_1.zip", links=(("data", "/mnt/data"),))
    assert load == FromDirectory(entrypoint=parse_entrypoint("model_def:X"), directory=expected)
    assert runtime_env == {"py_modules": ["dray", "gcs://_ray_pkg_1.zip"]}
    assert sender.packages == [["model_def.py"]]
    assert sender.said == [f"sending {directory.code} (1 file, 6 B) and dray itself to the workers"]


def test_models_directory_may_be_empty(sender: Sender, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    ExperimentDirectory.create(tmp_path / "e", CONFIG, tmp_path / "model")
    load, _ = sender.send("python3 -m installed", tmp_path / "e")
    installed = parse_entrypoint("python3 -m installed")
    assert load == FromDirectory(entrypoint=installed, directory=Package(uri="gcs://_ray_pkg_1.zip"))


def test_files_beside_a_script_are_copied_into_the_experiment_once(
    sender: Sender, script: type, tmp_path: Path
) -> None:
    ExperimentDirectory.create(tmp_path / "e", CONFIG, None)
    for _ in range(2):  # created, then resumed
        load, _ = sender.send(script, tmp_path / "e")
        assert isinstance(load, Sent)
        assert (load.name, load.home) == ("Mine", Package(uri="gcs://_ray_pkg_1.zip"))
        (tmp_path / "user" / "project" / "later.py").write_text("")
    assert sender.packages == [["driver.py", "helpers.py", "parts/layers.py"]] * 2


@pytest.mark.parametrize(("home", "goes"), [("user/project", ["driver.py", "helpers.py"]), ("user", None)])
def test_only_the_top_level_of_a_home_directory_is_sent(
    sender: Sender, script: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, goes: list[str] | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / home))
    sender.send(script, tmp_path / "e")
    assert sender.packages == [goes or ["driver.py", "helpers.py", "parts/layers.py"]]


def test_class_of_an_installed_module_is_sent_alone(sender: Sender, tmp_path: Path) -> None:
    local = type("Local", (), {"__module__": "yaml"})
    load, runtime_env = sender.send(local, tmp_path / "e")
    assert isinstance(load, Sent)
    assert load.home is None
    assert runtime_env == {"py_modules": ["dray"]}
    assert sender.said == ["sending the trial's class and dray itself to the workers"]
    assert isinstance(pickle.loads(load.pickled), type)


def test_directory_of_data_beside_a_script_is_an_error(
    sender: Sender, script: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dray.code.ignore.MAX_CODE_BYTES", 1000)
    (tmp_path / "user" / "project" / "data.bin").write_bytes(bytes(2000))
    with pytest.raises(ConfigError, match=r"trial: .*user/project has 2\.0 KiB of files.*; the largest are data\.bin"):
        sender.send(script, tmp_path / "e")
