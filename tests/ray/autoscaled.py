"""What test_autoscaler.py runs in namespaces of its own: `python autoscaled.py <directory>`.

A head without CPUs, and Ray's autoscaler with nodes of one CPU each, one of them there from the beginning, which this
machine pretends to be. An elastic trial runs there; what it saw is written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import AutoscalingCluster

import dray
from tests.ray.harness import TRIALS, Meanwhile, lines, wait_for
from tests.ray.test_elastic import config

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class Nodes(AutoscalingCluster):  # type: ignore[misc]  # Ray's classes are untyped here
    """Ray's own, with the file that its wheel leaves out."""

    def _generate_config(self, head_resources: dict[str, float], types: dict[str, Any], **_: Any) -> dict[str, Any]:
        head = {"resources": dict(head_resources), "node_config": {}, "min_workers": 0, "max_workers": 0}
        lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
        commands = [
            f"{where}_{what}" for where in ("head", "worker") for what in ("setup_commands", "start_ray_commands")
        ]
        return {
            "cluster_name": "fake",
            "max_workers": 4,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "launch_multiple": True,
                "head_node_id": FAKE_HEAD_NODE_ID,
            },
            "available_node_types": {**types, "ray.head.default": head},
            "head_node_type": "ray.head.default",
            "file_mounts_sync_continuously": False,
            **{name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")},
            **{name: [] for name in (*lists, *commands)},
        }


def nodes() -> int:
    """With a CPU."""
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())


def main(directory: Path) -> None:
    record = directory / "record"
    worker = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 1, "max_workers": 2}
    cluster = Nodes({"CPU": 0}, {"worker": worker}, autoscaler_v2=True)
    cluster.start()
    try:
        ray.init("auto", log_to_driver=False)
        wait_for(lambda: nodes() == 1, "the first node")
        seen: dict[str, Any] = {}

        def look() -> None:
            started = time.monotonic()
            wait_for(lambda: nodes() == 2, "another node", 180)
            seen["node_after_s"] = time.monotonic() - started
            wait_for(lambda: [line for line in lines(record) if line["size"] == 2], "a batch of two workers", 180)
            (directory / "enough").touch()

        with Meanwhile(look):
            result = dray.Experiment(
                config(directory, pause_s=0.1), model_dir=TRIALS, path=directory / "experiment"
            ).run()
        seen["trials"] = result.trials[["state", "restarts"]].values.tolist()
        wait_for(lambda: nodes() == 1, "one node to be given back", 60)
        seen["nodes"] = nodes()
        (directory / "seen.json").write_text(json.dumps(seen))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
