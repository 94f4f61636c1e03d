"""The device on which a process trains."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from typing_extensions import ParamSpec

from dray.memory import gpu_in_use
from dray.text import counted

P = ParamSpec("P")
T = TypeVar("T")

CPU = torch.device("cpu")


class GpuConflict(RuntimeError):
    """A rank has no GPU, or the same one as another rank of its trial."""


def own_device(local_rank: int, config: Mapping[str, Any] | None = None) -> torch.device:
    """The GPU of the process with this local rank; the CPU if there is none, or if slots are CPUs by the experiment's
    config. Does not initialise CUDA."""
    if is_for_cpus(config) or not torch.cuda.is_available():
        return CPU
    return gpu_of(local_rank)


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a local rank. `check_gpus` finds out whether another rank has the same one."""
    # A process that sees only its own device sees it as number 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def on_this_gpu(target: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function to run in a new thread on this thread's GPU. Threads begin on GPU 0, which may be another rank's,
    and would create a CUDA context there."""
    if not gpu_in_use():
        return target
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(device)
        return target(*args, **kwargs)

    return run


def backend_for(device: torch.device) -> str:
    """The backend for `init_process_group`. On GPUs it includes gloo for tensors in the CPU's memory, such as offloaded
    weights, or in `torch.distributed.checkpoint.async_save`."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def check_gpus(device: torch.device, allgather: Callable[[Any], list[Any]]) -> None:
    """Check that no two ranks of a trial share a GPU. All ranks call this together.

    Raises:
        GpuConflict: two ranks do; raised on all ranks.
    """
    own_gpu = None
    if device.type == "cuda":
        # Compare UUIDs, because processes that see only one device all call it number 0.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        own_gpu = (socket.gethostname(), uuid, torch.cuda.device_count())
    ranks: dict[tuple[str, str, int], list[int]] = {}
    for rank, gpu in enumerate(allgather(own_gpu)):
        if gpu is not None:
            ranks.setdefault(gpu, []).append(rank)
    for (host, uuid, count), sharing in ranks.items():
        if len(sharing) > 1:
            raise GpuConflict(
                f"ranks {', '.join(map(str, sharing))} of this trial would all train on the GPU {uuid} of {host}, "
                f"where each of them sees {counted(count, 'GPU')}, but each rank needs its own GPU; start "
                "at most as many processes on a machine as it has GPUs (torchrun --nproc-per-node, ray start "
                "--num-gpus), or train on CPUs (CUDA_VISIBLE_DEVICES='', resources.slot: cpu)"
            )


def is_for_cpus(config: Mapping[str, Any] | None) -> bool:
    resources = (config or {}).get("resources") or {}
    return resources.get("slot") == "cpu" or resources.get("slots_per_trial") == 0
