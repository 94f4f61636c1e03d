"""The environment variables of trials, in this process and in those that it starts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

Device = Literal["cpu", "cuda", "rocm"]


def set_variables(changes: Mapping[str, str | None]) -> None:
    """Set variables, and remove those that are None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Python reads PYTHONPATH only when it starts.
    for entry in reversed((changes.get("PYTHONPATH") or "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(1, entry)


@contextlib.contextmanager
def variables_set(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, and remove those that are None, for the duration of the block."""
    before, path = {name: os.environ.get(name) for name in changes}, list(sys.path)
    set_variables(changes)
    try:
        yield
    finally:
        set_variables(before)
        sys.path[:] = path


def device(*, gpu: bool) -> Device:
    """Determined's name of a slot's device. This does not import torch, which reads some of the variables."""
    if not gpu:
        return "cpu"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if "rocm" in importlib.metadata.version("torch"):
            return "rocm"
    return "cuda"
