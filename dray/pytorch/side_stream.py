"""Batches that travel to a GPU while it is still busy with the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


class SideStream:
    """Moves batches on a CUDA stream of their own.

    The loop never waits for the device, so it comes for the next batch while the device has work left: the copy runs
    beside that. What is computed afterwards waits for the copy, on the device.

    Batches are not drawn from the loader before they are needed: order, values and random numbers are those without a
    side stream, and a slow loader holds up nothing that could be trained.

    Args:
        to_device: moves a batch on the current stream, from pinned memory without waiting.
        device: a CUDA device.
    """

    #: A smaller batch is there sooner than streams are made to wait for one another.
    MIN_BYTES = 1 << 16

    def __init__(self, to_device: Callable[[Any], Any], device: torch.device) -> None:
        self._to_device = to_device
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Any:
        if not worth_a_stream(batch):
            return self._to_device(batch)
        with torch.cuda.stream(self._stream):
            moved = self._to_device(batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for leaf in leaves(moved):
            if isinstance(leaf, torch.Tensor):
                # The side stream must not write into this memory before the computation that reads it is done.
                leaf.record_stream(current)
        return moved


def worth_a_stream(batch: Any) -> bool:
    """Whether a batch is large, and all its tensors are known: those within a type of the user's are not."""
    size = 0
    for leaf in leaves(batch):
        if isinstance(leaf, np.ndarray) or (isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided):
            size += leaf.nbytes
        elif hasattr(leaf, "to"):
            return False
    return size >= SideStream.MIN_BYTES


def leaves(data: Any) -> Iterator[Any]:
    """What is in dicts, lists and tuples, at any depth; not in those that move as a whole."""
    if isinstance(data, (dict, list, tuple)) and not hasattr(data, "to"):
        for item in data.values() if isinstance(data, dict) else data:
            yield from leaves(item)
    else:
        yield data
