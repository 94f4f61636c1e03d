"""How the trial's class gets to a worker: from a directory, from what was sent of one, or by value."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

from dray import pytorch
from dray.code.archive import Archived
from dray.code.factory import FromDirectory, Sent, home_of, place_of
from dray.config.entrypoint import ClassName, parse_entrypoint
from dray.errors import EntrypointError
from tests.forks.process import run_script
from tests.model_code import imports_undone

CODE = "from dray import pytorch\nclass MyTrial(pytorch.PyTorchTrial):\n    class Inner(pytorch.PyTorchTrial): ...\n"


@pytest.fixture(autouse=True)
def path_kept() -> Iterator[None]:
    with imports_undone():
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_model", "my_package")]:
        del sys.modules[name]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text(CODE)
    package = tmp_path / "my_package" / "deep"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(CODE)
    (package / "model.py").write_text(CODE)
    return tmp_path


def imported(directory: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(directory))
    return importlib.import_module(name)


def test_class_is_imported_from_its_directory(directory: Path) -> None:
    load = pickle.loads(
        pickle.dumps(FromDirectory(entrypoint=parse_entrypoint("my_model:MyTrial"), directory=str(directory)))
    )
    found = load()
    assert (found.__name__, load.place()) == ("MyTrial", directory)
    assert found is sys.modules["my_model"].MyTrial


def test_removed_code_is_missing_also_where_it_is_not_imported(tmp_path: Path) -> None:
    gone = FromDirectory(entrypoint=parse_entrypoint("my_model:MyTrial"), directory=str(tmp_path / "gone"))
    with pytest.raises(EntrypointError, match=f"no such directory any more: {tmp_path}/gone; restore it"):
        gone.place()


@pytest.fixture
def sent(directory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Archived:
    """The directory on its way to a worker on another machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("node")))
    return Archived.of(directory)


@pytest.mark.parametrize("module", ["my_model", "my_package.deep", "my_package.deep.model"])
def test_class_is_found_in_the_code_that_was_sent(directory: Path, sent: Archived, module: str) -> None:
    sys.path.insert(0, str(directory))  # another of these names, which comes first
    load = pickle.loads(pickle.dumps(FromDirectory(entrypoint=parse_entrypoint(f"{module}:MyTrial"), directory=sent)))
    assert load().__module__ == module
    assert Path(sys.modules[module].__file__ or "").is_relative_to(load.place())


def script_class(directory: Path, name: str) -> bytes:
    """A class of a script in the directory that imports from beside it, pickled as a driver does it."""
    script = f"import my_model\nclass {name}(my_model.MyTrial):\n    def of(self): return my_model.__file__\n"
    return cloudpickle_of(directory, script, name)


def cloudpickle_of(directory: Path, script: str, name: str) -> bytes:
    (directory / "driver.py").write_text(
        "import pathlib\nfrom ray import cloudpickle\n"
        f"{script}pathlib.Path('pickled').write_bytes(cloudpickle.dumps({name}))\n"
    )
    run_script(directory / "driver.py", directory=directory)
    return (directory / "pickled").read_bytes()


@pytest.mark.slow
def test_a_scripts_class_comes_with_the_code_beside_it_and_runs_there(
    directory: Path, sent: Archived, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    load = pickle.loads(pickle.dumps(Sent(name="Scripts", pickled=script_class(directory, "Scripts"), home=sent)))
    found = load()
    assert Path(found.of(None)) == sent.place() / "my_model.py"
    assert Path.cwd() == sent.place()


@pytest.mark.slow
def test_modules_that_no_worker_has_for_a_scripts_class_are_reported(directory: Path) -> None:
    load = Sent(name="Scripts", pickled=script_class(directory, "Scripts"), home=None)
    with pytest.raises(
        EntrypointError, match=r"trial: Scripts can't be loaded on a worker: .*No module named 'my_model'"
    ):
        load()


@pytest.mark.parametrize("module", ["my_model", "my_package.deep", "my_package.deep.model"])
@pytest.mark.parametrize("name", ["MyTrial", "MyTrial.Inner"])
def test_place_of_an_importable_class_is_where_to_import_it_from(directory: Path, module: str, name: str) -> None:
    place = place_of(attrgetter(name)(imported(directory, module)))
    assert place == (ClassName(module, name), directory)
    entrypoint, code = place
    sys.modules.pop(module)
    found = FromDirectory(entrypoint=entrypoint, directory=str(code))()
    assert isinstance(found, type)
    assert found.__qualname__ == name


def test_class_that_others_cannot_import_has_no_place() -> None:
    class Local(pytorch.PyTorchTrial): ...  # type: ignore[misc]

    script = type("Script", (pytorch.PyTorchTrial,), {"__module__": "__main__"})
    notebook = type("Notebook", (pytorch.PyTorchTrial,), {"__module__": "a_module_without_a_file"})
    assert [place_of(kind) for kind in (Local, script, notebook)] == [None] * 3
    assert [home_of(kind) for kind in (Local, notebook)] == [Path(__file__).parents[2], Path.cwd()]


def test_class_of_an_installed_package_has_no_home() -> None:
    assert home_of(type("Installed", (), {"__module__": "torch.nn"})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "home"),
    [("my_package/deep/model.py", "my_package/deep"), ("-m my_package.deep", ".")],
)
@pytest.mark.slow
def test_home_of_a_scripts_class_is_where_python_imports_from(directory: Path, command: str, home: str) -> None:
    script = "from dray.code.factory import home_of\nclass Mine: ...\nprint(home_of(Mine))\n"
    (directory / "my_package/deep/model.py").write_text(script)
    (directory / "my_package/deep/__main__.py").write_text(script)
    command = [sys.executable, *command.split()]
    told = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
    assert Path(told.strip()) == (directory / home).resolve()
