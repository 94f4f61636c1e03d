"""The ranks of a worker group's processes, as Ray Train assigns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where a worker runs.

    Attributes:
        node: Ray's id of the node.
        ip: its address; nodes with the same address are one machine.
        gpus: Ray's ids of the worker's own GPUs.
    """

    node: str
    ip: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of one worker. The first five are named as in Ray Train's `DistributedContext`, which they replace.

    Attributes:
        world_rank, world_size: in the group.
        local_rank, local_world_size: among the group's workers on this machine.
        node_rank: of this machine in the group.
        num_nodes: how many machines the group has.
        gpus: the GPUs of all the group's workers on this node. Each sees them all, as NCCL wants, and uses that of its
            local rank.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    gpus: tuple[str, ...] = ()


def order(places: Sequence[Place]) -> list[int]:
    """The workers' indices in the order of their world ranks: node by node, on each node by GPU."""
    nodes = list(dict.fromkeys(place.node for place in places))
    return sorted(
        range(len(places)),
        key=lambda index: (nodes.index(places[index].node), min(map(_gpu_order, places[index].gpus), default=())),
    )


def assign(places: Sequence[Place]) -> list[Ranks]:
    """The ranks of workers in the order of their world ranks."""
    machines = list(dict.fromkeys(place.ip for place in places))
    return [
        Ranks(
            world_rank=rank,
            world_size=len(places),
            local_rank=sum(other.ip == place.ip for other in places[:rank]),
            local_world_size=sum(other.ip == place.ip for other in places),
            node_rank=machines.index(place.ip),
            num_nodes=len(machines),
            gpus=tuple(
                sorted({gpu for other in places if other.node == place.node for gpu in other.gpus}, key=_gpu_order)
            ),
        )
        for rank, place in enumerate(places)
    ]


def _gpu_order(gpu: str) -> tuple[int, str]:
    """Numbers in numeric order; UUIDs in alphabetical order."""
    return len(gpu), gpu
