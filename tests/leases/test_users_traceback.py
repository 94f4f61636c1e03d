"""Tracebacks with the frames of the user's files only."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dray.leases.failure import failure_of, users_line, users_traceback
from dray.script import Script

HEAD = "Traceback (most recent call last):"
INNER = "def inner():\n    raise KeyError('lrr')\n"
PROGRAMS = {
    "plain": "inner()",
    "deep": "import json\njson.loads('1', object_hook=None, parse_int=lambda text: inner())",
    "direct cause": "try:\n    inner()\nexcept KeyError as error:\n    raise RuntimeError('no lr') from error",
    "context": "try:\n    inner()\nexcept KeyError:\n    raise RuntimeError('no lr')",
    "lines": "raise RuntimeError('first\\n  second\\nthird')",
    "recursion": "def again(left):\n    return again(left - 1) if left else inner()\nagain(9)",
    "syntax": "compile('x = (', 'generated.py', 'exec')",
    "group": "raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])",
}


def error_of(source: str, directory: Path) -> BaseException:
    (directory / "my_train.py").write_text(f"{INNER}{source}\n")
    with pytest.raises(Exception, match=r".") as raised:
        Script(command="python3 my_train.py", file="my_train.py").run(directory)
    assert raised.value.__traceback__ is not None
    return raised.value.with_traceback(raised.value.__traceback__.tb_next)  # without this test, which is no library's


def shown(error: BaseException, directory: Path) -> list[str]:
    return users_traceback("".join(traceback.format_exception(error)), directory).rstrip().splitlines()


@pytest.mark.parametrize("kind", [kind for kind in PROGRAMS if kind != "group" or sys.version_info >= (3, 11)])
def test_what_is_shown_is_pythons_own_traceback_of_the_program_alone(kind: str, tmp_path: Path) -> None:
    error = error_of(PROGRAMS[kind], tmp_path)
    alone = subprocess.run([sys.executable, "my_train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert shown(error, tmp_path) == users_traceback(alone.stderr, tmp_path).splitlines()
    files = {line.split('"')[1] for line in shown(error, tmp_path) if 'File "' in line}
    assert files <= {"my_train.py", "generated.py"}
    assert shown(error, tmp_path)[-1].lstrip(" |+") == alone.stderr.splitlines()[-1].lstrip(" |+")


def test_an_error_outside_the_users_code_is_left_out_of_a_chain(tmp_path: Path) -> None:
    error = error_of("inner()", tmp_path)
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as of_a_library:
        of_a_library.__traceback__ = None
        error.__context__ = of_a_library
    assert len(traceback.format_exception(error)) > len(shown(error, tmp_path))
    assert shown(error, tmp_path) == [
        HEAD,
        '  File "my_train.py", line 3, in <module>',
        "    inner()",
        '  File "my_train.py", line 2, in inner',
        "    raise KeyError('lrr')",
        "KeyError: 'lrr'",
    ]


class Broken(Dataset[object]):
    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> object:
        return self.call()


def test_the_line_of_an_error_in_a_loaders_worker_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text(INNER)
    names: dict[str, Callable[[], object]] = {}
    exec(compile(INNER, str(tmp_path / "my_data.py"), "exec"), names)
    with pytest.raises(KeyError, match="lrr") as raised:
        list(DataLoader(Broken(names["inner"]), num_workers=1))
    raised.value.__traceback__ = None  # this test is the user's, too
    assert users_line(raised.value, tmp_path) == ["  my_data.py:2, in inner", "    raise KeyError('lrr')"]
    assert failure_of(raised.value, 3).where == "KeyError at my_data.py:2 in inner"
    assert shown(raised.value, tmp_path)[-3:] == [
        '  File "my_data.py", line 2, in inner',
        "    raise KeyError('lrr')",
        "KeyError: 'lrr'",
    ]
    assert not any("site-packages" in line for line in shown(raised.value, tmp_path))
