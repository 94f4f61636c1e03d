"""The Ray cluster that an experiment runs on: joined or started on purpose, and how many slots it offers.

Starting Ray without needless processes takes internal APIs of Ray, which are used in this file alone. What an
autoscaler may start is in ``dray.cluster.autoscaler``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from dray.cluster.autoscaler import HEAD, Limits
from dray.cluster.nodes import nodes

KNOCK_S = 5.0
"""How long a cluster may take to accept a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A connection to Ray.

    Attributes:
        own: dray started this cluster on this machine, for this experiment alone.
        told: which one it is, as text.
    """

    own: bool
    told: str

    def close(self) -> None:
        """Shut down a cluster that was started here; one that was joined, and the connection to it, stay."""
        if self.own:
            ray.shutdown()


def connect(address: str | None) -> Cluster:
    """Connect to Ray.

    In this order: a connection that this process already has; ``address``; ``RAY_ADDRESS`` in the environment; a new
    cluster on this machine. Never the cluster that Ray's address file happens to name, which may have died long ago.

    Raises:
        ConnectionError: there is no cluster at the address, or a new one does not start.
    """
    if ray.is_initialized():
        return Cluster(
            own=False, told=f"the Ray cluster at {ray.get_runtime_context().gcs_address} (already connected)"
        )
    address = address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        join(address)
        return Cluster(own=False, told=f"the Ray cluster at {address}")
    try:
        _start()
    except Exception:
        # Ray's node gives up after 15 s, in which it has to import much: the next time, it is in memory.
        try:
            _start()
        except Exception as error:
            told = " ".join(str(error).split())
            raise ConnectionError(
                f"Ray did not start on this machine, tried twice: {told} Its logs are in "
                "/tmp/ray/session_latest/logs; start Ray by yourself (ray start --head), and set RAY_ADDRESS"
            ) from error
    return Cluster(own=True, told=f"a new Ray cluster on this machine, {_count(ray.cluster_resources())}")


def _start() -> None:
    """Start a cluster on this machine, and connect to it."""
    # There is no dashboard: whoever wants one starts Ray first.
    with _only_processes_of_use(), _signals_left_alone():
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException:  # also Ctrl-C: no half of a cluster stays
            ray.shutdown()
            raise


def join(address: str) -> None:
    """Connect to the cluster at an address.

    Raises:
        ConnectionError: there is none, or it does not accept this process's token.
    """
    # Imported here: a cluster that dray starts does not need it.
    from dray.cluster.auth import refusal, refusal_here

    refused = ""
    try:
        # If nobody is there, Ray tries for minutes and then ends the process.
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit() and "://" not in address:
            socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
            refused = refusal(address)
        if not refused:
            with _signals_left_alone():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        refused = refusal_here() if address == "auto" else ""
        if not refused:
            told = " ".join(str(error).split())
            raise ConnectionError(
                f"no Ray cluster answers at {address}: {told}; check the address, or RAY_ADDRESS"
            ) from None
    if refused:
        raise ConnectionError(f"the Ray cluster at {address} refuses this process: {refused}")


def slots_of(resources: Mapping[str, float], kind: str, cpus_per_slot: float) -> int:
    """How many slots these resources of one node make."""
    slots = int(resources.get("CPU", 0) // cpus_per_slot)
    return min(slots, int(resources.get("GPU", 0))) if kind == "gpu" else slots


def slot_kind(asked: str | None, limits: Limits | None) -> str | None:
    """What a slot is, "gpu" or "cpu": as the config says, otherwise GPUs if the cluster has or can have any.

    None if that is unknown: there are no GPUs, and what the autoscaler may start is unknown.
    """
    kinds = [] if limits is None else limits.types or ()
    if asked or any(resources.get("GPU", 0) > 0 for resources in (*_has(), *(kind.resources for kind in kinds))):
        return asked or "gpu"
    return None if limits is not None and limits.types is None else "cpu"


def slots_now(kind: str, cpus_per_slot: float) -> list[int]:
    """How many slots each node has now."""
    return [slots_of(resources, kind, cpus_per_slot) for resources in _has()]


def most_slots(kind: str, cpus_per_slot: float, limits: Limits | None) -> list[int] | None:
    """How many slots each node would have if the cluster grew as far as it can; None if unknown."""
    now = slots_now(kind, cpus_per_slot)
    if limits is None:
        return now
    if limits.types is None:
        return None
    slots = sorted((slots_of(resources, kind, cpus_per_slot) for resources in limits.nodes()), reverse=True)
    most = [slots_of(resources, kind, cpus_per_slot) for resources in _has() if HEAD in resources]
    most += slots[: limits.most]
    # Machines may have been added by hand.
    return max(now, most, key=sum)


def groups_in(nodes: Sequence[int], slots: int, placement_strategy: str) -> int:
    """How many worker groups fit at the same time.

    Args:
        nodes: how many slots each node has.
        slots: of one group.
        placement_strategy: Ray's name of each group's strategy.
    """
    match placement_strategy:
        case "STRICT_PACK":
            return sum(node // slots for node in nodes)
        case "STRICT_SPREAD":
            # A node gives each of n groups at most one slot: n groups fit if that makes n * slots.
            most = sum(nodes) // slots
            return max(n for n in range(most + 1) if sum(min(node, n) for node in nodes) >= n * slots)
    return sum(nodes) // slots


def _has() -> list[Mapping[str, float]]:
    """The resources of each node."""
    return [node.resources for node in nodes()]


@contextlib.contextmanager
def _only_processes_of_use() -> Iterator[None]:
    """Ray that is started within the block has no autoscaler, no log monitor and no dashboard process, and its other
    processes each have their own session.

    On one machine these three do nothing (without a dashboard, its process only counts usage), and `ray.init()` has no
    option to leave them out. Ray's start waits for the dashboard's process, and its shutdown for the autoscaler: with
    them, a start and shutdown take about 3 s longer and 2 s more of CPU.

    A signal to the driver's process group (from `timeout`, or a terminal that is closed) must not end Ray before the
    trials have saved. The kernel still kills Ray's processes when the driver dies.
    """
    from ray._private import node, parameter, services

    def start_api_server(self: Any, **_: Any) -> None:
        self._webui_url = ""

    parameters, server, popen = parameter.RayParams, node.Node.start_api_server, services.ConsolePopen
    parameter.RayParams = functools.partial(parameters, no_monitor=True, include_log_monitor=False)
    node.Node.start_api_server = start_api_server
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_api_server, services.ConsolePopen = parameters, server, popen


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """``ray.init()`` in the block leaves the process its own handler of SIGTERM.

    Ray would replace it by one that ends Ray at once, and below Python by one that prints a trace of the stack.
    """
    from ray._private import utils

    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if threading.current_thread() is threading.main_thread() and (own := signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, own)


def _count(resources: dict[str, float]) -> str:
    gpus = f", {int(resources['GPU'])} GPUs" if resources.get("GPU") else ""
    return f"{int(resources.get('CPU', 0))} CPUs{gpus}"
