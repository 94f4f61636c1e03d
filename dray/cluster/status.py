"""What a Ray cluster has, for a person who asks."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

TIMEOUT_S = 5.0
"""How long a cluster that does not answer is waited for."""


def status(address: str | None) -> dict[str, Any]:
    """The nodes of a cluster, and what of them is free.

    Args:
        address: of the cluster; by default that of ``RAY_ADDRESS``, as for an experiment.

    Returns:
        ``address``, None where no cluster is named: an experiment starts one of its own on this machine then.
        ``nodes``: of each ``address``, ``is_alive``, ``cpus``, ``gpus``, ``memory`` (bytes). ``cpus``, ``gpus``: of all
        that are alive. ``cpus_free``, ``gpus_free``: of these, what nobody has.

    Raises:
        ConnectionError: there is no cluster at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        return {
            "address": None,
            "nodes": [],
            "cpus": os.cpu_count(),
            "gpus": None,
            "cpus_free": None,
            "gpus_free": None,
        }
    # Here, not above: without a named cluster nothing of it is needed, and it takes a second.
    import ray

    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())
        hint = "look at the address, and at RAY_AUTH_MODE if it wants a token"
        raise ConnectionError(f"no Ray cluster answers at {address}: {told}; {hint}") from None
    try:
        nodes = [
            {
                "address": node["NodeManagerAddress"],
                "is_alive": bool(node["Alive"]),
                **_counts(node["Resources"]),
                "memory": int(node["Resources"].get("memory", 0)),
            }
            for node in ray.nodes()
        ]
        free = _counts(ray.available_resources())
        return {
            "address": ray.get_runtime_context().gcs_address,
            "nodes": nodes,
            **_counts(ray.cluster_resources()),
            "cpus_free": free["cpus"],
            "gpus_free": free["gpus"],
        }
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """See whether anybody is there: Ray itself tries for minutes, and then ends the process.

    Raises:
        OSError: nobody is.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()


def _counts(resources: dict[str, float]) -> dict[str, int]:
    return {"cpus": int(resources.get("CPU", 0)), "gpus": int(resources.get("GPU", 0))}
