"""The stand-in for Determined's package, put up and taken down again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dray
from dray import compat


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has seen nothing of `determined`; afterwards it has forgotten it again."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(compat.PATH)])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each is not compat.finder])
    monkeypatch.setattr(compat.finder, "whole", False)
    _forget()
    yield
    _forget()


@pytest.fixture
def alias(untouched: None) -> None:
    """`import determined` gives dray."""
    compat.install()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "determined"]:
        del sys.modules[name]


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[str], str]:
    """Runs a program in a process of its own, and gives what it has printed."""

    def run(program: str) -> str:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(program))
        environment = {**os.environ, "PYTHONPATH": str(Path(dray.__file__).parents[1])}
        done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
