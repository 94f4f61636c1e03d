"""Which device a process trains on."""

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
    """The GPU of the process with this rank on its machine; the CPU if there is none, or the experiment's config says
    that a slot is one. Does not initialise CUDA."""
    if is_for_cpus(config) or not torch.cuda.is_available():
        return CPU
    return gpu_of(local_rank)


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank. `check_gpus` finds out whether another rank has the same."""
    # A process that sees only its own device sees it as number 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def on_this_gpu(target: Callable[P, T]) -> Callable[P, T]:
    """The function for a new thread, on the GPU of this one: threads begin on GPU 0, which may be another rank's, and
    anything that needs a context would create one there."""
    if not gpu_in_use():
        return target
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(device)
        return target(*args, **kwargs)

    return run


def backend_for(device: torch.device) -> str:
    """What `init_process_group` takes for ranks on a device: on GPUs gloo too, for tensors in the CPU's memory, as
    those of offloaded weights and of `torch.distributed.checkpoint.async_save` are."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def check_gpus(device: torch.device, allgather: Callable[[Any], list[Any]]) -> None:
    """Raise a GpuConflict, on all ranks, if two ranks of a trial train on one GPU. All ranks call this together."""
    mine = None
    if device.type == "cuda":
        # By UUID: processes that each see only one device all call it number 0.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        mine = (socket.gethostname(), uuid, torch.cuda.device_count())
    ranks: dict[tuple[str, str, int], list[int]] = {}
    for rank, gpu in enumerate(allgather(mine)):
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
