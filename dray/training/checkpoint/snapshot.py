"""Copies of the state, so that training can continue while they are written.

Like `torch.save`, this sets the tensors' storages aside while pickling; but it then copies the storages and unpickles.
So the copy is as deep as one made by saving and loading: tensors that share memory share it in the copy too, and all
other objects are new.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dray.training.parallel.device import on_this_gpu

T = TypeVar("T")

ALIGNMENT = 512  # copies in a pinned buffer begin at multiples of this many bytes
#: Pinned buffers are larger only for larger storages. CUDA may keep batches waiting while it allocates one, for about
#: 0.1 s.
PINNED_BYTES = 256 << 20


class NotCopied(TypeError):
    """The state has tensors that only `torch.save` can handle."""


class Snapshots:
    """Makes one copy after another in the same buffers, so that only the first one allocates memory.

    A copy is valid until the next one is made. `wait` is called before memory is allocated: it waits until an earlier
    trial's copy has freed its own.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.buffers: dict[tuple[int, bool], list[torch.Tensor]] = {}  # of the last copy, by (size, is pinned)
        self._allocating: threading.Thread | None = None

    def reserve(self, value: Any) -> None:
        """Allocate pinned memory for copies of a value, in a thread, because CUDA takes seconds for 10 GB."""
        try:
            storages = _pickled(value)[1]
        except Exception:  # which `take` raises
            return
        sizes, _ = packed([storage.nbytes() for storage in storages if is_on_gpu(storage)])

        def allocate() -> None:
            self._wait()
            # Without memory, `take` raises the error.
            with contextlib.suppress(RuntimeError):
                for nbytes in sizes:
                    self.buffers.setdefault((nbytes, True), []).append(new_buffer(nbytes, True))

        self._allocating = threading.Thread(target=on_this_gpu(allocate), name="dray-pin")
        self._allocating.start()

    def take(self, value: T) -> tuple[T, Callable[[], None]]:
        """Copy a value to the CPU. Returns the copy and a function that waits until it is complete: GPUs copy while
        training continues, but before later operations in the current stream."""
        if self._allocating is not None:
            self._allocating.join()
        self._wait()
        pickled, storages = _pickled(value)
        on_gpus = [storage for storage in storages if is_on_gpu(storage)]
        others = [storage for storage in storages if not is_on_gpu(storage)]
        sizes, places = packed([storage.nbytes() for storage in on_gpus])
        places += [(number, 0) for number, _ in enumerate(others, start=len(sizes))]
        needed = [(nbytes, True) for nbytes in sizes] + [(storage.nbytes(), False) for storage in others]
        # Reuse first, so that buffers which no longer fit are freed before new ones are allocated.
        free, self.buffers = self.buffers, defaultdict(list)
        reused = [free[kind].pop() if free.get(kind) else None for kind in needed]
        del free
        buffers = [new_buffer(*kind) if buffer is None else buffer for kind, buffer in zip(needed, reused, strict=True)]
        for buffer, kind in zip(buffers, needed, strict=True):
            self.buffers[kind].append(buffer)
        copies = {}
        for storage, (number, begin) in zip((*on_gpus, *others), places, strict=True):
            end = begin + storage.nbytes()
            # Copied as tensors, so that torch sees which pinned memory is being copied into.
            buffers[number][begin:end].copy_(_bytes_of(storage), non_blocking=True)
            copies[storage._cdata] = buffers[number].untyped_storage()[begin:end]
        events = [recorded_event(device) for device in {storage.device for storage in on_gpus}]
        copied: T = _Unpickler(pickled, [copies[storage._cdata] for storage in storages]).load()

        def wait() -> None:
            for event in events:
                event.synchronize()

        return copied, wait


def on_cpu(value: T) -> T:
    """Copy a value's tensors to the CPU. GPU tensors are copied together, with a single wait."""
    try:
        copy, wait = Snapshots().take(value)
    except NotCopied:
        return value
    wait()
    return copy


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack pieces of these sizes into few buffers. Returns the buffers' sizes, and each piece's (buffer, offset).

    torch rounds pinned memory up to a power of two. So the buffers have such sizes, and more than half of each is used.
    """
    places = [(0, 0)] * len(sizes)
    buffers: list[int] = []
    # The largest first. Empty storages take up space too, because two storages at one address would become one.
    aligned = [max(1, -(-size // ALIGNMENT)) * ALIGNMENT for size in sizes]
    left = deque(sorted(range(len(sizes)), key=lambda piece: -aligned[piece]))
    total = sum(aligned)
    while left:
        room = max(min(1 << total.bit_length() - 1, PINNED_BYTES), 1 << (aligned[left[0]] - 1).bit_length())
        begin = 0
        # The largest that fit, then the smallest.
        for end, take in ((0, left.popleft), (-1, left.pop)):
            while left and begin + aligned[left[end]] <= room:
                piece = take()
                places[piece] = len(buffers), begin
                begin += aligned[piece]
        total -= begin
        buffers.append(room)
    return buffers, places


def is_on_gpu(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cuda"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def new_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def recorded_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _pickled(value: Any) -> tuple[io.BytesIO, list[torch.UntypedStorage]]:
    """A value, pickled without its storages, and the storages."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    file.seek(0)
    return file, [storage for _, storage in pickler.storages.values()]


class _Pickler(pickle.Pickler):
    """Replaces each storage by a number, and collects the numbered storages by identity."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype] | None:
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            if not plain or value.layout is not torch.strided or value.is_quantized:
                raise NotCopied(f"a {type(value).__name__} of {value.dtype}, {value.layout}")
            return None
        if isinstance(value, torch.TypedStorage):
            return self._number(value._untyped_storage), value.dtype
        if isinstance(value, torch.UntypedStorage):
            return self._number(value), torch.uint8
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage.device.type not in ("cpu", "cuda"):
            raise NotCopied(f"a tensor on {storage.device}")
        # torch.save uses the same identity.
        return self.storages.setdefault(storage._cdata, (len(self.storages), storage))[0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, number: tuple[int, torch.dtype]) -> torch.TypedStorage:
        # Tensors are pickled with this class, which without `_internal` warns that it is deprecated.
        return torch.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self._storages[number[0]], dtype=number[1], _internal=True
        )
