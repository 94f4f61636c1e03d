"""Transports of small objects between the ranks of a trial: torch.distributed, or a TCPStore; and by which network
interface."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import socket
import time
from datetime import timedelta
from typing import Any, Protocol

from dray.private import is_loopback

TOO_LONG = 2**32 - 1  # sent in place of the length of a message that does not fit
#: The chief may work alone for hours while the others wait. If its process dies, its connections close.
FOR_EVER = timedelta(days=365)


class Transport(Protocol):
    """Passes picklable objects between ranks."""

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]: ...
    def gather(self, stuff: Any) -> list[Any] | None: ...
    def close(self) -> None: ...


def use_interface_of(address: str) -> None:
    """Have gloo in this process, and in its children, use the network interface that has this node's address.

    GLOO_SOCKET_IFNAME, if set, decides instead. By default gloo uses the address that the machine's name resolves to.
    That is often 127.0.1.1, which no other node reaches. If this node's address is a loopback address, the opposite is
    true: other machines may reach the address of the machine's name.
    """
    import psutil

    is_it = is_loopback if is_loopback(address) else address.__eq__
    for name, addresses in psutil.net_if_addrs().items():
        if any(is_it(each.address) for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def serve_store(host: str, timeout: timedelta, port: int = 0) -> Any:
    """A `torch.distributed.TCPStore` that this process serves. With a loopback host, only this machine can reach it:
    its contents are unpickled, and torch's own server would listen at all addresses of the machine."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not is_loopback(host):
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # its server takes no socket before torch 2.8
    )


class TorchTransport:
    """Uses torch.distributed, in a separate gloo group. Its collectives may wait as long as a rank works alone, and are
    counted apart from those of the user's code."""

    #: A size in bytes in which most messages fit. They take one collective; `all_gather_object` takes two, and five
    #: times as long.
    ROOM = 8192

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._open_group: Any = None
        self._is_waiting = False  # a collective that timed out here still waits for the other ranks
        assert self._group is not None  # made now, before any rank can have failed

    @property
    def _group(self) -> Any:
        """The gloo group. If the context is used after its end, all ranks together make a new one."""
        if self._open_group is None:
            self._open_group = self._dist.new_group(backend="gloo", timeout=FOR_EVER)
        return self._open_group

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        message = _pickled(stuff)
        fits = len(message) + 4 <= self.ROOM
        head = (len(message) if fits else TOO_LONG).to_bytes(4, "little")
        padded = bytearray((head + message if fits else head).ljust(self.ROOM, b"\0"))
        rows = self._torch.empty(self._dist.get_world_size(), self.ROOM, dtype=self._torch.uint8)
        self._gather(rows, self._torch.frombuffer(padded, dtype=self._torch.uint8), timeout_s)
        lengths = [int.from_bytes(row[:4].numpy().tobytes(), "little") for row in rows]
        if TOO_LONG in lengths:
            result: list[Any] = [None] * len(lengths)
            self._dist.all_gather_object(result, message, group=self._group)
            return [pickle.loads(each) for each in result]
        return [pickle.loads(row[4 : 4 + n].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def _gather(self, rows: Any, padded: Any, timeout_s: float | None) -> None:
        if timeout_s is None:
            self._dist.all_gather(list(rows), padded, group=self._group)
            return
        began = time.monotonic()
        try:
            work = self._dist.all_gather(list(rows), padded, group=self._group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() < began + timeout_s:
                raise
            self._is_waiting = True
            # Keep the group for ever: its destructor would wait for the other ranks, even when this process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            raise _too_late(timeout_s) from error

    def gather(self, stuff: Any) -> list[Any] | None:
        result: list[Any] | None = [None] * self._dist.get_world_size() if self._dist.get_rank() == 0 else None
        self._dist.gather_object(_pickled(stuff), result, group=self._group)
        return None if result is None else [pickle.loads(each) for each in result]

    def close(self) -> None:
        # Destroying a group waits for its collectives.
        if self._open_group is not None and self._dist.is_initialized() and not self._is_waiting:
            self._dist.destroy_process_group(self._open_group)
        self._open_group = None


class StoreTransport:
    """Uses a TCPStore that the chief serves, for processes without a process group."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._turn = 0
        self._last_to_all: int | None = None

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        turn = self._set(own := _pickled(stuff))
        if timeout_s is not None:
            try:
                self._store.wait([f"{turn}/{rank}" for rank in range(self._size)], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise _too_late(timeout_s) from error
        result = [self._loaded(f"{turn}/{rank}", own if rank == self._rank else None) for rank in range(self._size)]
        if self._last_to_all is not None:
            # All ranks are done with that turn, since each has set its part of this one.
            self._store.delete_key(f"{self._last_to_all}/{self._rank}")
        self._last_to_all = turn
        return result

    def gather(self, stuff: Any) -> list[Any] | None:
        turn = self._set(own := _pickled(stuff))
        if self._rank > 0:
            return None
        result = [self._loaded(f"{turn}/{rank}", own if rank == 0 else None) for rank in range(self._size)]
        for rank in range(self._size):
            self._store.delete_key(f"{turn}/{rank}")
        return result

    def _loaded(self, key: str, own: bytes | None) -> Any:
        # This rank's own message is not read back, because anybody who reaches the store could have changed it.
        return pickle.loads(self._store.get(key) if own is None else own)

    def _set(self, message: bytes) -> int:
        turn, self._turn = self._turn, self._turn + 1
        self._store.set(f"{turn}/{self._rank}", message)
        return turn

    def close(self) -> None:
        # The chief serves the store, so it leaves last, but does not wait long for a peer that has died.
        self._store.set(f"bye/{self._rank}", "")
        if self._rank == 0:
            with contextlib.suppress(Exception):
                self._store.wait([f"bye/{rank}" for rank in range(self._size)], timedelta(seconds=10))


def _pickled(stuff: Any) -> bytes:
    """Pickle an object for another rank, with tensors on the CPU."""
    from dray.training.checkpoint.portable import portable

    with portable():
        return pickle.dumps(stuff)


def _too_late(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"not all ranks have called allgather() within {timeout_s:g} s")
