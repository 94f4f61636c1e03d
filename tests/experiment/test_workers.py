"""What is sent to the workers of a cluster; that it comes there, tests/cluster/test_code_travels.py shows."""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dray.code.archive import Archived
from dray.code.factory import FromDirectory, Sent
from dray.config.entrypoint import parse_entrypoint
from dray.config.load import load_config
from dray.config.sections import Budget
from dray.errors import ConfigError
from dray.experiment import workers
from dray.records.directory import ExperimentDirectory

CONFIG = load_config({"name": "digits", "searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}})


class Sender:
    """In the place of a cluster."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def send(self, what: str | type, path: Path) -> FromDirectory | Sent:
        """Send an entrypoint, or a class of a script."""
        trial: Any = what if isinstance(what, type) else None
        config = CONFIG if isinstance(what, type) else CONFIG.model_copy(update={"entrypoint": parse_entrypoint(what)})
        load, env = workers.send_code(trial, ExperimentDirectory(path), config, self.said.append, local=False)
        assert env == {"py_modules": ["dray"]}
        return load


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    monkeypatch.setattr(workers, "runtime_env", lambda: {"py_modules": ["dray"]})
    return Sender()


def files(code: Archived | str | None) -> dict[str, str]:
    """The files and links that were sent, with the links' targets."""
    assert isinstance(code, Archived)
    with tarfile.open(fileobj=io.BytesIO(code.packed)) as archive:
        return {each.name: each.linkname for each in sorted(archive, key=attrgetter("name")) if not each.isdir()}


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
    load = sender.send("model_def:X", tmp_path / "e")
    assert isinstance(load, FromDirectory)
    assert load.entrypoint == parse_entrypoint("model_def:X")
    assert files(load.directory) == {"data": "/mnt/data", "model_def.py": ""}
    assert sender.said == [f"sending {directory.code} (1 file, 6 B) and dray itself to the workers"]


def test_models_directory_may_be_empty(sender: Sender, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    ExperimentDirectory.create(tmp_path / "e", CONFIG, tmp_path / "model")
    load = sender.send("python3 -m installed", tmp_path / "e")
    assert isinstance(load, FromDirectory)
    assert files(load.directory) == {}


def test_files_beside_a_script_are_copied_into_the_experiment_once(
    sender: Sender, script: type, tmp_path: Path
) -> None:
    ExperimentDirectory.create(tmp_path / "e", CONFIG, None)
    for _ in range(2):  # created, then resumed
        load = sender.send(script, tmp_path / "e")
        assert isinstance(load, Sent)
        assert load.name == "Mine"
        assert list(files(load.home)) == ["driver.py", "helpers.py", "parts/layers.py"]
        (tmp_path / "user" / "project" / "later.py").write_text("")


@pytest.mark.parametrize(("home", "goes"), [("user/project", ["driver.py", "helpers.py"]), ("user", None)])
def test_only_the_top_level_of_a_home_directory_is_sent(
    sender: Sender, script: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, goes: list[str] | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / home))
    load = sender.send(script, tmp_path / "e")
    assert isinstance(load, Sent)
    assert list(files(load.home)) == (goes or ["driver.py", "helpers.py", "parts/layers.py"])


def test_class_of_an_installed_module_is_sent_alone(sender: Sender, tmp_path: Path) -> None:
    local = type("Local", (), {"__module__": "yaml"})
    load = sender.send(local, tmp_path / "e")
    assert isinstance(load, Sent)
    assert load.home is None
    assert sender.said == ["sending the trial's class and dray itself to the workers"]
    assert isinstance(pickle.loads(load.pickled), type)


def test_directory_of_data_beside_a_script_is_an_error(
    sender: Sender, script: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dray.code.ignore.MAX_CODE_BYTES", 1000)
    (tmp_path / "user" / "project" / "data.bin").write_bytes(bytes(2000))
    with pytest.raises(
        ConfigError, match=r"trial: .*user/project has at least 2\.0 KiB of files.*; the largest are data\.bin"
    ):
        sender.send(script, tmp_path / "e")


def test_each_slot_type_needs_a_price_only_for_a_budget_of_money() -> None:
    prices: Any = {"A100": 2.9, "A100-spot": 1.1}
    paid = CONFIG.model_copy(update={"budget": Budget(usd=200), "prices": prices})
    workers.check_prices(paid, ["A100", "A100-spot", "A100"])
    with pytest.raises(ConfigError, match="required for slots of type CPU, T4 with"):
        workers.check_prices(paid, ["T4", "A100", "CPU"])
    workers.check_prices(paid.model_copy(update={"budget": Budget(time="2h")}), ["T4"])
