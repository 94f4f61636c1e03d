"""From ``module:Class`` to a trial's class, or to one clear error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.code.load import check_entrypoint, load_entrypoint, load_trial_class
from dray.config.entrypoint import ClassName, parse_entrypoint
from dray.errors import ConfigError, EntrypointError
from dray.script import Script

TRIAL = """
from dray import pytorch
class {name}(pytorch.PyTorchTrial):
    here = {here!r}
    def __init__(self, context): pass
    def train_batch(self, batch, epoch_idx, batch_idx): pass
    def evaluate_batch(self, batch, batch_idx): pass
    def build_training_data_loader(self): pass
    def build_validation_data_loader(self): pass
"""
MY_TRIAL = ClassName("my_model", "MyTrial")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]
    sys.path[:] = path


def write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.py").write_text(text)
    return directory


def fault(entrypoint: str | None, directory: Path) -> str:
    with pytest.raises(EntrypointError) as caught:
        load_entrypoint(None if entrypoint is None else parse_entrypoint(entrypoint), directory)
    assert isinstance(caught.value, ConfigError)
    [(path, what)] = caught.value.faults
    assert path == "entrypoint"
    return what


def test_class_is_loaded_from_the_model_directory(tmp_path: Path) -> None:
    from dray.pytorch import PyTorchTrial

    found = load_trial_class(MY_TRIAL, write(tmp_path, "my_model", TRIAL.format(name="MyTrial", here=1)))
    assert issubclass(found, PyTorchTrial)
    assert found.__name__ == "MyTrial"


def test_two_directories_with_a_module_of_one_name_both_work(tmp_path: Path) -> None:
    found = [
        load_trial_class(
            MY_TRIAL,
            write(tmp_path / here, "my_model", TRIAL.format(name="MyTrial", here=here)),
        )
        for here in ("a", "b")
    ]
    assert [cls.here for cls in found] == ["a", "b"]  # type: ignore[attr-defined]


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EntrypointError, match="model_dir: no such directory"):
        load_trial_class(MY_TRIAL, tmp_path / "none")


def test_missing_module_is_reported_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "my_model", "")
    assert fault("my_modell:MyTrial", tmp_path).endswith("did you mean my_model?")
    assert "no module my_package" in fault("my_package.inner:MyTrial", tmp_path).replace(".inner", "")


def test_missing_import_inside_the_module_is_not_a_missing_module(tmp_path: Path) -> None:
    what = fault("my_model:MyTrial", write(tmp_path, "my_model", "x = 1\nimport my_absent_library\n"))
    assert "raised ModuleNotFoundError" in what
    assert "No module named 'my_absent_library'" in what
    assert 'my_model.py", line 2' in what


@pytest.mark.parametrize(
    ("text", "error"),
    [("def f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_module_that_raises_is_reported_with_its_own_traceback(tmp_path: Path, text: str, error: str) -> None:
    what = fault("my_model:MyTrial", write(tmp_path, "my_model", text))
    assert what.splitlines()[-1].endswith(error)
    assert "importlib" not in what


@pytest.mark.parametrize(
    "entrypoint",
    [
        "my_model:MyTrial",
        "python3 -m determined.launch.torch_distributed --trial my_model:MyTrial",
        "python3 -m determined.exec.harness my_model:MyTrial",
        "python3 my_model.py",
        ["python3", "-m", "determined.launch.torch_distributed", "python3", "my_model.py"],
        "python3 -m my_model",
    ],
)
def test_syntax_error_is_reported_before_anything_runs(tmp_path: Path, entrypoint: str | list[str]) -> None:
    write(tmp_path, "my_model", "x = 1\nclass MyTrial(:\n")
    with pytest.raises(EntrypointError) as caught:
        check_entrypoint(parse_entrypoint(entrypoint), tmp_path)
    [(_, what)] = caught.value.faults
    shown = [line.removeprefix("    | ").strip() for line in what.splitlines()]
    assert "raised SyntaxError; fix it there:" in shown[0]
    assert shown[1:3] == [f'File "{tmp_path}/my_model.py", line 2', "class MyTrial(:"]
    assert shown[-1] == "SyntaxError: invalid syntax"


def test_module_that_was_mended_can_be_loaded_then(tmp_path: Path) -> None:
    fault("my_model:MyTrial", write(tmp_path, "my_model", "import my_half\n1 / 0"))
    write(tmp_path, "my_half", "")
    # Another length: the byte code that Python keeps is known by time (in seconds) and size.
    load_trial_class(MY_TRIAL, write(tmp_path, "my_model", TRIAL.format(name="MyTrial", here=1)))


def test_a_constructor_that_takes_more_than_the_context_is_an_error(tmp_path: Path) -> None:
    text = TRIAL.format(name="MyTrial", here=1)
    write(tmp_path, "my_model", text.replace("(self, context)", "(self, context, hparams)"))
    assert fault("my_model:MyTrial", tmp_path) == (
        "my_model:MyTrial is created with the context as its only argument, which its constructor does not accept "
        "(missing a required argument: 'hparams'); give its other parameters defaults, or give the program that "
        "creates it, such as python3 train.py"
    )
    write(tmp_path, "my_other", text.replace("(self, context)", "(self, context, hparams=None)"))
    assert load_entrypoint(parse_entrypoint("my_other:MyTrial"), tmp_path).__name__ == "MyTrial"  # type: ignore[union-attr]


def test_missing_class_is_reported_with_the_existing_trials(tmp_path: Path) -> None:
    write(tmp_path, "my_model", TRIAL.format(name="MyTrial", here=1))
    assert "did you mean MyTrial?" in fault("my_model:MyTrail", tmp_path)
    assert "its trials are MyTrial" in fault("my_model:Zzz", tmp_path)


def test_what_is_not_a_trial_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "my_model", "class Plain: pass\nnumber = 3\n")
    assert "must be a subclass of PyTorchTrial, got another class; it has no trials" in fault(
        "my_model:Plain", tmp_path
    )
    assert "got a value of type int" in fault("my_model:number", tmp_path)


# -------------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("command", ["python3 my_program.py", "python3 -m my_program", "python3 -m my_package"])
def test_program_is_found_and_not_run(tmp_path: Path, command: str) -> None:
    write(tmp_path, "my_program", "1 / 0")
    write(tmp_path / "my_package", "__main__", "1 / 0")
    found = load_entrypoint(parse_entrypoint(command), tmp_path)
    assert isinstance(found, Script)
    assert found.command == command
    assert sys.path[0] == str(tmp_path)


def test_module_may_be_an_installed_one(tmp_path: Path) -> None:
    assert isinstance(load_entrypoint(parse_entrypoint("python3 -m json.tool"), tmp_path), Script)


def test_missing_program_is_reported_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "scripts", "my_program", "")
    write(tmp_path, "my_other", "")
    assert "no script my_program.py in " in fault("python3 my_program.py", tmp_path)
    assert fault("python3 scripts/my_progam.py", tmp_path).endswith("did you mean scripts/my_program.py?")
    assert fault("python3 zzz", tmp_path).endswith("its scripts are my_other.py, scripts/my_program.py")
    assert fault("python3 -m my_othre", tmp_path).endswith("did you mean my_other?")
    assert fault("python3 scripts", tmp_path).endswith("is a directory; for a package: python3 -m package")


def test_model_that_needs_its_startup_hook_is_left_to_the_workers(tmp_path: Path) -> None:
    write(tmp_path, "my_model", "import my_absent_library\nclass MyTrial(my_absent_library.Trial): pass\n")
    with pytest.raises(EntrypointError, match="my_absent_library"):
        check_entrypoint(parse_entrypoint("my_model:MyTrial"), tmp_path)
    (tmp_path / "startup-hook.sh").touch()
    check_entrypoint(parse_entrypoint("my_model:MyTrial"), tmp_path)
    with pytest.raises(EntrypointError, match="no module my_modell"):
        check_entrypoint(parse_entrypoint("my_modell:MyTrial"), tmp_path)
