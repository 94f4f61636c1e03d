"""The mesh of a trial's processes, and the division of the data among them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dray.training.parallel import ddp
from dray.training.parallel.mesh_shape import AVERAGED, MeshShape
from dray.training.units import is_int

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh(shape: MeshShape, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks, which they make together at its first use.

    Its process groups are kept for later trials. A rank that leaves closes them with that of the gradients.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    gradients = ddp.gradients_group()
    if shape not in gradients.meshes:
        ranks = torch.arange(dist.get_world_size()).reshape(shape.sizes)
        groups: list[Any] = []
        for dim, size in enumerate(shape.sizes):
            rows = ranks.movedim(dim, -1).reshape(-1, size).tolist()
            if size == 1:  # each rank makes its own group, alone
                rows = [[dist.get_rank()]]
            by_ranks = {tuple(row): gradients.make(tuple(row)) for row in rows}
            groups.append(next(group for row, group in by_ranks.items() if dist.get_rank() in row))
        forget_operations()
        gradients.meshes[shape] = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=shape.names)
    mesh: DeviceMesh = gradients.meshes[shape]
    return mesh


def averaging_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a trial's mesh over which gradients are averaged, for `fully_shard`: its shards, or with
    `dp_replicate` > 1 replicas and shards."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    shards = [name for name, size in sizes.items() if name in AVERAGED[1:] and size > 1] or ["dp_shard"]
    shard = "_".join(shards)
    if len(shards) > 1:  # `fully_shard` takes them as one dimension
        merged = {"dp_replicate": sizes["dp_replicate"], shard: math.prod(sizes[name] for name in shards)}
        others = {name: size for name, size in sizes.items() if name not in AVERAGED}
        mesh = device_mesh(MeshShape(tuple({**merged, **others}.items())), torch.device(mesh.device_type))
    return mesh[shard] if sizes["dp_replicate"] == 1 else mesh["dp_replicate", shard]


def forget_operations() -> None:
    """Clear torch's caches of operations on DTensors. They keep meshes, which hold process groups, and compare equal to
    later meshes of the same shape."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

        private: Any = debug
        if hasattr(private, "_clear_sharding_prop_cache"):
            private._clear_sharding_prop_cache()
        else:  # an older torch, as 2.7
            private = DTensor
            private._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        private = _redistribute
        private._gen_transform_infos.cache_clear()
        getattr(private, "_planner_cache", {}).clear()  # not in older versions of torch
        private = _collective_utils
        private.MeshTopoInfo.build_from_mesh.cache_clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The division of the data among processes when the trial started. Every checkpoint has it, so that a resumed run
    has the same global batches."""

    replicas: int
    batch_size: int | None  # records per batch of each process; None with the user's batch sampler

    def same_global_batch(self, other: Division) -> bool:
        """Whether both are known to have the same number of records in a global batch."""
        if self.batch_size is None or other.batch_size is None:
            return False
        return self.replicas * self.batch_size == other.replicas * other.batch_size

    def __str__(self) -> str:
        size = "a batch sampler" if self.batch_size is None else f"batches of {self.batch_size}"
        return f"{self.replicas} process(es) and {size} in each"


def global_batch_size(hparams: dict[str, Any] | None, size: int) -> int | None:
    """Check hparams["global_batch_size"], and round it down to a multiple of `size`; None if there is none."""
    if hparams is None or "global_batch_size" not in hparams:
        return None
    value = hparams["global_batch_size"]
    if not is_int(value):
        raise ValueError(f"hparams['global_batch_size'] must be an int, got {value!r} of type {type(value).__name__}")
    if value < size:
        raise ValueError(
            f"hparams['global_batch_size'] is {value}, less than the trial's {size} slot(s); each slot needs at least "
            "one record"
        )
    return int(value) // size * size
