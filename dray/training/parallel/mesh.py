"""The mesh of a trial's processes, and the division of the data among them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dray.training.parallel import ddp
from dray.training.units import is_int

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


NAMES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The number of ranks in each dimension of a trial's mesh. The last one varies fastest."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.dp_replicate, self.dp_shard, self.tp

    @property
    def replicas(self) -> int:
        return self.dp_replicate * self.dp_shard  # each has its own share of the data

    def replica(self, rank: int) -> int:
        return rank // self.tp


def mesh_shape(sizes: Mapping[str, Any] | None, ranks: int) -> MeshShape:
    """The mesh of a number of ranks with these sizes. The default of `dp_shard` is `ranks` divided by the others.

    Raises:
        ValueError: the sizes are invalid, or don't divide the ranks.
    """
    sizes = {} if sizes is None else sizes
    if sizes.keys() - set(NAMES):
        raise ValueError(f"mesh takes the sizes of {', '.join(NAMES)}, such as {{'tp': 2}}; got {sizes!r}")
    for name, size in sizes.items():
        if not is_int(size) or size < 1:
            raise ValueError(f"mesh: {name} must be an int >= 1, got {size!r}")
    fixed = sizes.get("dp_replicate", 1) * sizes.get("tp", 1)
    shard = sizes.get("dp_shard", ranks // fixed)
    if fixed * shard != ranks:
        product = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh: {product} {'does not divide' if 'dp_shard' not in sizes else 'is not'} the trial's {ranks} "
            "slot(s); change the number of slots, or the sizes"
        )
    return MeshShape(dp_replicate=sizes.get("dp_replicate", 1), dp_shard=shard, tp=sizes.get("tp", 1))


def device_mesh(shape: MeshShape, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks with the three named dimensions, which all ranks together make at its first use.

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
        gradients.meshes[shape] = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=NAMES)
    mesh: DeviceMesh = gradients.meshes[shape]
    return mesh


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
