"""Models whose weights are divided among the ranks, by `fully_shard` or `parallelize_module`."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from dray.training.parallel import ddp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    # Importing it takes most of a second, and before it is imported nothing is a DTensor.
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether a parameter of a module is a DTensor, at least while the module is not running."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return bool(fsdp_modules(module)) or any(map(is_dtensor, module.parameters()))


def fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def local(tensor: Any) -> Any:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def part_of(tensor: torch.Tensor) -> int:
    """The number of this rank's part of a tensor; the same on ranks with equal parts."""
    part = 0
    if is_dtensor(tensor):
        mesh = tensor.device_mesh
        for size, at, placement in zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True):
            part = part * size + (0 if placement.is_replicate() else at)
    return part


def connect(model: torch.nn.Module) -> None:
    """Arrange for a sharded model's connections to be closed with those for gradients. All ranks call this together."""
    if dist.is_initialized():
        ddp.gradients_group().models[model] = _release
        _own_groups(model)


def _own_groups(model: torch.nn.Module) -> None:
    """With gloo, have a model's FSDP modules communicate in process groups that a rank can close when it leaves. The
    groups of the user's own mesh belong to the trial, and may include the one in which ranks agree."""
    groups = [
        (info, name, group)
        for module in fsdp_modules(model)
        for params in param_groups(module)
        for info in (params.mesh_info, params.post_forward_mesh_info)
        for name in _GROUPS
        if (group := getattr(info, name, None)) is not None
    ]
    # The mesh's device counts, since offloaded parameters are on another.
    if not groups or ddp.queues_collectives(torch.device(groups[0][0].mesh.device_type)):
        return
    ours = ddp.gradients_group()
    foreign = {tuple(dist.get_process_group_ranks(group)) for _, _, group in groups if not ours.has(group)}
    needed: list[set[tuple[int, ...]]] = [set()] * dist.get_world_size()
    dist.all_gather_object(needed, foreign, group=ours.group)
    for ranks in sorted(set().union(*needed)):  # all ranks make the groups together, in the same order
        ours.make(ranks)
    for info, name, group in groups:
        if not ours.has(group):
            setattr(info, name, ours.make(tuple(dist.get_process_group_ranks(group))))


_GROUPS = ("shard_process_group", "replicate_process_group")  # attributes of FSDP's mesh info


def param_groups(module: Any) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    # Older versions of torch have one, or None.
    return [group] if (group := state._fsdp_param_group) is not None else []


def _release(model: torch.nn.Module) -> None:
    """Release a sharded model's process groups, so that their sockets can close. The model keeps its shards."""
    for module in fsdp_modules(model):
        for group in param_groups(module):
            # A rank may leave in the middle of a batch.
            group._all_gather_result = None
            group._to_sharded()
            for info in (group.mesh_info, group.post_forward_mesh_info):
                for name in _GROUPS:
                    if hasattr(info, name):
                        setattr(info, name, None)


UNSYNCED = "_dray_unsynced"  # an attribute of FSDP modules that keep gradients whole until the batch that steps


def set_gradient_sync(module: FSDPModule, steps: bool) -> None:
    """Set whether a module's next backward passes sum its gradients over the ranks, as in a batch that `steps`."""
    if hasattr(module, UNSYNCED):
        module.set_requires_gradient_sync(steps, recurse=False)
    elif hasattr(module, "set_reduce_scatter_unused_params") and any(
        getattr(group.mesh_info, "replicate_process_group", None) for group in param_groups(module)
    ):
        # One flat tensor waits for the all-reduce. It must contain the same parameters in each batch, and must also be
        # reduced for units that the batch that steps does not use. Older versions of torch can't do that: they
        # all-reduce in each batch.
        module.set_requires_all_reduce(steps, recurse=False)
        module.set_reduce_scatter_unused_params(True, recurse=False)


def sum_kept_gradients(model: torch.nn.Module) -> None:
    """Sum, over the ranks, gradients that wait for the batch that steps. All ranks call this together."""
    for module in fsdp_modules(model):
        for group in param_groups(module):
            if group.reduce_grads and group._partial_reduce_output is None:
                continue
            synchronises = group.reduce_grads, group.all_reduce_grads
            group.reduce_grads = group.all_reduce_grads = True
            # Torch calls these at the end of a backward pass in which the module had no part.
            group.post_backward()
            group.finalize_backward()
            group.reduce_grads, group.all_reduce_grads = synchronises
            group._training_state = type(group._training_state).IDLE


def sync_buffers(model: torch.nn.Module) -> None:
    """Send the chief's buffers (running means) to all ranks, since `fully_shard` lets them differ."""
    if ddp.is_connected(model):
        broadcast([buffer for buffer in model.buffers() if not is_dtensor(buffer)])


def broadcast(tensors: list[torch.Tensor], group: Any = None) -> None:
    """Send the values of a group's first rank to the others."""
    group = ddp.gradients_group().group if group is None else group
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.contiguous()
            dist.broadcast(value, group=group, group_src=0)
            if value is not tensor:
                tensor.copy_(value)


def placed_alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[(tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None].append(tensor)
    return list(alike.values())


@contextlib.contextmanager
def groups_placed_alike(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block, split parameter groups so that foreach and fused kernels can take each in one call.

    Afterwards the groups are as before, since checkpoints contain them and load on other meshes. Optimizers without
    such options are left alone, since they may refer to groups by number.
    """
    groups = optimizer.param_groups
    split: list[list[dict[str, Any]]] = []
    for group in groups:
        alike = placed_alike(group["params"])
        in_one_call = group.get("fused") or group.get("foreach", False) is not False  # None: torch chooses
        split.append([{**group, "params": part} for part in alike] if in_one_call and len(alike) > 1 else [group])
    optimizer.param_groups = [part for parts in split for part in parts]
    try:
        yield
    finally:
        for group, parts in zip(groups, split, strict=True):
            # Some optimizers count steps in their groups.
            group.update({**parts[-1], "params": group["params"]})
        optimizer.param_groups = groups


@contextlib.contextmanager
def gradients_on_one_mesh(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block, all gradients are DTensors on the mesh with the most dimensions, for norms and other functions
    of all gradients.

    Plain tensors are treated as equal on all ranks. Meshes that are not dimensions of that one are left to torch, which
    refuses to combine them.
    """
    gradients = [(each, each.grad) for each in parameters if each.grad is not None]
    meshes = [gradient.device_mesh for _, gradient in gradients if is_dtensor(gradient)]
    mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    names = set() if mesh is None else set(mesh.mesh_dim_names or ())
    if any(each != mesh and not set(each.mesh_dim_names or [None]) <= names for each in meshes):
        mesh = None
    moved = [
        (parameter, gradient, _on(mesh, gradient))
        for parameter, gradient in gradients
        if mesh is not None and not (is_dtensor(gradient) and gradient.device_mesh == mesh)
    ]
    if not moved:
        yield
        return
    from torch.distributed.tensor.experimental import implicit_replication

    for parameter, _, on_mesh in moved:
        parameter.grad = on_mesh
    try:
        with implicit_replication():
            yield
    finally:
        for parameter, gradient, on_mesh in moved:
            new: Any = parameter.grad
            if new is not None:
                if new is not on_mesh:
                    local(gradient).copy_(new.redistribute(placements=on_mesh.placements).to_local())
                parameter.grad = gradient


def _on(mesh: DeviceMesh, gradient: torch.Tensor) -> Any:
    """A gradient as a DTensor on another mesh, in the same memory, replicated over the dimensions new to it."""
    from torch.distributed.tensor import DTensor, Replicate

    own: dict[Any, Any] = {}
    if is_dtensor(gradient):
        own = dict(zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=False))
    return DTensor.from_local(
        local(gradient.detach()),
        mesh,
        [own.get(name, Replicate()) for name in mesh.mesh_dim_names or range(mesh.ndim)],
        shape=gradient.shape,
        stride=gradient.stride(),
    )


def unscaling_by_placement(scaler: Any) -> Any:
    """Have a `torch.amp.GradScaler` unscale gradients in one call per placement, and return it.

    Within a call, torch looks for infinite gradients on other ranks only along the dimensions over which the first
    gradient is divided.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        return scaler
    own: Any = scaler
    unscale = own._unscale_grads_

    def by_placement(optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        parts = placed_alike(each for group in optimizer.param_groups for each in group["params"])
        found: dict[torch.device, torch.Tensor] = {}
        for part in parts:
            for device, infinite in unscale(SimpleNamespace(param_groups=[{"params": part}]), *args).items():
                found[device] = torch.maximum(infinite, found.get(device, infinite))
        return found

    own._unscale_grads_ = by_placement
    return own
