"""The ranks of a program that passes none: those of its own process group, or those that torchrun started."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dray.training.parallel import ddp
from dray.training.parallel.device import backend_for, own_device
from dray.training.parallel.distributed import DistributedContext

_groups = itertools.count()


def launched() -> bool:
    """Whether torchrun, or a launcher built on it (`accelerate launch`), started this process."""
    # RANK and WORLD_SIZE are no proof: dray's and Ray Train's workers also set them, and a shell or a notebook may have
    # them from before.
    return dist.is_available() and dist.is_torchelastic_launched()


@contextlib.contextmanager
def process_group(config: Mapping[str, Any] | None) -> Iterator[DistributedContext]:
    """The ranks of this program. Under torchrun, torch.distributed is initialised for the block unless it already is.

    Raises:
        NotUnderTorchrun: the program has initialised torch.distributed without the variables that torchrun sets.
    """
    initialised = dist.is_available() and dist.is_initialized()
    with contextlib.ExitStack() as stack:
        if not initialised and launched():
            device = own_device(int(os.environ["LOCAL_RANK"]), config)
            gpu = device.type == "cuda"
            if gpu:  # first: NCCL connects the current devices
                torch.cuda.set_device(device)
            store, rank, size = next(rendezvous("env://"))
            # A unique prefix, because an earlier group has left its addresses in torchrun's store.
            store = dist.PrefixStore(f"dray/{next(_groups)}", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=size)
            initialised = True
            stack.callback(_end, device)
        if not initialised or dist.get_world_size() == 1:
            yield DistributedContext()
            return
        peers = DistributedContext.from_torch_distributed()
        stack.callback(peers.close)
        yield peers


def _end(device: torch.device) -> None:
    if dist.is_initialized():  # the program may have ended it
        with contextlib.suppress(RuntimeError):  # the group has failed, and another error says why
            ddp.end_group(device)
