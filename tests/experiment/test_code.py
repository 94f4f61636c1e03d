"""How the trial's class gets to a worker: by import from a directory, from Ray's copy of one, or by value."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

from dray import imports, pytorch
from dray.experiment.code import ByValue, FromDirectory, place_of
from dray.experiment.command import parse_entrypoint
from dray.experiment.errors import EntrypointError

CODE = "from dray import pytorch\nclass MyTrial(pytorch.PyTorchTrial):\n    class Inner(pytorch.PyTorchTrial): ...\n"


@pytest.fixture(autouse=True)
def path_kept() -> Iterator[None]:
    path = list(sys.path)
    yield
    imports.forget_model_dir()
    imports._current, imports._older = None, frozenset()
    sys.path[:] = path
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
    load = pickle.loads(pickle.dumps(FromDirectory(entrypoint="my_model:MyTrial", directory=str(directory))))
    found = load()
    assert (found.__name__, load.place()) == ("MyTrial", directory)
    assert found is sys.modules["my_model"].MyTrial


@pytest.mark.parametrize("module", ["my_model", "my_package.deep", "my_package.deep.model"])
def test_class_is_found_where_ray_has_put_the_code_on_the_path(directory: Path, module: str) -> None:
    sys.path.insert(1, str(directory))
    load = FromDirectory(entrypoint=f"{module}:MyTrial", directory=None)
    found = load()
    assert isinstance(found, type)
    assert (found.__module__, load.place()) == (module, directory)


@pytest.mark.parametrize("program", ["my_model.py", "my_package/deep/model.py", "-m my_package.deep.model"])
def test_program_is_found_where_ray_has_put_the_code_on_the_path(directory: Path, program: str) -> None:
    sys.path.insert(1, str(directory))
    load = FromDirectory(entrypoint=f"python3 {program}", directory=None)
    assert load.place() == directory
    assert load() == parse_entrypoint(f"python3 {program}")


def test_module_that_is_nowhere_on_the_path_is_an_error_that_tells_the_path(directory: Path) -> None:
    sys.path.append("/a/place/of/mine")
    with pytest.raises(EntrypointError, match=r"no module my_model on this worker; looked in .*/a/place/of/mine"):
        FromDirectory(entrypoint="my_model:MyTrial", directory=None)()


def test_program_that_is_nowhere_on_the_path_is_an_error(directory: Path) -> None:
    with pytest.raises(EntrypointError, match=r"no script train.py on this worker; looked in "):
        FromDirectory(entrypoint="python3 train.py", directory=None)()


def test_class_by_value_needs_no_code() -> None:
    class Local(pytorch.PyTorchTrial): ...  # type: ignore[misc]

    load = ByValue(trial=Local)
    assert (load(), load.place()) == (Local, None)


@pytest.mark.parametrize("module", ["my_model", "my_package.deep", "my_package.deep.model"])
@pytest.mark.parametrize("name", ["MyTrial", "MyTrial.Inner"])
def test_place_of_an_importable_class_is_the_directory_to_import_it_from(
    directory: Path, module: str, name: str
) -> None:
    place = place_of(attrgetter(name)(imported(directory, module)))
    assert place == (f"{module}:{name}", directory)
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
