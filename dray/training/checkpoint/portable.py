"""Saves tensors that leave this process, to a file or another rank, such that they are loaded on the CPU.

torch saves each tensor with its device, and loads it there again. So a tensor from another rank's GPU would occupy that
GPU from this process too, and a file would not load on a machine with fewer GPUs.
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
    """Within the block, this thread saves and pickles all tensors as CPU tensors."""
    before, _here.portable = getattr(_here, "portable", False), True
    try:
        yield
    finally:
        _here.portable = before


def _tag(_: Any) -> str | None:
    return "cpu" if getattr(_here, "portable", False) else None


def _restored(*_: Any) -> None:
    """Leave loading to torch."""


# Lower numbers come first, torch's own begin at 10, and torch can't sort equal ones.
torch.serialization.register_package(-1000, _tag, _restored)
