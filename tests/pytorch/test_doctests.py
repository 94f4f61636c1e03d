"""The examples in dray's docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import dray
from dray import pytorch

PACKAGE = Path(dray.__file__).parent


def modules_with_examples() -> list[str]:
    return [
        ".".join(("dray", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for file in sorted(PACKAGE.rglob("*.py"))
        if ">>> " in file.read_text()
    ]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("name", ["PyTorchTrial", "LRScheduler", "MetricReducer", "Batch", "Epoch"])
def test_what_every_trial_uses_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(pytorch, name)) or "")
