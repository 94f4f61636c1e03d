"""State as it is now, in memory of its own, so that training can go on while it is written.

`torch.save` pickles, and sets the storages of tensors aside. So does this; but it copies them, and unpickles. Whatever
is saved is copied thereby, exactly as deeply as it would be by saving and loading it: tensors that share memory share
it in the copy, and what is no tensor is new.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class NotCopied(TypeError):
    """There is something in the state that is better left to `torch.save`."""


class Snapshots:
    """Copies, one after another, into buffers that are kept: only the first one has to get memory.

    A copy is good until the next one is made.
    """

    def __init__(self) -> None:
        #: By size and whether it is pinned; those of the last copy.
        self._buffers: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}

    def take(self, value: T) -> tuple[T, Callable[[], None]]:
        """A copy on the CPU, and what waits until it is complete: what is on GPUs arrives while they go on.

        A GPU copies in the order of the current stream: before whatever is computed there after this call.

        Raises:
            NotCopied: it has tensors that are sparse, quantised, of a class of one's own, or on a third kind of device.
        """
        # First what there is, so that memory which does not fit any more is given back before new is taken.
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(value)
        storages = list(pickler.storages.values())
        wanted = [(storage.nbytes(), storage.device.type == "cuda") for storage in storages]
        free, self._buffers = self._buffers, defaultdict(list)
        found = [free[want].pop() if free.get(want) else None for want in wanted]
        del free
        copies = [_buffer(*want) if buffer is None else buffer for want, buffer in zip(wanted, found, strict=True)]
        for storage, copy, want in zip(storages, copies, wanted, strict=True):
            self._buffers[want].append(copy)
            copy.copy_(storage, non_blocking=want[1])
        events = [
            _event(device) for device in {storage.device for storage in storages if storage.device.type == "cuda"}
        ]
        pickled.seek(0)
        copied: T = _Unpickler(pickled, copies).load()

        def wait() -> None:
            for event in events:
                event.synchronize()

        return copied, wait


def _buffer(nbytes: int, pinned: bool) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned).untyped_storage()


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class _Pickler(pickle.Pickler):
    """Leaves a number in the place of each storage, and collects them.

    Attributes:
        storages: by the memory that they are; the first has number 0.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, int] = {}

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
        # As torch.save tells them apart.
        key = storage._cdata
        self.storages.setdefault(key, storage)
        return self._numbers.setdefault(key, len(self._numbers))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, number: tuple[int, torch.dtype]) -> torch.TypedStorage:
        # Tensors are pickled in terms of this class, which warns without `_internal` that it is deprecated.
        return torch.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self._storages[number[0]], dtype=number[1], _internal=True
        )
