"""What the source of a module tells of a trial's class: missing ones are refused, and nothing that could be there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dray.code.load import check_entrypoint, check_entrypoint_file
from dray.config.entrypoint import ClassName, parse_entrypoint
from dray.errors import EntrypointError

NO_TRIAL = "m:Trial must be a subclass of PyTorchTrial, got a"


def check(directory: Path, source: str, name: str = "m:Trial", file: str = "m.py") -> bool:
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).write_text(source)
    return check_entrypoint_file(parse_entrypoint(name), directory)


def fault(directory: Path, source: str, name: str = "m:Trial") -> str:
    with pytest.raises(EntrypointError) as caught:
        check(directory, source, name)
    [(field, what)] = caught.value.faults
    assert field == "entrypoint"
    return what


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("class Trail(Base): pass", "m has no class Trial; did you mean Trail?"),
        ("class Net(Base): pass\nclass A: pass", "m has no class Trial; its classes are A, Net"),
        ("", "m has no class Trial; it has no classes: derive one from dray.pytorch.PyTorchTrial"),
        ("def f():\n    Trial = 1\n    class Trial: pass", "m has no class Trial; it has no classes"),
        ("class Outer:\n    class Trial(Base): pass", "m has no class Trial; its classes are Outer"),
        ("Trial: type\nmodel.eval()\nlist(model.modules())", "m has no class Trial; it has no classes"),
        ("def Trial(context): pass", f"{NO_TRIAL} value of type function; it has no classes"),
        ("Trial = 3", f"{NO_TRIAL} value of type int"),
        ("Trial: list = []", f"{NO_TRIAL} value of type list"),
        ("import Trial", f"{NO_TRIAL} value of type module"),
        ("class Trial: pass", f"{NO_TRIAL}nother class; derive it from dray.pytorch.PyTorchTrial"),
        ("class Trial: pass\nclass Big(B): pass", f"{NO_TRIAL}nother class; its other classes are Big"),
    ],
)
def test_what_can_be_no_trial_is_refused_with_what_is_there(tmp_path: Path, source: str, error: str) -> None:
    assert fault(tmp_path, source).startswith(error)


@pytest.mark.parametrize(
    "source",
    [
        "class Trial(Base): pass",
        "@decorated\ndef Trial(): pass",
        "class Trial(metaclass=Meta): pass",
        "def Trial(): pass\nTrial = made(Trial)",
        "Trial = made()",
        "a = Trial = made()",
        "[(Trial, b), *rest] = made()",
        "first, *Trial = made()",
        "from trials import Other as Trial",
        "import trials.Trial as Trial",
        "if fast:\n    class Trial(Base): pass",
        "try:\n    from a import Trial\nexcept ImportError:\n    pass",
        "with made() as Trial: pass",
        "for Trial in made(): pass",
        "while x:\n    class Trial(Base): pass",
        "match made():\n    case [_, Trial]: pass",
        "match made():\n    case {'a': 1, **Trial}: pass",
        "def f():\n    global Trial\n    Trial = made()\nf()",
        "print(Trial := made())",
        "def f(x=(Trial := made())): pass",
        "class A(Trial := made()): pass",
    ],
)
def test_every_way_to_define_a_class_is_seen(tmp_path: Path, source: str) -> None:
    assert check(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        "from trials import *",
        "from trials import \\\n  *",
        "globals()['Trial'] = made()",
        "vars()['Trial'] = made()",
        "exec('class Trial(Base): pass')",
        "import sys\nsys.modules[__name__].Trial = made()",
        "from sys import modules as m\nsetattr(m[__name__], 'Trial', made())",
        "import importlib\nsetattr(importlib.import_module(__name__), 'Trial', made())",
        "def __getattr__(name): return made(name)",
        "f.__globals__['Trial'] = made()",
        "def Trial(): pass\nglobals().update(made())",
        f"x = {'-' * 100_000}1",
    ],
)
def test_what_the_source_cannot_tell_is_left_to_an_import(tmp_path: Path, source: str) -> None:
    assert not check(tmp_path, source)


def test_submodules_are_attributes_of_their_package(tmp_path: Path) -> None:
    check(tmp_path, "class Trial(Base): pass", "pack.inner:Trial", "pack/inner.py")
    assert check(tmp_path, "from .inner import Trial as T", "pack:inner.Trial", "pack/__init__.py")
    (tmp_path / "pack.py").write_text("")  # which an import of pack ignores
    (tmp_path / "pack" / "__main__.py").write_text("")
    assert check_entrypoint_file(ClassName("pack", "T"), tmp_path)
    with pytest.raises(EntrypointError, match=r"pack has no class S; it has no classes"):
        check_entrypoint_file(ClassName("pack", "S"), tmp_path)


@pytest.mark.parametrize("entrypoint", ["os:system", "sys:exit", "json.decoder:JSONDecoder", "builtins:int"])
def test_pythons_own_modules_have_no_trials(tmp_path: Path, entrypoint: str) -> None:
    module = entrypoint.partition(":")[0]
    assert fault(tmp_path, "", entrypoint).startswith(
        f"{module} is a module of Python, so it has no trials; for example"
    )
    assert check(tmp_path, "class Trial(Base): pass", "os:Trial", "os.py")  # of the user's own, with the same name


@pytest.mark.parametrize("module", ["a" * 300, "a" * 80_000, "a." * 5_000 + "b"])
def test_a_module_whose_name_is_too_long_for_a_file_is_missing(tmp_path: Path, module: str) -> None:
    assert fault(tmp_path, "", f"{module}:Trial").startswith("no module aaaa" if "." not in module else "no module a.a")


def test_installed_modules_are_read_without_importing_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, model = tmp_path / "installed", tmp_path / "model"
    model.mkdir()
    (installed / "their_package").mkdir(parents=True)
    (installed / "their_package" / "__init__.py").write_text("1 / 0")
    (installed / "their_package" / "trials.py").write_text("class Trial(Base): pass")
    monkeypatch.syspath_prepend(str(installed))
    assert check_entrypoint_file(ClassName("their_package.trials", "Trial"), model)
    with pytest.raises(EntrypointError, match=r"their_package\.trials has no class Tril; did you mean Trial\?"):
        check_entrypoint_file(ClassName("their_package.trials", "Tril"), model)
    assert not check_entrypoint_file(ClassName("their_package.absent", "Trial"), model)
    with pytest.raises(EntrypointError, match="no module __main__ in"):
        check_entrypoint_file(ClassName("__main__", "Trial"), model)
    assert "their_package" not in sys.modules


def test_class_is_imported_only_where_its_source_cannot_tell(tmp_path: Path) -> None:
    (tmp_path / "my_trials.py").write_text("class Trial: pass")
    for source in ("class Trial(Base): 1 / 0", "from trials import Trial"):
        (tmp_path / "m.py").write_text(source)
        check_entrypoint(ClassName("m", "Trial"), tmp_path, imports=False)
    (tmp_path / "m.py").write_text("from my_trials import *")
    with pytest.raises(EntrypointError, match="m has no class Trail; it has no trials"):
        check_entrypoint(ClassName("m", "Trail"), tmp_path, imports=False)


def test_empty_program_is_refused(tmp_path: Path) -> None:
    assert fault(tmp_path, "\n\n", "python3 m.py").startswith(f"{tmp_path / 'm.py'} is empty, so it trains nothing")
