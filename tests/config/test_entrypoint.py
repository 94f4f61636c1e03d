"""``entrypoint``: a class, or a program with its arguments; anything else is refused with the cure."""

from __future__ import annotations

from typing import Any

import pytest

from dray.config.entrypoint import ClassName, as_written, parse_entrypoint
from dray.script import Script


def parts(entrypoint: Any) -> tuple[str | None, str | None, tuple[str, ...]]:
    found = parse_entrypoint(entrypoint)
    assert isinstance(found, Script)
    return found.file, found.module, found.arguments


def test_class_is_a_module_and_a_name() -> None:
    assert parse_entrypoint("models.digits:DigitsTrial.Inner") == ClassName("models.digits", "DigitsTrial.Inner")


@pytest.mark.parametrize(
    ("entrypoint", "file", "module", "arguments"),
    [
        ("python3 train.py --epochs 1", "train.py", None, ("--epochs", "1")),
        ("python scripts/train.py 'two words' -m x", "scripts/train.py", None, ("two words", "-m", "x")),
        (["python3", "train.py", "a b", ";"], "train.py", None, ("a b", ";")),
        ("/usr/bin/python3.11 -u train.py", "train.py", None, ()),
        ("python -m package.train -- x", None, "package.train", ("--", "x")),
        ("python3 train.py 'a;b' \"x y\" '$HOME' C# a\\ b", "train.py", None, ("a;b", "x y", "$HOME", "C#", "a b")),
        ("python3 -m package.train \\\n  --epochs 1\n", None, "package.train", ("--epochs", "1")),
        (["python3", "train.py", "$HOME", "a\nb"], "train.py", None, ("$HOME", "a\nb")),
    ],
)
def test_program_is_a_file_or_a_module_with_arguments(
    entrypoint: Any, file: str | None, module: str | None, arguments: tuple[str, ...]
) -> None:
    assert parts(entrypoint) == (file, module, arguments)


@pytest.mark.parametrize(
    "launcher", ["determined.launch.torch_distributed", "dray.launch.torch_distributed", "determined.launch.deepspeed"]
)
@pytest.mark.parametrize("options", ["", "-- ", "--nnodes 2 --nproc_per_node=4 -- "])
@pytest.mark.parametrize("command", ["python3 train.py --epochs 1", "python3 -u train.py --epochs 1"])
def test_a_launcher_is_dropped_with_its_options(launcher: str, options: str, command: str) -> None:
    assert parts(f"python3 -m {launcher} {options}{command}") == ("train.py", None, ("--epochs", "1"))


def test_launcher_may_name_a_class_or_a_file() -> None:
    launcher = "python3 -m determined.launch.torch_distributed"
    for command in (
        f"{launcher} --trial model_def:MyTrial",
        f"{launcher} --nproc_per_node 2 -- --trial model_def:MyTrial",
        [*launcher.split(), "--trial", "model_def:MyTrial"],
    ):
        assert str(parse_entrypoint(command)) == "model_def:MyTrial"
    assert parts(f"{launcher} train.py x") == ("train.py", None, ("x",))
    assert parts(f"{launcher} -- python3 -m package.train x") == (None, "package.train", ("x",))


@pytest.mark.parametrize(
    "entrypoint",
    [
        "python3 -m determined.exec.harness model_def:MyTrial",
        "python3 -m determined.launch.horovod --autohorovod --trial model_def:MyTrial",
        ["python3", "-m", "determined.launch.autohorovod", "model_def:MyTrial"],
        "python3 -m determined.launch.autodeepspeed model_def:MyTrial",
    ],
)
def test_determineds_commands_that_name_a_class_are_that_class(entrypoint: Any) -> None:
    assert str(parse_entrypoint(entrypoint)) == "model_def:MyTrial"


def test_a_file_of_python_is_a_program_by_itself() -> None:
    assert parts("./0_start.py") == ("./0_start.py", None, ())
    assert parts("src/train.py launcher --epochs 1") == ("src/train.py", None, ("launcher", "--epochs", "1"))


def test_command_is_kept_as_it_was_written() -> None:
    for entrypoint in ("a:B", " a:B ", ["a:B"], "python3 -m determined.exec.harness a:B"):
        assert as_written(parse_entrypoint(entrypoint)) == entrypoint
    for entrypoint in ("python3  -u train.py", ["python3", "a b.py"]):
        assert as_written(parse_entrypoint(entrypoint)) == entrypoint
        found = parse_entrypoint(entrypoint)
        assert isinstance(found, Script)
        assert found.command == (entrypoint if isinstance(entrypoint, str) else "python3 'a b.py'")


@pytest.mark.parametrize(
    ("entrypoint", "what"),
    [
        ("", "must not be empty; for example model_def:DigitsTrial or python3 train.py"),
        (3, "must be a string or a list of strings, got 3"),
        (["python3", "train.py", 1], "must be a list of strings, got 1 as word 3; quote it: '1'"),
        ("python3 'train.py", "can't be split into words"),
        ("model_def", "must be module:Class, or a Python program, got 'model_def'"),
        ("perl train.pl", "so it can't be another program"),
        ("bash train.sh", "put the commands before it into startup-hook.sh"),
        ("A=1 python3 train.py x", "write environment: {environment_variables: [A=1]}, and here only the program"),
        ("python3 train.py --name ''; python3 test.py", "can't use ;, got"),
        ("python3 train.py 2>&1 | tee log", "can't use >&, got"),
        ("python3 prepare.py\npython3 train.py", "can't use a second line, got"),
        ("python3 train.py --data $DATA/x", "can't use $DATA, got 'python3 train.py --data $DATA/x': it runs"),
        ('python3 train.py "`date`"', "can't use `, got"),
        ("python3", "must have a script after python"),
        ("python3 -c pass", "can't give Python the option -c"),
        ("python3 -m", "must have a module after -m"),
        ("torchrun --nproc-per-node 2 train.py", "can't run torchrun"),
        ("python3 -m determined.launch.torch_distributed", "must have a command for the launcher to run"),
        ("python3 -m determined.launch.torch_distributed --nnodes 2 python3 a.py", "needs -- between the launcher's"),
        ("python3 -m determined.launch.torch_distributed --trial", "must have module:Class after --trial"),
        ("python3 -m determined.launch.torch_distributed --trial a:B c", "must have module:Class after --trial, and n"),
        ("python3 -m determined.exec.harness train.py", "must have module:Class after determined.exec.harness"),
        ("python3 -m determined.launch.tensorflow -- python3 train.py", "dray has no counterpart to this part of"),
    ],
)
def test_any_other_entrypoint_is_refused_with_the_cure(entrypoint: Any, what: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_entrypoint(entrypoint)
    assert what in str(caught.value)
