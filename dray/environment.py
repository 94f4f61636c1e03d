"""The environment of trials, in this process and in those that it starts: variables, device and versions."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from dray._version import __version__

TRACEBACK = "DRAY_TRACEBACK"
"""A variable that, if it is not empty, shows errors with all frames, those of libraries and of dray included."""

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


def visible_gpus(gpus: Iterable[str]) -> dict[str, str]:
    """The variables of CUDA and ROCm by which a process sees only these GPUs."""
    return dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ",".join(gpus))


def device(*, gpu: bool) -> Device:
    """Determined's name of a slot's device. This does not import torch, which reads some of the variables."""
    from importlib import metadata  # here and below: it imports zipfile and email

    if not gpu:
        return "cpu"
    with contextlib.suppress(metadata.PackageNotFoundError):
        if "rocm" in metadata.version("torch"):
            return "rocm"
    return "cuda"


@functools.cache
def versions() -> dict[str, str]:
    """The versions of ``python``, ``dray``, ``ray``, ``torch``, and the ``cuda`` that torch was built for; "" means
    none. This imports neither Ray nor torch."""
    from importlib import metadata

    found = {"python": platform.python_version(), "dray": __version__, "ray": "", "torch": "", "cuda": ""}
    for name in ("ray", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if found["torch"] and (torch := importlib.util.find_spec("torch")) is not None and torch.origin is not None:
        built = Path(torch.origin).with_name("version.py").read_text()
        found["cuda"] = match[1] if (match := re.search("^cuda[^=]*= '(.+)'", built, re.M)) else ""
    return found
