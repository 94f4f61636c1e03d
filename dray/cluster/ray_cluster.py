"""The Ray cluster that an experiment runs on: found or started on purpose, and how many slots it offers.

The uses of Ray's internal APIs that this needs are in this file: the autoscaler's limits, the upload of model code,
and a start without processes of no use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

logger = logging.getLogger("dray")

TRAIN_ENVIRONMENT = {
    # A dead worker is noticed after this long; the controller's poll costs a millisecond.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",
    # A group may wait for a cloud machine to boot; Train's own limit of 60 s would count as a failure.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1800",
}

KNOCK_S = 5.0
"""How long a cluster may take to take a call."""

NO_PREEMPTION = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""This machine is not taken away in the middle; watching for it costs a process for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A connection to Ray.

    Attributes:
        own: dray started this cluster, on this machine, for this experiment alone.
        told: which one it is, for a person.
    """

    own: bool
    told: str

    def close(self) -> None:
        """End what was started here; a cluster that was found stays as it is, and so does a connection."""
        if self.own:
            ray.shutdown()


def connect(address: str | None) -> Cluster:
    """Connect to Ray.

    In this order: the connection that this process has; ``address``; the environment's ``RAY_ADDRESS``; a new cluster
    on this machine. Never the cluster that Ray's address file happens to name, which may have died long ago.

    Raises:
        ConnectionError: there is no cluster at the address.
    """
    if ray.is_initialized():
        os.environ.update(_missing(TRAIN_ENVIRONMENT))
        return Cluster(
            own=False, told=f"the Ray cluster at {ray.get_runtime_context().gcs_address}, already connected to"
        )
    address = address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        join(address)
        # Ray Train hands the driver's on to the processes of a run.
        os.environ.update(_missing(TRAIN_ENVIRONMENT))
        return Cluster(own=False, told=f"the Ray cluster at {address}")
    # Inherited by every process of the cluster: as a runtime environment they would keep Ray from using the processes
    # that it has ready. No dashboard on a cluster that this experiment has for itself: who wants one starts Ray first.
    with _environment({**TRAIN_ENVIRONMENT, **NO_PREEMPTION}), _processes_of_no_use_left_out():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    return Cluster(own=True, told=f"a Ray cluster of its own on this machine, {_count(ray.cluster_resources())}")


def join(address: str) -> None:
    """Connect to the cluster at an address.

    Raises:
        ConnectionError: there is none.
    """
    try:
        # Where nobody is, Ray tries for minutes, and then ends the process.
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit() and "://" not in address:
            socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())
        hint = "look at the address (RAY_ADDRESS), and at RAY_AUTH_MODE if it wants a token"
        raise ConnectionError(f"no Ray cluster answers at {address}: {told}; {hint}") from None


def slots_of(resources: dict[str, float], kind: str, cpus_per_slot: float) -> int:
    """How many slots there are in these resources."""
    return int(resources.get("GPU", 0)) if kind == "gpu" else int(resources.get("CPU", 0) // cpus_per_slot)


def slot_kind(asked: str | None) -> str:
    """What a slot is, "gpu" or "cpu": as the config says, else GPUs where the cluster has or can have any."""
    return asked or ("gpu" if _most_resources().get("GPU", 0) > 0 else "cpu")


def most_slots(kind: str, cpus_per_slot: float) -> int:
    """How many slots the cluster has or can grow to."""
    return slots_of(_most_resources(), kind, cpus_per_slot)


def slots_now(kind: str, cpus_per_slot: float) -> int:
    """How many slots the cluster has now."""
    return slots_of(ray.cluster_resources(), kind, cpus_per_slot)


def _most_resources() -> dict[str, float]:
    now = ray.cluster_resources()
    # Known only where an autoscaler has told its limits; there is no public way to ask.
    limits: dict[str, Any] = ray._private.state.state.get_max_resources_from_cluster_config() or {}
    return {name: max(float(limits.get(name, 0)), now.get(name, 0)) for name in {"CPU", "GPU"}}


def upload(directory: Path) -> str:
    """Put a directory into the cluster's own store; the URI goes into a runtime environment.

    ``ray.init(runtime_env=...)`` does the same, but only for whoever connects first, and for every process of the job.
    """
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    environment = upload_working_dir_if_needed(
        {"working_dir": str(directory)}, include_gitignore=False, scratch_dir=str(directory.parent), logger=logger
    )
    return str(environment["working_dir"])


@contextlib.contextmanager
def _processes_of_no_use_left_out() -> Iterator[None]:
    """Ray started meanwhile has no autoscaler, no log monitor and no dashboard process.

    On a machine of our own they have nothing to do (the dashboard's, without a dashboard, counts usage), and cost a
    second of CPU each. Ray's start waits for the last one, and its end for the first, a second each. There is no public
    way to leave them out.
    """
    from ray._private import node, parameter

    def start_api_server(self: Any, **_: Any) -> None:
        self._webui_url = ""

    parameters, server = parameter.RayParams, node.Node.start_api_server
    parameter.RayParams = functools.partial(parameters, no_monitor=True, include_log_monitor=False)
    node.Node.start_api_server = start_api_server
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server = parameters, server


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    added = _missing(variables)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _missing(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}


def _count(resources: dict[str, float]) -> str:
    gpus = f", {int(resources['GPU'])} GPUs" if resources.get("GPU") else ""
    return f"{int(resources.get('CPU', 0))} CPUs{gpus}"
