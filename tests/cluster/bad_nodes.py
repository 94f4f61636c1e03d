"""What test_bad_nodes.py runs in namespaces of its own: `python bad_nodes.py <directory> <case>...`.

A head without CPUs, where the driver is, and nodes with addresses of their own, which see another file system, import
other modules, or have another environment than the head. In each case an experiment of two trials runs there; what was
told is written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import dray
from dray.desk.messages import Message, WorkerArrived, WorkerUnfit
from dray.errors import ConfigError, ExperimentError
from tests.cluster.namespaces import ROOT
from tests.ray.harness import TRIALS, lines, recorded, wait_for
from tests.storage.s3 import LocalS3

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
MANY = 1000
"""Trials that a search does not come to the end of."""


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


def with_version(directory: Path, package: str, version: str) -> str:
    """An import path with another version of a package: all of it that is looked at before it is used."""
    place = directory / f"other-{package}"
    match package:
        case "torch":
            (place / "torch").mkdir(parents=True)
            (place / "torch" / "__init__.py").write_text("raise ImportError('this torch is not for this machine')")
            (place / f"torch-{version}.dist-info").mkdir()
            (place / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        case "dray":
            for name in ("dray", "searchers"):
                shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
            (place / "dray" / "_version.py").write_text(f"__version__ = {version!r}\n")
    return str(place)


class Told:
    """What each case told."""

    def __init__(self, directory: Path, head: str) -> None:
        self.directory, self.head = directory, head
        self.seen: dict[str, dict[str, Any]] = {}

    def run(self, case: str, *, trials: int = 2, **fields: Any) -> None:
        """An experiment, on the nodes that are there."""
        directory = self.directory / case
        directory.mkdir(exist_ok=True)
        record = directory / "record"
        config = recorded(record, trials=trials, batches=10, **fields)
        arrived: list[float] = []
        first: dict[type[Message], float] = {}

        def hear(message: Message) -> None:
            if isinstance(message, WorkerArrived):
                arrived.append(message.time)
            first.setdefault(type(message), message.time)

        kind, error, began = "none", "", time.time()
        try:
            dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run(on_message=hear)
        except (ConfigError, ExperimentError) as raised:
            kind, error = type(raised).__name__, str(raised)
        self.seen[case] = {
            "kind": kind,
            "error": error,
            "trained": len(lines(record)),
            "groups": len(arrived),
            "seconds": time.time() - began,
            "broken_after_s": first[WorkerUnfit] - first[WorkerArrived] if WorkerUnfit in first else None,
        }

    def not_shared(self) -> None:
        """One node of three has a directory of its own where the experiment is; another one may not write there."""
        place = self.directory / "not_shared"
        place.mkdir()
        with ExitStack() as nodes:
            nodes.enter_context(node(self.head, "127.0.0.2"))
            nodes.enter_context(node(self.head, "127.0.0.3", prepare=f"mount -t tmpfs none {place}"))
            nodes.enter_context(
                node(
                    self.head, "127.0.0.4", prepare=f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"
                )
            )
            self.run("not_shared")

    def later(self) -> None:
        """A node comes while trials train; it does not see the experiment."""
        place = self.directory / "later"
        place.mkdir()
        over = threading.Event()

        def come() -> None:
            wait_for(lambda: lines(place / "record"), "a batch")
            with node(self.head, "127.0.0.8", prepare=f"mount -t tmpfs none {place}"):
                over.wait()

        with node(self.head, "127.0.0.7"):
            another = threading.Thread(target=come)
            another.start()
            try:
                self.run("later", trials=MANY)
            finally:
                over.set()
                another.join()

    def full(self) -> None:
        place = self.directory / "small"
        place.mkdir()
        mount = f"mount -t tmpfs -o size=8m none {place}"
        with node(self.head, "127.0.0.9", prepare=mount, TMPDIR=str(place)):
            self.run("full")

    def torch(self) -> None:
        self._other("torch", "1.13.1", "127.0.0.10")

    def dray(self) -> None:
        self._other("dray", "0.0.1", "127.0.0.12")

    def _other(self, package: str, version: str, address: str) -> None:
        path = os.pathsep.join([with_version(self.directory, package, version), os.environ["PYTHONPATH"]])
        with node(self.head, address, PYTHONPATH=path):
            self.run(package)

    def no_access(self) -> None:
        """The driver has the credentials of the object store, and a node has others."""
        s3 = LocalS3()
        s3.demand_keys(False)
        os.environ.update(KEYS)
        with node(
            self.head, "127.0.0.13", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_EC2_METADATA_DISABLED="true"
        ):
            self.run("no_access", checkpoint_storage=s3.uri("results"))
        s3.stop()


def main(directory: Path, cases: list[str]) -> None:
    # Ray puts the driver's on the path of all workers, before what was sent to them.
    os.chdir(directory)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        ray.init(cluster.address, log_to_driver=False)
        told = Told(directory, cluster.address)
        for case in cases:
            getattr(told, case)()
            (directory / "seen.json").write_text(json.dumps(told.seen, indent=1))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
