"""Tensors that leave this process, to a file or another rank, are loaded on the CPU.

torch saves each tensor with its device and loads it there again. So a tensor of another rank's GPU would fill memory of
that GPU, in a context of this process; and a file would not load on a machine with fewer GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_here = threading.local()


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """A block in which this thread saves and pickles tensors as tensors of the CPU, wherever they are."""
    before, _here.portable = getattr(_here, "portable", False), True
    try:
        yield
    finally:
        _here.portable = before


def _tag(_: Any) -> str | None:
    return "cpu" if getattr(_here, "portable", False) else None


def _restored(*_: Any) -> None:
    """Nothing is loaded differently."""


# Lower numbers are asked first, torch's own begin at 10, and torch can't sort two that are the same.
torch.serialization.register_package(-1000, _tag, _restored)
