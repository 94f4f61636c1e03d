"""The nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dray.cluster.view import RayNode
from dray.private import is_loopback


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
