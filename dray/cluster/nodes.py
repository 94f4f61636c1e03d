"""The nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dray.private import is_loopback

GPU_TYPE = "ray.io/accelerator-type"
"""A label: the type of a node's GPUs. Ray sets it on running nodes; of those to be started, the cluster file has it."""

NODE_ID = "ray.io/node-id"
"""A label that Ray sets: its id of a node."""


class RayNode(NamedTuple):
    """What Ray knows about a node.

    Attributes:
        id: Ray's id; a node that comes back gets another.
        address: its network address.
        resources: total, used or not; empty once it is gone.
        labels: Ray's own, and those that the node was started with.
    """

    id: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def known_nodes() -> list[RayNode]:
    """All nodes, including those that are gone."""
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Alive"], node["Resources"], node["Labels"])
        for node in ray.nodes()
    ]


def nodes() -> list[RayNode]:
    """All nodes that are alive."""
    return [node for node in known_nodes() if node.is_alive]


def use_interface_of(address: str) -> None:
    """Have gloo's groups of this process, and of its children, connect by the network interface that has this node's
    address, unless GLOO_SOCKET_IFNAME says by which.

    gloo takes the address of the machine's name: often 127.0.1.1, which no other node reaches. On a loopback address it
    is the other way around: the machine's name may have one that others reach.
    """
    import psutil  # Ray's own copy, which can be imported once Ray is

    is_it = is_loopback if is_loopback(address) else address.__eq__
    for name, addresses in psutil.net_if_addrs().items():
        if any(is_it(each.address) for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def on_node(what: Any, node: str, **options: Any) -> Any:
    """A remote function or class that runs on this node (an id), however busy the node is."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(**{"num_cpus": 0, "scheduling_strategy": strategy, **options})(what)
