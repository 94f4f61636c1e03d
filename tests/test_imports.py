"""Model code of several directories in one process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import yaml

from dray import imports
from dray.imports import import_from_path, use_model_dir

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.modules.clear()
    sys.modules.update(modules)
    sys.path[:] = path


def model_dir(parent: Path, name: str, **files: str) -> Path:
    directory = parent / name
    for file, text in files.items():
        path = directory / f"{file.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_two_directories_each_have_their_own_modules(tmp_path: Path) -> None:
    old = model_dir(tmp_path, "old", my_model="from my_parts import part", my_parts="part = 'old'")
    new = model_dir(tmp_path, "new", my_model="from my_parts import part", my_parts="part = 'new'")
    use_model_dir(old)
    first = importlib.import_module("my_model")
    use_model_dir(new)
    second = importlib.import_module("my_model")
    assert (first.part, second.part) == ("old", "new")
    assert str(old) not in sys.path


def test_module_of_the_earlier_directory_is_not_found_from_the_later(tmp_path: Path) -> None:
    use_model_dir(model_dir(tmp_path, "old", my_only="x = 1"))
    importlib.import_module("my_only")
    use_model_dir(model_dir(tmp_path, "new", my_other="x = 1"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("my_only")


def test_directory_stays_importable_for_imports_within_functions(tmp_path: Path) -> None:
    directory = model_dir(
        tmp_path, "one", my_model="def later():\n    import my_late\n    return my_late.x", my_late="x = 5"
    )
    use_model_dir(directory)
    assert importlib.import_module("my_model").later() == 5


def test_packages_and_folders_without_init_are_kept_apart_too(tmp_path: Path) -> None:
    for name in ("old", "new"):
        directory = model_dir(tmp_path, name, my_package__inner=f"x = {name!r}")
        use_model_dir(directory)
        assert importlib.import_module("my_package.inner").x == name


def test_folder_in_a_package_that_could_not_be_imported_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ray.serve.generated` is, once `ray.serve` has failed for want of what it needs."""
    (tmp_path / "broken" / "inner").mkdir(parents=True)
    (tmp_path / "broken" / "__init__.py").write_text("import broken.inner\nraise RuntimeError")
    use_model_dir(model_dir(tmp_path, "one", model_def="one = 1"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError):
        importlib.import_module("broken")
    assert "broken.inner" in sys.modules
    use_model_dir(model_dir(tmp_path, "two", model_def="two = 2"))
    assert importlib.import_module("model_def").two == 2


@pytest.mark.api("8.15")
def test_with_block_forgets_and_gives_back_what_was_there(tmp_path: Path) -> None:
    outer = model_dir(tmp_path, "outer", my_model="x = 'outer'")
    inner = model_dir(tmp_path, "inner", my_model="x = 'inner'")
    use_model_dir(outer)
    before = importlib.import_module("my_model")
    with import_from_path(inner):
        assert importlib.import_module("my_model").x == "inner"
    assert importlib.import_module("my_model") is before
    assert str(inner) not in sys.path


def test_a_lazy_module_is_not_made_to_import(tmp_path: Path) -> None:
    lazy = ModuleType("lazy")
    lazy.__dict__["__getattr__"] = lambda name: importlib.import_module("not_installed")
    sys.modules["lazy"] = lazy
    use_model_dir(model_dir(tmp_path, "model", lazy="x = 1"))
    imports.forget_model_dir()


def test_library_of_the_same_name_is_never_reloaded(tmp_path: Path) -> None:
    use_model_dir(model_dir(tmp_path, "one", json="x = 1", yaml="x = 1", numpy="x = 1", dray="x = 1"))
    assert (sys.modules["json"], sys.modules["yaml"], sys.modules["numpy"]) == (json, yaml, numpy)
    assert sys.modules["dray.imports"] is imports


def test_directory_that_holds_dray_itself_is_harmless() -> None:
    use_model_dir(HERE.parent)
    use_model_dir(HERE)
    assert sys.modules["dray.imports"] is imports
