"""Models whose weights are divided among the ranks: by `fully_shard` or `parallelize_module`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from dray.training.parallel import ddp

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor."""
    # Not imported here, which takes most of a second: without it nothing is one.
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether this rank holds only its part of some of a module's parameters: one of them is a DTensor, or is when the
    module does not run."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return bool(fsdp_modules(module)) or any(map(is_dtensor, module.parameters()))


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """The modules of a model that `fully_shard` was applied to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def local(tensor: Any) -> Any:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def connect(model: torch.nn.Module) -> None:
    """Have a sharded model's connections closed with those for gradients. All ranks call this together."""
    if dist.is_initialized():
        ddp.gradients_group().models[model] = _release
        _own_groups(model)


def _own_groups(model: torch.nn.Module) -> None:
    """Have the FSDP modules of a model on gloo communicate in process groups that a rank can close as it leaves: those
    of a mesh that the user has made are the trial's, and may be the one in which ranks agree."""
    found = [
        (info, name, group)
        for module in fsdp_modules(model)
        for params in _param_groups(module)
        for info in (params.mesh_info, params.post_forward_mesh_info)
        for name in _GROUPS
        if (group := getattr(info, name, None)) is not None
    ]
    # The device of its mesh: offloaded parameters are on another.
    if not found or ddp.queues_collectives(torch.device(found[0][0].mesh.device_type)):
        return
    ours = ddp.gradients_group()
    mine = {tuple(dist.get_process_group_ranks(group)) for _, _, group in found if not ours.has(group)}
    needed: list[set[tuple[int, ...]]] = [set()] * dist.get_world_size()
    dist.all_gather_object(needed, mine, group=ours.group)
    for ranks in sorted(set().union(*needed)):  # which all ranks make together, in one order
        ours.make(ranks)
    for info, name, group in found:
        if not ours.has(group):
            setattr(info, name, ours.make(tuple(dist.get_process_group_ranks(group))))


_GROUPS = ("shard_process_group", "replicate_process_group")
"""The process groups of a mesh of FSDP's."""


def _param_groups(module: Any) -> list[Any]:
    found: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return found


def _release(model: torch.nn.Module) -> None:
    """Release the process groups that a sharded model holds, so that their sockets can close. It keeps its shards."""
    for module in fsdp_modules(model):
        for group in _param_groups(module):
            # A rank may leave in the middle of a batch.
            group._all_gather_result = None
            group._to_sharded()
            for info in (group.mesh_info, group.post_forward_mesh_info):
                for name in _GROUPS:
                    if hasattr(info, name):
                        setattr(info, name, None)


UNSYNCED = "_dray_unsynced"
"""An attribute of the FSDP modules that keep their gradients whole until the batch that steps."""


def set_gradient_sync(module: FSDPModule, steps: bool) -> None:
    """Have the next backward passes of an aggregation sum a module's gradients over the ranks, as far as they do.

    Args:
        steps: they are those of the batch that steps.
    """
    if hasattr(module, UNSYNCED):
        module.set_requires_gradient_sync(steps, recurse=False)
    elif any(getattr(group.mesh_info, "replicate_process_group", None) for group in _param_groups(module)):
        module.set_requires_all_reduce(steps, recurse=False)
        # What waits for the all-reduce is one flat tensor: it must be that of the same parameters in each batch, and a
        # unit that the batch that steps does not use must reduce it too.
        module.set_reduce_scatter_unused_params(True, recurse=False)


def sum_kept_gradients(model: torch.nn.Module) -> None:
    """Sum the gradients that wait for the batch that steps over the ranks. All ranks call this together."""
    for module in fsdp_modules(model):
        for group in _param_groups(module):
            if group.reduce_grads and group._partial_reduce_output is None:
                continue
            synchronises = group.reduce_grads, group.all_reduce_grads
            group.reduce_grads = group.all_reduce_grads = True
            # What torch calls at the end of a backward pass in which the module had no part.
            group.post_backward()
            group.finalize_backward()
            group.reduce_grads, group.all_reduce_grads = synchronises
            group._training_state = type(group._training_state).IDLE


def sync_buffers(model: torch.nn.Module) -> None:
    """Send the chief's buffers (running means) to all ranks: `fully_shard` leaves each its own."""
    if ddp.is_connected(model):
        broadcast([buffer for buffer in model.buffers() if not is_dtensor(buffer)])


def broadcast(tensors: list[torch.Tensor], group: Any = None) -> None:
    """Send the values that a group's first rank has to its others."""
    group = ddp.gradients_group().group if group is None else group
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.contiguous()
            dist.broadcast(value, group=group, group_src=0)
            if value is not tensor:
                tensor.copy_(value)
