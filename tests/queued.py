"""A backend of torch.distributed that treats its ranks as NCCL does, on CPU tensors.

NCCL's collectives are work for the device: the call returns at once, and a rank whose peers never come learns of it
only when it waits for the device, where it hangs. `abort()`, in another thread, ends that; what the collectives should
have written is garbage then, and so is all that was computed from it. Here gloo moves the data, and a `Device` stands
for the queue of a GPU: see `Device.gone` for how a collective knows that it will never be completed.

    init(directory / "rendezvous", rank, size)    # instead of dist.init_process_group
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.futures import Future

from dray.training.parallel import ddp
from dray.worker.process_group import binds_device

GARBAGE = 1e9
POLL_S = 0.001
SPLIT_S = 60.0
TIMEOUT = timedelta(seconds=200)
WATCHDOG_S = 0.5
"""NCCL's takes 0.1 s."""


class Device:
    """The queue of this process's device: one, in which the collectives of all groups and all computation are."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stuck_in: QueuedGroup | None = None
        self._has_failed = False
        self.reads = 0

    def stick(self, group: QueuedGroup) -> None:
        with self._changed:
            self._stuck_in = self._stuck_in or group

    @property
    def is_stuck(self) -> bool:
        return self._stuck_in is not None

    def aborted(self, group: QueuedGroup) -> None:
        with self._changed:
            if self._stuck_in is group:
                self._stuck_in = None
            self._changed.notify_all()

    def synchronize(self, device: object = None) -> None:
        """Wait for all that is queued: for ever, if a collective waits for a rank that does not come."""
        self.reads += 1
        if self._has_failed:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        with self._changed:
            self._changed.wait_for(lambda: self._stuck_in is None)

    def fail(self) -> None:
        """From now on each use of the device fails; and as NCCL's watchdog does, end the process soon, whatever it does
        then."""
        self._has_failed = True
        threading.Timer(WATCHDOG_S, os.abort).start()
        self.synchronize()


DEVICE = Device()


def _reads_wait() -> None:
    """From now on, whoever reads a tensor's value on the host waits for the device first."""
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__"):
        setattr(torch.Tensor, name, _waiting(getattr(torch.Tensor, name)))
    torch.cpu.synchronize = DEVICE.synchronize  # type: ignore[assignment]


def _waiting(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def wait(*args: Any, **kwargs: Any) -> Any:
        DEVICE.synchronize()
        return read(*args, **kwargs)

    return wait


#: torch.compile does not trace the collectives of torch's own groups either.
_untraced: Any = torch._disable_dynamo  # type: ignore[attr-defined]


class QueuedGroup(dist.ProcessGroup):
    """A process group whose collectives are queued on the `DEVICE`."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._rank, self._size, self._store, self.collectives = rank, size, store, 0
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._aborted, self._splits = threading.Event(), 0
        if dist.group.WORLD is None and binds_device():
            self.bound_device_id = torch.device("cuda", 0)  # as after init_process_group(device_id=...)

    # ---------------------------------------------------------------------------------------------- the life of it
    def abort(self) -> None:
        """As ncclCommAbort: ends this group's collectives, and waits until the device is idle."""
        self._aborted.set()
        DEVICE.aborted(self)
        DEVICE.synchronize()

    def shutdown(self) -> None:
        """As ncclCommFinalize: waits for what is queued."""
        while not self._aborted.is_set() and DEVICE.is_stuck:
            time.sleep(POLL_S)

    @property
    def supports_splitting(self) -> bool:
        return True

    def eager_connect_single_device(self, device: object) -> None:
        """Called for a group that is made from the default one."""
        dist.group.WORLD.perform_nocolor_split()  # type: ignore[union-attr]

    def perform_nocolor_split(self, device: object = None) -> None:
        """This rank's part in ncclCommSplit, by which the default group's ranks make each other group, also those that
        will not be in it. Without all of them it would block; here it fails after a while."""
        self._raise_if_aborted()
        number, self._splits = self._splits, self._splits + 1
        self._store.set(f"split/{number}/{self._rank}", b"1")
        late, deadline = list(range(self._size)), time.monotonic() + SPLIT_S
        while late := [rank for rank in late if not self._store.check([f"split/{number}/{rank}"])]:
            self._raise_if_aborted()
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"ncclCommSplit on rank {self._rank}: ranks {late} do not call it")
            time.sleep(POLL_S)

    def _raise_if_aborted(self) -> None:
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")

    def gone(self) -> None:
        """This rank will call no further collective. Only the test knows, and the collectives of the others, which then
        return at once and are never completed; without it they are never completed either, but block the host."""
        self._store.set(f"gone/{self._rank}", b"1")

    def _collective(self, outputs: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        self._raise_if_aborted()
        number, self.collectives = self.collectives, self.collectives + 1
        if not DEVICE.is_stuck:
            self._store.set(f"{number}/{self._rank}", b"1")
            missing = [rank for rank in range(self._size) if rank != self._rank]
            while missing and not self._aborted.is_set():
                missing = [rank for rank in missing if not self._store.check([f"{number}/{rank}"])]
                if any(self._store.check([f"gone/{rank}"]) for rank in missing):
                    # Once more: it may have called this one before it went.
                    if any(not self._store.check([f"{number}/{rank}"]) for rank in missing):
                        DEVICE.stick(self)
                        break
                elif missing:
                    time.sleep(POLL_S)
            if not missing:
                run().wait()
                return _over(outputs)
        for output in outputs:
            output.fill_(min(GARBAGE, torch.finfo(output.dtype).max) if output.is_floating_point() else 77)
        return _over(outputs)

    # ---------------------------------------------------------------------------------------------- collectives
    @_untraced
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._collective(tensors, lambda: self._gloo.allreduce(tensors, opts))

    @_untraced
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._collective(tensors, lambda: self._gloo.allreduce_coalesced(tensors, opts))

    @_untraced
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._collective(tensors, lambda: self._gloo.broadcast(tensors, opts))

    @_untraced
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        into = [tensor for row in outputs for tensor in row]
        return self._collective(into, lambda: self._gloo.allgather(outputs, inputs, *_given(opts)))

    @_untraced
    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        return self._collective([output], lambda: self._gloo._allgather_base(output, own, *_given(opts)))

    @_untraced
    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        return self._collective([output], lambda: self._gloo._reduce_scatter_base(output, own, *_given(opts)))

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    # What the functional collectives call, which DTensors use.
    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        return [self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Any:
        return [self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)][-1]

    @_untraced
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        return self._collective(outputs, lambda: self._gloo.scatter(outputs, inputs, opts))

    @_untraced
    def barrier(self, opts: Any = None) -> Any:
        # On a GPU this is an all-reduce followed by a synchronisation.
        work = self._collective([], self._gloo.barrier)
        DEVICE.synchronize()
        return work

    def getBackendName(self) -> str:
        return "queued"

    def getSize(self) -> int:
        return self._size

    # Of a group that is written in Python, torch neither keeps the name nor finds it.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self


def _given(opts: Any) -> list[Any]:
    return [] if opts is None else [opts]


def _over(result: list[torch.Tensor]) -> Any:
    future: Future[Any] = Future()  # type: ignore[no-untyped-call]
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class _Nccl(dist.ProcessGroupGloo):
    """Takes what ProcessGroupNCCL takes."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options, device: object = None) -> None:
        super().__init__(store, rank, size, options._timeout)

    def split(self, store: Any, ranks: list[int], options: Options) -> _Nccl:  # type: ignore[override]
        return _Nccl(store, ranks.index(self.rank()), len(ranks), options)


def stand_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups of this process have the backend "nccl", which is for the type of device "cuda" alone: if it is their
    only one, collectives of tensors in the CPU's memory fail, as with the real one."""
    fakes = dict.fromkeys(("ProcessGroupNCCL", "ProcessGroupNCCL2"), _Nccl)  # the second since torch 2.15
    fakes |= {"is_nccl_available": lambda: True, "default_pg_nccl_timeout": TIMEOUT}
    for name, fake in fakes.items():
        monkeypatch.setattr(c10d, name, fake, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))


def init(rendezvous: Path, rank: int, size: int) -> None:
    """Join a process group of the backend `TEST_BACKEND`, by a file: no other program can take it first, as a port."""
    backend = os.environ["TEST_BACKEND"]
    if backend == "queued" and not hasattr(dist.Backend, "QUEUED"):
        dist.Backend.register_backend("queued", QueuedGroup, devices=["cpu"])
        _reads_wait()
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch 2.15 can't record a group that is written in Python
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=TIMEOUT)


def init_again_if_aborted(rendezvous: Path, rank: int, size: int) -> bool:
    """What new processes would do, which dray starts after an abort. Returns whether there was one."""
    if not ddp.is_aborted():
        return False
    dist.distributed_c10d._abort_process_group()
    init(rendezvous, rank, size)
    dist.barrier()  # a rank that exits at once would close connections that the others still make
    return True


def gone_for(leave: Callable[[], None]) -> None:
    """Leave with an exception, and call no further collective for gradients."""
    # In no variable: the exception would keep it, and with it the connections of gloo.
    getattr(ddp.gradients_group().group, "gone", lambda: None)()
    leave()
