"""Which device a process trains on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dray.training.distributed import DistributedContext

CPU = torch.device("cpu")


def own_device(peers: DistributedContext, config: Mapping[str, Any] | None = None) -> torch.device:
    """This process's GPU; the CPU if there is none, or if the experiment's config says that a slot is a CPU.

    Does not initialise CUDA.
    """
    if _is_for_cpus(config) or not torch.cuda.is_available():
        return CPU
    # A process that sees only its own device sees it as number 0.
    return torch.device("cuda", peers.local_rank % torch.cuda.device_count())


def _is_for_cpus(config: Mapping[str, Any] | None) -> bool:
    resources = (config or {}).get("resources") or {}
    return resources.get("slot") == "cpu" or resources.get("slots_per_trial") == 0
