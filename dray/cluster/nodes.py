"""The nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ray


class RayNode(NamedTuple):
    """What Ray knows of a node.

    Attributes:
        id: Ray's, of this life of the node.
        address: of the network.
        resources: what it has, whoever uses it; nothing once it is gone.
    """

    id: str
    address: str
    is_alive: bool
    resources: Mapping[str, float]


def known_nodes() -> list[RayNode]:
    """All that there are, and that there were."""
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Alive"], node["Resources"]) for node in ray.nodes()
    ]


def nodes() -> list[RayNode]:
    """All that there are."""
    return [node for node in known_nodes() if node.is_alive]
