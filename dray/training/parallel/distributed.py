"""The processes of one trial: their ranks, and small objects passed between them."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from dray.compat import lacks

T = TypeVar("T")

#: The chief's port, for processes without torch.distributed; `port_offset` is added to it.
PORT = 12360
TIMEOUT_S = 600.0


class Transport(Protocol):
    """Passes picklable objects between ranks."""

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]: ...

    def gather(self, stuff: Any) -> list[Any] | None: ...

    def close(self) -> None: ...


@lacks("determined.core.DistributedContext")
class DistributedContext:
    """Which process of a trial this is, and ways to pass small objects between the processes.

    These are for coordination, not for tensors: use your training framework's collectives for those. Tensors in the
    objects arrive on the CPU. All ranks must make the same calls in the same order.

    Args:
        rank, size: the rank of this process, and the number of processes, in the trial.
        local_rank, local_size: the same among the processes on its machine.
        cross_rank, cross_size: the index of this machine, and the number of machines, in the trial.
        chief_ip: address of rank 0; needed with more than one machine.
        port_offset: added to the chief's port; for several trials on one machine.

    Raises:
        ValueError: some of the six numbers are missing or contradict each other.

    >>> alone = DistributedContext()
    >>> alone.rank, alone.size, alone.allgather("me")
    (0, 1, ['me'])
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        local_size: int | None = None,
        cross_rank: int | None = None,
        cross_size: int | None = None,
        chief_ip: str | None = None,
        port_offset: int = 0,
        transport: Transport | None = None,
    ) -> None:
        numbers = {
            "rank": rank,
            "size": size,
            "local_rank": local_rank,
            "local_size": local_size,
            "cross_rank": cross_rank,
            "cross_size": cross_size,
        }
        missing = [name for name, value in numbers.items() if value is None]
        if missing and len(missing) < len(numbers):
            raise ValueError(
                f"DistributedContext takes all of {', '.join(numbers)} or none; missing: {', '.join(missing)}"
            )
        self.rank = rank or 0
        self.size = 1 if size is None else size
        self.local_rank = local_rank or 0
        self.local_size = 1 if local_size is None else local_size
        self.cross_rank = cross_rank or 0
        self.cross_size = 1 if cross_size is None else cross_size
        for of, count in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")):
            if not 0 <= getattr(self, of) < getattr(self, count):
                raise ValueError(f"{of} must be >= 0 and < {count}, got {of}={numbers[of]}, {count}={numbers[count]}")
        if self.size != self.local_size and chief_ip is None:
            raise ValueError(
                f"size={self.size} but local_size={self.local_size}: training on more than one machine needs "
                "chief_ip, the address of rank 0's machine"
            )
        self.chief_ip = chief_ip or "127.0.0.1"
        self._is_chief = self.rank == 0
        self._is_local_chief = self.local_rank == 0
        self._transport = transport or self._default_transport(port_offset)
        self._side_store: Any = None

    def _default_transport(self, port_offset: int) -> Transport | None:
        if self.size == 1:
            return None
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == self.size:
            return TorchTransport()
        wait = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(self.chief_ip, PORT + port_offset, self.size, is_master=self._is_chief, timeout=wait)  # type: ignore[attr-defined]
        return StoreTransport(self.rank, self.size, store)

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """From the environment that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
        GROUP_WORLD_SIZE. `chief_ip` defaults to DET_CHIEF_IP, then to MASTER_ADDR.

        Raises:
            NotUnderTorchrun: one of them is not set. It is a ValueError and a KeyError.
        """
        return cls(
            rank=_env_int("RANK"),
            size=_env_int("WORLD_SIZE"),
            local_rank=_env_int("LOCAL_RANK"),
            local_size=_env_int("LOCAL_WORLD_SIZE"),
            cross_rank=_env_int("GROUP_RANK"),
            cross_size=_env_int("GROUP_WORLD_SIZE"),
            chief_ip=chief_ip or os.environ.get("DET_CHIEF_IP") or os.environ.get("MASTER_ADDR"),
        )

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """The same as `from_torch_distributed`: DeepSpeed uses the existing process group of torch.distributed."""
        return cls.from_torch_distributed(chief_ip)

    def get_rank(self) -> int:
        """The rank of this process in the trial."""
        return self.rank

    def get_local_rank(self) -> int:
        """The rank of this process among the trial's processes on this machine."""
        return self.local_rank

    def get_size(self) -> int:
        """The number of processes (slots) of the trial."""
        return self.size

    def get_num_agents(self) -> int:
        """The number of machines that the trial runs on."""
        return self.cross_size

    def gather(self, stuff: T) -> list[T] | None:
        """The objects of all ranks, in rank order, on the chief; None on the others."""
        if self._transport is None:
            return [stuff]
        return self._transport.gather(stuff)

    def allgather(self, stuff: T, *, timeout_s: float | None = None) -> list[T]:
        """The objects of all ranks, in rank order, on every rank.

        Args:
            timeout_s: how long to wait for the other ranks, in seconds; None: as long as they live.

        Raises:
            TimeoutError: they have not called it within that time. The ranks can't communicate any more.
        """
        if self._transport is None:
            return [stuff]
        return self._transport.allgather(stuff, timeout_s)

    def broadcast(self, stuff: T) -> T:
        """The chief's object, on every rank."""
        if self._transport is None:
            return stuff
        return self.allgather(stuff if self._is_chief else None)[0]  # type: ignore[return-value]

    def gather_local(self, stuff: T) -> list[T] | None:
        """The objects of this machine's ranks, in rank order, on its local chief; None on the others."""
        everything = self.allgather_local(stuff)
        return everything if self._is_local_chief else None

    def allgather_local(self, stuff: T) -> list[T]:
        """The objects of this machine's ranks, in rank order, on each of them."""
        if self._transport is None:
            return [stuff]
        if self.size == self.local_size:
            return self.allgather(stuff)
        # All machines make the same call, so one exchange among all ranks serves each of them.
        rows = self.allgather((self.cross_rank, self.local_rank, stuff))
        return [row[2] for row in sorted((r for r in rows if r[0] == self.cross_rank), key=lambda r: r[1])]

    def broadcast_local(self, stuff: T | None = None) -> T | None:
        """The object of this machine's local chief, on all its ranks. Without an object it is a barrier."""
        return self.allgather_local(stuff)[0]

    def side_store(self) -> Any:
        """A `torch.distributed.TCPStore` of these ranks, for use in a thread beside the one that makes the other calls.

        None if this is the only rank. All ranks must make the first call together.
        """
        if self._side_store is None and self.size > 1:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            wait = timedelta(seconds=TIMEOUT_S)
            store, port = None, 0
            if self._is_chief:  # the system chooses the port when it opens
                store = TCPStore(self.chief_ip, 0, is_master=True, wait_for_workers=False, timeout=wait)
                port = store.port
            port = self.broadcast(port)
            self._side_store = store or TCPStore(self.chief_ip, port, is_master=False, timeout=wait)
        return self._side_store

    def close(self) -> None:
        """Close connections. The process group of torch.distributed is left to whoever made it."""
        self._side_store = None
        if self._transport is not None:
            self._transport.close()


class NotUnderTorchrun(ValueError, KeyError):
    """The variables that torchrun sets are missing. Also a KeyError, as in Determined: programs that run with and
    without torchrun catch that."""

    __str__ = ValueError.__str__


def _env_int(name: str, environment: Mapping[str, str] = os.environ) -> int:
    value = environment.get(name)
    if value is None or not value.lstrip("-").isdigit():
        raise NotUnderTorchrun(
            f"from_torch_distributed() needs an integer in the environment variable {name}, "
            f"{'which is not set' if value is None else f'got {value!r}'}; start the program with torchrun, or pass "
            "rank, size and the other numbers to DistributedContext()"
        )
    return int(value)


def _pickled(stuff: Any) -> bytes:
    """For another rank, which has no use for tensors on this rank's device."""
    from dray.training.checkpoint.portable import portable

    with portable():
        return pickle.dumps(stuff)


TOO_LONG = 2**32 - 1
FOR_EVER = timedelta(days=365)
"""A rank may work alone for hours, such as the chief in `evaluate_full_dataset`. That the others wait for it is no
fault: if its process dies, they notice it by its connections."""


def _too_late(timeout_s: float) -> TimeoutError:
    return TimeoutError(f"not all ranks have called allgather() within {timeout_s:g} s")


class TorchTransport:
    """Over torch.distributed, in a separate gloo group: its collectives may wait for as long as a rank works alone,
    and are counted apart from those of the user's code."""

    ROOM = 8192
    """Bytes that most messages fit in. They take one collective, of a size known to all; `all_gather_object` takes two,
    and five times as long."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._open_group: Any = None
        assert self._group is not None  # made here, where no rank can have failed yet

    @property
    def _group(self) -> Any:
        """Made again, by all ranks together, if the context is used after its end."""
        if self._open_group is None:
            self._open_group = self._dist.new_group(backend="gloo", timeout=FOR_EVER)
        return self._open_group

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        message = _pickled(stuff)
        fits = len(message) + 4 <= self.ROOM
        head = (len(message) if fits else TOO_LONG).to_bytes(4, "little")
        mine = bytearray((head + message if fits else head).ljust(self.ROOM, b"\0"))
        rows = self._torch.empty(self._dist.get_world_size(), self.ROOM, dtype=self._torch.uint8)
        self._gather(rows, self._torch.frombuffer(mine, dtype=self._torch.uint8), timeout_s)
        lengths = [int.from_bytes(row[:4].numpy().tobytes(), "little") for row in rows]
        if TOO_LONG in lengths:
            result: list[Any] = [None] * len(lengths)
            self._dist.all_gather_object(result, message, group=self._group)
            return [pickle.loads(each) for each in result]
        return [pickle.loads(row[4 : 4 + n].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def _gather(self, rows: Any, mine: Any, timeout_s: float | None) -> None:
        if timeout_s is None:
            self._dist.all_gather(list(rows), mine, group=self._group)
            return
        began = time.monotonic()
        try:
            work = self._dist.all_gather(list(rows), mine, group=self._group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() < began + timeout_s:
                raise
            raise _too_late(timeout_s) from error

    def gather(self, stuff: Any) -> list[Any] | None:
        result: list[Any] | None = [None] * self._dist.get_world_size() if self._dist.get_rank() == 0 else None
        self._dist.gather_object(_pickled(stuff), result, group=self._group)
        return None if result is None else [pickle.loads(each) for each in result]

    def close(self) -> None:
        if self._open_group is not None and self._dist.is_initialized():
            self._dist.destroy_process_group(self._open_group)
        self._open_group = None


class StoreTransport:
    """Over a TCPStore that the chief serves: for processes without a process group."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        self._turn = 0
        self._last_to_all: int | None = None

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        turn = self._set(stuff)
        if timeout_s is not None:
            try:
                self._store.wait([f"{turn}/{rank}" for rank in range(self._size)], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise _too_late(timeout_s) from error
        result = [pickle.loads(self._store.get(f"{turn}/{rank}")) for rank in range(self._size)]
        if self._last_to_all is not None:
            # All ranks are done with that turn: each has set its part of this one.
            self._store.delete_key(f"{self._last_to_all}/{self._rank}")
        self._last_to_all = turn
        return result

    def gather(self, stuff: Any) -> list[Any] | None:
        turn = self._set(stuff)
        if self._rank > 0:
            return None
        result = []
        for key in [f"{turn}/{rank}" for rank in range(self._size)]:
            result.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        return result

    def _set(self, stuff: Any) -> int:
        turn, self._turn = self._turn, self._turn + 1
        self._store.set(f"{turn}/{self._rank}", _pickled(stuff))
        return turn

    def close(self) -> None:
        # The chief serves the store, so it leaves last; but does not wait long for a peer that died.
        self._store.set(f"bye/{self._rank}", "")
        if self._rank == 0:
            with contextlib.suppress(Exception):
                self._store.wait([f"bye/{rank}" for rank in range(self._size)], timedelta(seconds=10))
