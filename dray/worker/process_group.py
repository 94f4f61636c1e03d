"""The torch process group of a worker group's ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dray.training.parallel import ddp
from dray.training.parallel.device import CPU, GpuConflict, backend_for, check_gpus, gpu_of
from dray.training.parallel.transport import StoreTransport, serve_store, use_interface_of
from dray.worker.dynamo import defer_import_of_compiler
from dray.worker.ranks import Place, Ranks

log = logging.getLogger(__name__)

TIMEOUT_S = 1800
"""How long ranks wait for one another while they start. Trials have their own timeout, `collective_timeout_s`."""


@contextlib.contextmanager
def joined(ranks: Ranks, place: Place, meet: Callable[[tuple[str, int] | None], tuple[str, int]]) -> Iterator[None]:
    """Join a process group with the other ranks of this worker group: see `backend_for`.

    Sets torchrun's environment variables, for libraries and programs that read them. `meet` returns rank 0's address
    (host and port); rank 0 calls it with its address, the others with None.
    """
    rank, size = ranks.world_rank, ranks.world_size
    device = gpu_of_worker(ranks.local_rank, place) if place.gpus else CPU
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    use_interface_of(place.ip)
    store = serve_store(place.ip, timedelta(seconds=TIMEOUT_S)) if rank == 0 else None
    address = (store.host, store.port) if store is not None else None
    if size > 1:
        address = meet(address)
    assert address is not None
    if store is None:
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    check_gpus(device, StoreTransport(rank, size, store).allgather)
    os.environ.update(launcher_variables(ranks, store))
    dist.init_process_group(
        backend_for(device),
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if gpu and size > 1 and binds_device() else None,
    )
    defer_import_of_compiler()
    if gpu:
        ddp.connect(dist.group.WORLD)
    try:
        with outliving_programs():
            yield
    finally:
        with contextlib.suppress(RuntimeError):  # the group has failed, and the process ends anyway
            ddp.end_group(device)


def binds_device() -> bool:
    """Whether NCCL's default group is bound to the rank's GPU, as the user wants who sets this variable.

    Then torch makes each other group by splitting the default one, in which all its ranks must take part: groups that
    only their own ranks make, and groups of gloo, hang. It has also been slower, and a source of other hangs. See
    docs/cluster-network.md.
    """
    return os.environ.get("DRAY_BIND_DEVICE", "0") == "1"


def gpu_of_worker(local_rank: int, place: Place) -> torch.device:
    """The GPU that Ray gave to this worker. Raises `GpuConflict` if torch sees no GPU."""
    if not torch.cuda.is_available():
        raise GpuConflict(
            f"Ray gave a worker on {place.ip} GPU {', '.join(place.gpus)}, but "
            f"torch {torch.__version__} sees none there; install a torch that is built for its driver, start Ray's "
            "node with as many --num-gpus as it has, or set resources.slot: cpu"
        )
    return gpu_of(local_rank)


def launcher_variables(ranks: Ranks, store: TCPStore) -> dict[str, str]:
    """The environment variables that torchrun sets."""
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "RANK": str(ranks.world_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "NODE_RANK": str(ranks.node_rank),
        "GROUP_RANK": str(ranks.node_rank),
        "GROUP_WORLD_SIZE": str(ranks.num_nodes),
    }


@contextlib.contextmanager
def outliving_programs() -> Iterator[None]:
    """Keep the process group when programs in the block initialise and destroy one, as under torchrun.

    They use the existing group instead, with their own timeout. They make and destroy subgroups as usual.
    """
    init, destroy = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(*args, **kwargs).arguments
        if (timeout := given.get("timeout")) is not None:
            ddp.set_timeout(timeout)
        if ignored := _ignored(given):
            log.warning(
                "init_process_group(%s): ignored, as the trial's slots have a process group already, which this "
                "program uses too: rank %d of %d, backend %s",
                ", ".join(f"{name}={given[name]!r}" for name in ignored),
                dist.get_rank(),
                dist.get_world_size(),
                dist.get_backend_config(),
            )

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    _set_functions(init_process_group, destroy_process_group)
    try:
        yield
    finally:
        _set_functions(init, destroy)


def _ignored(given: Mapping[str, Any]) -> list[str]:
    """The arguments of `init_process_group` that contradict the existing process group."""
    names = {each.rpartition(":")[2] for each in (given.get("backend") or "gloo").lower().split(",")}
    ignored = ["backend"] if names - set(ddp.backends(dist.group.WORLD).values()) else []
    own = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "pg_options": None}
    return [*ignored, *(name for name, value in own.items() if given.get(name, value) not in (value, -1))]


def _set_functions(init: Callable[..., None], destroy: Callable[..., None]) -> None:
    dist.init_process_group, dist.destroy_process_group = init, destroy
