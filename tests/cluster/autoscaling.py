"""A cluster with Ray's own autoscaler whose nodes are processes of this machine. In private namespaces only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import AutoscalingCluster

OUT_OF = Path("/tmp/ray/out-of")
"""The names of the types of machines that there are none of, in these namespaces."""


class Nodes(AutoscalingCluster):  # type: ignore[misc]  # Ray's classes are untyped here
    """Ray's own, with the file that its wheel leaves out.

    Args:
        head: the resources of the head.
        types: of machines, by name, as in a cluster's file.
        max_workers: of all types together.
    """

    def __init__(self, head: dict[str, float], types: dict[str, Any], *, max_workers: int = 4) -> None:
        OUT_OF.touch()
        super().__init__(head, types, max_workers=max_workers, autoscaler_v2=True)

    def _generate_config(
        self, head_resources: dict[str, float], types: dict[str, Any], *, max_workers: int = 4, **_: Any
    ) -> dict[str, Any]:
        head = {"resources": dict(head_resources), "node_config": {}, "min_workers": 0, "max_workers": 0}
        lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
        commands = [
            f"{where}_{what}" for where in ("head", "worker") for what in ("setup_commands", "start_ray_commands")
        ]
        return {
            "cluster_name": "fake",
            "max_workers": max_workers,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",
                "module": "tests.cluster.no_capacity.NoCapacity",
                "launch_multiple": True,
                "head_node_id": FAKE_HEAD_NODE_ID,
                "out_of": str(OUT_OF),
            },
            "available_node_types": {**types, "ray.head.default": head},
            "head_node_type": "ray.head.default",
            "file_mounts_sync_continuously": False,
            **{name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")},
            **{name: [] for name in (*lists, *commands)},
        }


def nodes(resource: str = "CPU", node_type: str = "") -> int:
    """How many have some of it; of this type."""
    return sum(
        node["Alive"]
        and node["Resources"].get(resource, 0) > 0
        and node_type in ("", node["Labels"].get("ray.io/node-group"))
        for node in ray.nodes()
    )
