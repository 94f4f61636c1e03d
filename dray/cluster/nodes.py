"""The nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ray


class RayNode(NamedTuple):
    """What Ray knows about a node.

    Attributes:
        id: Ray's id; a node that comes back gets another.
        address: its network address.
        resources: total, used or not; empty once it is gone.
    """

    id: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]


def known_nodes() -> list[RayNode]:
    """All nodes, including those that are gone."""
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Alive"], node["Resources"]) for node in ray.nodes()
    ]


def nodes() -> list[RayNode]:
    """All nodes that are alive."""
    return [node for node in known_nodes() if node.is_alive]
