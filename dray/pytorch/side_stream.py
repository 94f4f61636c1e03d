"""Copies a batch to a GPU while it still computes the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


class SideStream:
    """Moves batches to a GPU on a separate CUDA stream.

    The loop runs ahead of the device: it asks for the next batch while the device is still busy, and the copy runs in
    parallel. What is computed afterwards waits for the copy, on the device.

    It runs at most `MAX_AHEAD` batches ahead. The memory of a batch is free once the device is done with it, so without
    a limit there would be a copy of each batch that the loop is ahead: of hundreds, if a batch takes few kernels.

    Batches are not taken from the loader earlier than without a side stream: order, values and random numbers are the
    same, and a slow loader delays no batch that is ready.

    Args:
        to_device: moves a batch on the current stream, without waiting if it is in pinned memory.
        device: a CUDA device.
    """

    #: A smaller batch is copied faster than the streams are synchronised.
    MIN_BYTES = 1 << 16
    #: While the loop waits, the device has this many batches left to compute.
    MAX_AHEAD = 3

    def __init__(self, to_device: Callable[[Any], Any], device: torch.device) -> None:
        self._to_device = to_device
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed: deque[torch.cuda.Event] = deque()  # of the latest batches

    def __call__(self, batch: Any) -> Any:
        if not worth_a_stream(batch):
            return self._to_device(batch)
        current = torch.cuda.current_stream(self._device)
        # Blocking: otherwise this thread would spin, and keep a core busy.
        computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record(current)
        self._computed.append(computed)
        if len(self._computed) > self.MAX_AHEAD:
            self._computed.popleft().synchronize()
        with torch.cuda.stream(self._stream):
            moved = self._to_device(batch)
        current.wait_stream(self._stream)
        for leaf in leaves(moved):
            if isinstance(leaf, torch.Tensor):
                # The side stream must not reuse this memory before the computation that reads it is done, which may
                # be later: a trial can keep a batch.
                leaf.record_stream(current)
        return moved


def worth_a_stream(batch: Any) -> bool:
    """Whether a batch is large, and all its tensors can be found: those in a type of the user's can't."""
    size = 0
    for leaf in leaves(batch):
        if isinstance(leaf, np.ndarray) or (isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided):
            size += leaf.nbytes
        elif hasattr(leaf, "to"):
            return False
    return size >= SideStream.MIN_BYTES


def leaves(data: Any) -> Iterator[Any]:
    """What is in dicts, lists and tuples, at any depth; one with a method `to` counts as a leaf."""
    if isinstance(data, (dict, list, tuple)) and not hasattr(data, "to"):
        for item in data.values() if isinstance(data, dict) else data:
            yield from leaves(item)
    else:
        yield data
