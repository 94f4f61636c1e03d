"""The environment of trials: variables, set in a process and taken back; device; versions."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

import dray
from dray.environment import device, set_variables, variables_set, versions


def test_they_are_there_within_the_block_and_as_before_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "found_by_its_path.py").write_text("")
    path = list(sys.path)
    with variables_set({"KEPT": "within", "NEW": "", "PYTHONPATH": str(tmp_path)}):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("within", "")
        assert importlib.util.find_spec("found_by_its_path") is not None
    assert os.environ["KEPT"] == "before"
    assert not {"NEW", "PYTHONPATH"} & os.environ.keys()
    assert sys.path == path


def test_none_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GONE", "x")
    set_variables({"GONE": None, "NEVER": None})
    assert "GONE" not in os.environ


def test_device_is_that_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device(gpu=False) == "cpu"
    for version, expected in (("2.9.0+cu128", "cuda"), ("2.9.0+rocm6.4", "rocm")):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert device(gpu=True) == expected


def test_versions_are_those_that_the_packages_say_of_themselves() -> None:
    import ray
    import torch

    found = versions()
    assert {**found, "torch": found["torch"].partition("+")[0]} == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "dray": dray.__version__,
        "ray": ray.__version__,
        "torch": torch.__version__.partition("+")[0],
        "cuda": torch.version.cuda or "",
    }
