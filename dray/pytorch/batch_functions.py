"""Batches: moving them to a device, and counting their records."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import numbers
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

#: Up to this size CUDA copies from unpinned memory without waiting for the device.
MAX_STAGED_BYTES = 1 << 16


class ToDevice:
    """Moves batches to a device: tensors, arrays, objects with a method `to`; and mappings, lists and tuples of them.

    Text, numbers and None stay as they are. Other values that can't be moved stay too, with one warning per type.
    """

    def __init__(self, device: torch.device, warned_types: set[type] | None = None) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._pins = device.type == "cuda" and torch.cuda.is_available()
        self._warned = set() if warned_types is None else warned_types

    def __call__(self, data: Any) -> Any:
        kind = type(data)
        if kind is tuple or kind is list:  # a fast path for most batches
            for item in data:
                if type(item) is not torch.Tensor or not (self._on_cpu and item.is_cpu):
                    return kind([self(item) for item in data])
            return kind(data)  # a new list, as in the other cases: the trial may change it
        if isinstance(data, torch.Tensor):
            if data.device == self.device:
                return data
            # Copying from pinned memory does not block, and the device uses the tensor only after the copy.
            return self._pinned(data).to(self.device, non_blocking=True)
        if callable(getattr(data, "to", None)):
            # Before the check for tuples: a PackedSequence is one too.
            return self._by_its_own_method(data)
        if isinstance(data, (list, tuple)):
            moved = [self(item) for item in data]
            if hasattr(data, "_fields"):
                return kind(*moved)
            return moved if isinstance(data, list) else tuple(moved)
        if isinstance(data, Mapping):
            items = {key: self(item) for key, item in data.items()}
            return items if kind is dict else _as(data, items)
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":
            return self._pinned(torch.from_numpy(data)).to(self.device, non_blocking=True)
        if data is None or isinstance(data, (str, bytes, numbers.Number, np.generic)):
            return data  # these live only in the host's memory
        if isinstance(data, np.ndarray) and data.dtype.kind in "SUMm":  # text and times
            return data
        if type(data) not in self._warned:
            self._warned.add(type(data))
            log.warning(
                "can't move values of type %s in a batch to %s; they stay as they are", type(data).__name__, self.device
            )
        return data

    def _by_its_own_method(self, data: Any) -> Any:
        """Call the `to` of a batch; then move the items of a mapping that it has left, such as arrays."""
        if isinstance(data, (dict, UserDict)):  # a copy, because the `to` of Hugging Face's mappings changes them
            tensors = {key: item for key, item in data.items() if isinstance(item, torch.Tensor)}
            data = _as(data, {key: self._pinned(item) for key, item in tensors.items()})
        elif self._pins and callable(getattr(data, "pin_memory", None)):
            data = data.pin_memory()
        try:
            moved = data.to(self.device, non_blocking=True)
        except TypeError as error:
            if "non_blocking" not in str(error):
                raise
            moved = data.to(self.device)
        if not isinstance(moved, (dict, UserDict)):
            return moved
        items = {key: self(item) for key, item in moved.items()}
        return moved if all(items[key] is item for key, item in moved.items()) else _as(moved, items)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory, for a CUDA device; a small one unchanged."""
        if not self._pins or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        return tensor.pin_memory() if tensor.nbytes > MAX_STAGED_BYTES else tensor


def _as(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Put the items into a mapping of the same type as `data`, as torch's collate function does."""
    try:
        if not isinstance(data, MutableMapping):
            return type(data)(items)  # type: ignore[call-arg]
        same = copy.copy(data)
        same.update(items)
    except TypeError:  # the type can't be copied, or is made from something else
        return {**data, **items}
    return same


def to_device(data: Any, device: torch.device, warned_types: set[type] | None = None) -> Any:
    """Move a batch to a device, like `context.to_device`.

    Args:
        data: tensors, arrays, objects with a method `to`; and mappings, lists and tuples of them. Anything else stays.
        device: the device to move it to.
        warned_types: types not to warn about; a type that can't be moved is warned about once, and added.

    >>> to_device({"x": [torch.zeros(2)]}, torch.device("cpu"))
    {'x': [tensor([0., 0.])]}
    """
    return ToDevice(device, warned_types)(data)


def data_length(data: Any) -> int:
    """Count the records in a batch: the length of its first tensor or array, at any depth of mappings and sequences.

    Args:
        data: a batch; its first tensor or array that is not a scalar has shape (records, ...).

    Raises:
        ValueError: the batch is empty.
        TypeError: the batch has no tensor or array; override `PyTorchTrial.get_batch_length`.

    >>> data_length({"names": ["a", "b"], "data": [torch.zeros(2, 8)], "label": torch.zeros(2)})
    2
    """
    # A fast path for most batches, at a third of the cost.
    kind = type(data)
    first = data[0] if (kind is list or kind is tuple) and data else data
    if type(first) is torch.Tensor and (shape := first.shape):
        return shape[0]
    others: dict[str, None] = {}  # an ordered set
    for leaf in leaves(data):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)):
            others[type(leaf).__qualname__] = None
        elif leaf.ndim > 0:
            return len(leaf)
        else:
            others[f"scalar {type(leaf).__qualname__}"] = None
    if not others:
        raise ValueError(f"a batch needs at least one record, got {data!r}, which is empty")
    raise TypeError(
        f"get_batch_length() can't count the records of a batch of type {kind.__module__}.{kind.__qualname__}: it "
        f"needs a tensor or an array of shape (records, ...), found {', '.join(others)}; override "
        "PyTorchTrial.get_batch_length()"
    )


class SideStream:
    """Moves batches to a GPU on a separate CUDA stream.

    The loop runs ahead of the device: it requests the next batch while the device is still busy, and the copy overlaps
    with the computation. Later computation waits for the copy, on the device.

    The loop is at most `MAX_AHEAD` batches ahead. A batch's memory is freed only when the device is done with it, so
    without a limit hundreds of batches could be on the device at once, if a batch takes few kernels.

    Batches are drawn from the loader no earlier than without a side stream: order, values and random numbers are the
    same, and a slow loader does not delay a batch that is ready.
    """

    MIN_BYTES = 1 << 16  # copying a smaller batch takes less time than synchronising the streams
    MAX_AHEAD = 3  # the number of batches that the device still has to compute while the loop waits

    def __init__(self, to_device: Callable[[Any], Any], device: torch.device) -> None:
        self._to_device = to_device
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed: deque[torch.cuda.Event] = deque()  # of the latest batches

    def __call__(self, batch: Any) -> Any:
        if not worth_a_stream(batch):
            return self._to_device(batch)
        current = torch.cuda.current_stream(self._device)
        # Blocking, because otherwise this thread would spin and keep a core busy.
        computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record(current)
        self._computed.append(computed)
        if len(self._computed) > self.MAX_AHEAD:
            self._computed.popleft().synchronize()
        wait = functools.partial(self._stream.wait_stream, current)
        made = _Made(self._device, wait) if any(map(_moves_itself, values(batch))) else None
        with torch.cuda.stream(self._stream), made or contextlib.nullcontext():
            moved = self._to_device(batch)
        current.wait_stream(self._stream)
        for leaf in [*leaves(moved), *(made.tensors if made else ())]:
            if isinstance(leaf, torch.Tensor):
                # The side stream must not reuse this memory before the computation has read it. That may be much later:
                # a trial can keep a batch.
                leaf.record_stream(current)
        return moved


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the tensors on a device that operations in the block make, such as those in a moved object of the user's
    own type. Calls `wait` before an operation reads a tensor of the device, which may still be computed."""

    def __init__(self, device: torch.device, wait: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []
        self._device, self._wait = device, wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(self._is_there, leaves(args))):
            self._wait()
        made = func(*args, **(kwargs or {}))
        self.tensors += filter(self._is_there, leaves(made))
        return made

    def _is_there(self, value: Any) -> bool:
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return is_plain and value.device.type == self._device.type


def worth_a_stream(batch: Any) -> bool:
    """Whether a batch is large enough. An object that moves itself may be, as its tensors can't be seen."""
    size, moves_itself = 0, False
    for value in values(batch):
        if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and value.layout is torch.strided):
            size += value.nbytes
        elif isinstance(value, torch.Tensor):  # can't be kept for another stream
            return False
        moves_itself |= _moves_itself(value) and not isinstance(value, (Mapping, list, tuple))
    return moves_itself or size >= SideStream.MIN_BYTES


def _moves_itself(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and callable(getattr(value, "to", None))


def leaves(data: Any) -> Iterator[Any]:
    """The values in mappings, lists and tuples, at any depth."""
    return (value for value in values(data) if not isinstance(value, (Mapping, list, tuple)))


def values(data: Any) -> Iterator[Any]:
    """A value, and if it is a mapping, a list or a tuple, the values in it, at any depth."""
    yield data
    if isinstance(data, (Mapping, list, tuple)):
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from values(item)
