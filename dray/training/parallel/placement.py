"""Optimizer steps on parameters that are placed differently, which torch's functions refuse to take together.

With tensor parallelism the layers of the plan are DTensors over `tp`, and all others plain tensors, the same on each
rank; or, with `FullyShard`, DTensors over `dp_shard` and `tp`, and over `dp_shard` alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dray.training.parallel.sharding import is_dtensor, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def placed_alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors, by mesh and placements."""
    found: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[(tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None].append(tensor)
    return list(found.values())


@contextlib.contextmanager
def groups_placed_alike(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block, split parameter groups such that foreach and fused kernels can take each in one call.

    Not for longer: the groups are a part of checkpoints, which load on other meshes. Nor for optimizers without such
    options, which may know their groups by number.
    """
    groups = optimizer.param_groups
    split = [
        [group] if len(parts) < 2 or not _in_one_call(group) else [{**group, "params": part} for part in parts]
        for group in groups
        for parts in [placed_alike(group["params"])]
    ]
    optimizer.param_groups = [part for parts in split for part in parts]
    try:
        yield
    finally:
        for group, parts in zip(groups, split, strict=True):
            # Some optimizers count in their groups.
            group.update({**parts[-1], "params": group["params"]})
        optimizer.param_groups = groups


def _in_one_call(group: dict[str, Any]) -> bool:
    """Whether an optimizer may step a group by foreach or fused kernels: by default (None) it chooses."""
    return group.get("fused") or group.get("foreach", False) is not False


@contextlib.contextmanager
def gradients_on_one_mesh(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block, let all gradients be DTensors of the mesh that has the most dimensions, if some are of another
    or plain: so norms, and whatever else is computed of all, need no more than they do for a single mesh.

    Plain tensors count as the same on all ranks meanwhile. Meshes that are not dimensions of that one are left to
    torch, which refuses them together.
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
    """The same gradient, in the same memory, as a DTensor of another mesh: replicated over the dimensions that its own
    mesh lacks."""
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
    """Have a `torch.amp.GradScaler` unscale gradients that are placed differently one kind after another; return it.

    In one call torch looks for infinite gradients on other ranks only along the dimensions over which the first
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
