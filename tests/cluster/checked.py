"""What test_check.py runs in namespaces of its own: `python checked.py <directory>`.

`dray cluster check` on a cluster whose nodes have something wrong each; what it said is written to
<directory>/seen.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.cluster.bad_nodes import node, with_version
from tests.storage.s3 import LocalS3

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}


def dray_cluster_check(address: str, *arguments: str, **environment: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "dray.cli", "cluster", "check", "--address", address, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return {"code": ran.returncode, "out": ran.stdout, "err": ran.stderr}


def ill(directory: Path, address: str) -> dict[str, Any]:
    """A cluster of three nodes with faults: another torch; GPUs that do not exist; no keys, and another file system."""
    storage = directory / "results"
    storage.mkdir()
    s3 = LocalS3()
    path = os.pathsep.join([with_version(directory, "torch", "1.13.1"), os.environ["PYTHONPATH"]])
    with ExitStack() as nodes:
        nodes.enter_context(node(address, "127.0.0.2", PYTHONPATH=path))
        nodes.enter_context(node(address, "127.0.0.3", options="--num-gpus=2"))
        nodes.enter_context(node(address, "127.0.0.4", prepare=f"mount -t tmpfs -o size=8m none {storage}", **NO_KEYS))
        s3.demand_keys(False)
        said = {
            "directory": dray_cluster_check(address, "--storage", str(storage), "--json"),
            "store": dray_cluster_check(address, "--storage", s3.uri("results"), "--json"),
            "unasked": dray_cluster_check(address, "--json", DRAY_HOME=str(storage)),
        }
    said["left"] = list(s3.files("results"))
    s3.stop()
    return said


def main(directory: Path) -> None:
    # All nodes have them, but for one.
    os.environ.update(KEYS)
    # Ray puts the driver's on the path of all workers, before what was sent to them.
    os.chdir(directory)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        ray.init(cluster.address, log_to_driver=False)
        seen = ill(directory, cluster.address)
        (directory / "seen.json").write_text(json.dumps(seen, indent=1))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
