"""The processes of one trial: their ranks, and the exchange of small objects between them."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any, TypeVar

from dray.compat import lacks
from dray.training.parallel.transport import StoreTransport, TorchTransport, Transport, serve_store

T = TypeVar("T")

#: The chief's port, for processes without torch.distributed; `port_offset` is added to it.
PORT = 12360
WAIT = timedelta(minutes=10)

_NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")  # torchrun's


@lacks("determined.core.DistributedContext")
class DistributedContext:
    """The rank of this process in a trial, and the exchange of small objects between the trial's processes.

    The exchange is for coordination. For tensors, use the collectives of your training framework; tensors in objects
    arrive on the CPU. All ranks must make the same calls in the same order.

    Args:
        rank, size: the rank of this process, and the number of processes, in the trial.
        local_rank, local_size: the same among the trial's processes on this machine.
        cross_rank, cross_size: the index of this machine, and the number of machines, in the trial.
        chief_ip: the address of rank 0; required with more than one machine.
        port_offset: added to the chief's port, for several trials on one machine.
        transport: carries the objects. Default: torch.distributed if it is initialised, otherwise a store on the chief.

    Raises:
        ValueError: some of the six numbers are missing, or they contradict each other.

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
        given = (rank, size, local_rank, local_size, cross_rank, cross_size)
        missing = [name for name, value in zip(_NAMES, given, strict=True) if value is None]
        if missing and len(missing) < len(_NAMES):
            raise ValueError(
                f"DistributedContext takes all of {', '.join(_NAMES)} or none; missing: {', '.join(missing)}"
            )
        numbers = (0, 1) * 3 if missing else [value or 0 for value in given]
        self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size = numbers
        for name, count in zip(_NAMES[::2], _NAMES[1::2], strict=True):
            number, limit = getattr(self, name), getattr(self, count)
            if not 0 <= number < limit:
                raise ValueError(f"{name} must be >= 0 and < {count}, got {name}={number}, {count}={limit}")
        if self.size != self.local_size and chief_ip is None:
            raise ValueError(
                f"size={self.size} but local_size={self.local_size}: training on more than one machine needs "
                "chief_ip, the address of rank 0's machine"
            )
        self.chief_ip = chief_ip or "127.0.0.1"
        self._transport = transport or self._default_transport(port_offset)
        self._side_store: Any = None

    def _default_transport(self, port_offset: int) -> Transport | None:
        if self.size == 1:
            return None
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == self.size:
            return TorchTransport()
        store = serve_store(self.chief_ip, WAIT, PORT + port_offset) if self.rank == 0 else None
        return StoreTransport(self.rank, self.size, store or self._connected(PORT + port_offset))

    def _connected(self, port: int) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(self.chief_ip, port, is_master=False, timeout=WAIT)

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Make a context from the environment variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, ...

        Args:
            chief_ip: the address of rank 0. Default: DET_CHIEF_IP, or else MASTER_ADDR.

        Raises:
            NotUnderTorchrun: a variable is not set. This is a ValueError and a KeyError.
        """
        numbers: dict[str, Any] = dict(zip(_NAMES, map(_env_int, _VARIABLES), strict=True))
        chief_ip = chief_ip or os.environ.get("DET_CHIEF_IP") or os.environ.get("MASTER_ADDR")
        return cls(**numbers, chief_ip=chief_ip)

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Same as `from_torch_distributed`: DeepSpeed uses the existing process group of torch.distributed."""
        return cls.from_torch_distributed(chief_ip)

    def get_rank(self) -> int:
        """Return the rank of this process in the trial."""
        return self.rank

    def get_local_rank(self) -> int:
        """Return the rank of this process among the trial's processes on this machine."""
        return self.local_rank

    def get_size(self) -> int:
        """Return the number of the trial's processes (slots)."""
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of machines on which the trial runs."""
        return self.cross_size

    def gather(self, stuff: T) -> list[T] | None:
        """Return the objects of all ranks, in rank order, on the chief, and None on other ranks."""
        if self._transport is None:
            return [stuff]
        return self._transport.gather(stuff)

    def allgather(self, stuff: T, *, timeout_s: float | None = None) -> list[T]:
        """Return the objects of all ranks, in rank order, on every rank.

        Args:
            timeout_s: seconds to wait for the other ranks. None: as long as they live.

        Raises:
            TimeoutError: not all ranks have called this in time. The ranks can't communicate any more.
        """
        if self._transport is None:
            return [stuff]
        return self._transport.allgather(stuff, timeout_s)

    def broadcast(self, stuff: T) -> T:
        """Return the chief's object on every rank."""
        if self._transport is None:
            return stuff
        return self.allgather(stuff if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather_local(self, stuff: T) -> list[T] | None:
        """Return the objects of this machine's ranks, in rank order, on its local chief, and None on other ranks."""
        objects = self.allgather_local(stuff)
        return objects if self.local_rank == 0 else None

    def allgather_local(self, stuff: T) -> list[T]:
        """Return the objects of this machine's ranks, in rank order, on each of them."""
        if self.size == self.local_size:
            return self.allgather(stuff)
        # All machines make the same call, so one exchange among all ranks serves each of them.
        rows = self.allgather((self.cross_rank, self.local_rank, stuff))
        return [row[2] for row in sorted((r for r in rows if r[0] == self.cross_rank), key=lambda r: r[1])]

    def broadcast_local(self, stuff: T | None = None) -> T | None:
        """Return the object of this machine's local chief on all its ranks. Without an object, this is a barrier."""
        return self.allgather_local(stuff)[0]

    def side_store(self) -> Any:
        """Return a `torch.distributed.TCPStore` of these ranks, for a thread other than that of the other calls; None
        if this is the only rank. All ranks make the first call together."""
        if self._side_store is None and self.size > 1:
            store = serve_store(self.chief_ip, WAIT) if self.rank == 0 else None
            port = self.broadcast(0 if store is None else store.port)
            self._side_store = store or self._connected(port)
        return self._side_store

    def over(self, transport: Transport) -> DistributedContext:
        """Return a context of the same ranks with another transport."""
        other = copy.copy(self)
        other._transport = transport
        return other

    def close(self) -> None:
        """Close the connections. The process group of torch.distributed stays open."""
        self._side_store = None
        if self._transport is not None:
            self._transport.close()


class NotUnderTorchrun(ValueError, KeyError):
    """The variables that torchrun sets are missing. Also a KeyError, as in Determined, which programs that run with and
    without torchrun catch."""

    __str__ = ValueError.__str__


def check_peers(peers: DistributedContext, caller: str) -> None:
    """Raise a RuntimeError if `peers` has a single process, but torch.distributed has several."""
    import torch.distributed as dist

    if peers.size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed has {dist.get_world_size()} processes, but {caller} knows of only one; pass "
            "distributed=core.DistributedContext.from_torch_distributed()"
        )


def _env_int(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.lstrip("-").isdigit():
        raise NotUnderTorchrun(
            f"from_torch_distributed() needs an integer in the environment variable {name}, "
            f"{'which is not set' if value is None else f'got {value!r}'}; start the program with torchrun, or pass "
            "rank, size and the other numbers to DistributedContext()"
        )
    return int(value)
