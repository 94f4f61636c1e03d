"""Saves tensors that leave this process, to a file or another rank, such that they are loaded on the CPU.

torch saves each tensor with its device, and loads it there again. So a tensor from another rank's GPU would occupy that
GPU from this process too, and a file would not load on a machine with fewer GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_here = threading.local()


@contextlib.contextmanager
def portable() -> Iterator[Mapping[int, torch.UntypedStorage]]:
    """Within the block, this thread saves and pickles all tensors as CPU tensors. Yields the CPU storages that it has
    pickled, by address, which are kept until the end of the block."""
    before = getattr(_here, "storages", None)
    _here.storages = {}
    try:
        yield _here.storages
    finally:
        _here.storages = before


def _tag(storage: Any) -> str | None:
    if (storages := getattr(_here, "storages", None)) is None:
        return None
    if storage.device.type == "cpu":
        storages[storage.data_ptr()] = storage
    return "cpu"


def _restored(*_: Any) -> None:
    """Leave loading to torch."""


# Lower numbers come first, torch's own begin at 10, and torch can't sort equal ones.
torch.serialization.register_package(-1000, _tag, _restored)
