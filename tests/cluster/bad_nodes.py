"""What test_bad_nodes.py runs in namespaces of its own: `python bad_nodes.py <directory>`.

A head without CPUs, where the driver is, and nodes with addresses of their own, which see another file system, import
other modules, or have another environment than the head. What a check or an experiment said of them is written to
<directory>/seen.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import dray
from dray.errors import ConfigError, ExperimentError
from dray.leases.messages import Message, WorkerArrived
from tests.ray.harness import TRIALS, lines, recorded, wait_for
from tests.storage.s3 import LocalS3

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def node(
    head: str, address: str, *, prepare: str = "true", options: str = "", **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A node of a cluster, in a mount namespace of its own.

    Args:
        head: the cluster's address.
        address: the node's own, as 127.0.0.2.
        prepare: a command that runs before, there.
        options: more of them for `ray start`.
    """
    ray_start = f"ray start --address={head} --node-ip-address={address} --num-cpus=1 {options} --block"
    with (Path(os.environ["HOME"]) / f"{address}.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", f"{prepare} && exec {ray_start}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        wait_for(lambda: is_alive(address), f"node {address}")
        yield process
    finally:
        process.terminate()
        process.wait()
        wait_for(lambda: not is_alive(address), f"the end of node {address}")


def is_alive(address: str) -> bool:
    return any(each["Alive"] and each["NodeManagerAddress"] == address for each in ray.nodes())


def with_torch(directory: Path, version: str) -> str:
    """An import path with another torch: all of it that is looked at before it is used."""
    place = directory / "other-torch"
    (place / "torch").mkdir(parents=True)
    (place / "torch" / "__init__.py").write_text("raise ImportError('this torch is not for this machine')")
    (place / "torch" / "version.py").write_text("cuda = None\n")
    (place / f"torch-{version}.dist-info").mkdir()
    (place / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    return os.pathsep.join([str(place), os.environ["PYTHONPATH"]])


def checked(directory: Path, head: str) -> dict[str, Any]:
    """`dray cluster check` of nodes with another torch, with GPUs that do not exist, without keys and results."""
    storage = directory / "results"
    storage.mkdir()
    s3 = LocalS3()

    def check(*arguments: str, **environment: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "dray.cli", "cluster", "check", "--address", head, "--json", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        return {"code": ran.returncode, "out": ran.stdout}

    with (
        node(head, "127.0.0.2", PYTHONPATH=with_torch(directory, "1.13.1")),
        node(head, "127.0.0.3", options="--num-gpus=2"),
        node(head, "127.0.0.4", prepare=f"mount -t tmpfs -o size=8m none {storage}", **NO_KEYS),
    ):
        s3.demand_keys(False)
        said: dict[str, Any] = {
            "directory": check("--storage", str(storage)),
            "store": check("--storage", s3.uri("results")),
            "unasked": check(DRAY_HOME=str(storage)),
        }
    said["left"] = list(s3.files("results"))
    s3.stop()
    return said


def trained(directory: Path, *, trials: int) -> dict[str, Any]:
    """An experiment, on the nodes that are there."""
    arrived: list[Message] = []
    kind, error = "none", ""
    config = recorded(directory / "record", trials=trials, batches=10)
    try:
        dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run(
            on_message=lambda message: arrived.append(message) if isinstance(message, WorkerArrived) else None
        )
    except (ConfigError, ExperimentError) as raised:
        kind, error = type(raised).__name__, str(raised)
    return {"kind": kind, "error": error, "trained": len(lines(directory / "record")), "groups": len(arrived)}


def not_shared(place: Path, head: str) -> dict[str, Any]:
    """One node of three has a directory of its own where the experiment is; another one may not write there."""
    read_only = f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"
    with (
        node(head, "127.0.0.5"),
        node(head, "127.0.0.6", prepare=f"mount -t tmpfs none {place}"),
        node(head, "127.0.0.7", prepare=read_only),
    ):
        return trained(place, trials=2)


def later(place: Path, head: str) -> dict[str, Any]:
    """A node comes while trials train; it does not see the experiment."""
    over = threading.Event()

    def come() -> None:
        wait_for(lambda: lines(place / "record"), "a batch")
        with node(head, "127.0.0.9", prepare=f"mount -t tmpfs none {place}"):
            over.wait()

    with node(head, "127.0.0.8"):
        another = threading.Thread(target=come)
        another.start()
        try:
            return trained(place, trials=1000)  # more than it comes to the end of
        finally:
            over.set()
            another.join()


def main(directory: Path) -> None:
    os.environ.update(KEYS)  # all nodes have them, but for one
    # Ray puts the driver's on the path of all workers, before what was sent to them.
    os.chdir(directory)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    seen: dict[str, Any] = {}
    try:
        ray.init(cluster.address, log_to_driver=False)
        for case in (checked, not_shared, later):
            (place := directory / case.__name__).mkdir()
            seen[case.__name__] = case(place, cluster.address)
        (directory / "seen.json").write_text(json.dumps(seen, indent=1))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
