"""Ray's autoscaler, if the cluster has one: the machines that it may start, and those that it is starting.

This covers the second version of the autoscaler, Ray's default. Ray has no public interface for either. The config file
of the autoscaler's process on the head says what it may start; the cluster's state says what it is starting.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import yaml

from dray.cluster import internals
from dray.cluster.nodes import nodes
from dray.cluster.view import HEAD, Activity, AutoscalerLimits, NodeType
from dray.text import one_line

logger = logging.getLogger("dray")

READ_TIMEOUT_S = 60.0  # how long reading the file on the head may take: a process may have to start there
JOIN_S = 60.0
"""How long existing machines, or an autoscaler on Kubernetes, may take to join: usually about ten seconds."""
STATUS_TIMEOUT_S = 10  # how long the head may take to report what its autoscaler is doing
NO_FILE = "none"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # a variable that Kubernetes sets
_SEE_LOG = "see monitor.log in Ray's logs on the head"


def limits() -> AutoscalerLimits | None:
    """The machines that the connected cluster's autoscaler may start; None without an autoscaler, or if it starts none.

    The autoscaler starts none if the machines exist already (Ray's ``local`` provider): all of them join, and Ray knows
    a machine's resources once it has joined. This function waits for machines that have not joined yet.
    """
    file = config_file()
    if file == NO_FILE:  # the autoscaler only watches
        return None
    if file is not None:
        provider = yaml.safe_load(file).get("provider", {})
        if "worker_ips" not in provider:
            return limits_of(file)
        machines = 1 + len(provider["worker_ips"])
        if not _wait(lambda: len(nodes()) >= machines, JOIN_S):
            what = "only %d of %d machines have joined the Ray cluster; not waiting for the others"
            logger.warning(what, len(nodes()), machines)
        return None
    # On Kubernetes the autoscaler is in a separate container, which may be up later than the driver.
    found = _wait(has_state, JOIN_S if _IN_KUBERNETES in os.environ else 0.0)
    return AutoscalerLimits(types=None) if found else None


def _wait(condition: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.25)
    return holds


def limits_of(file: str) -> AutoscalerLimits:
    """The machines that the autoscaler may start, according to the text of its config file (YAML or JSON)."""
    config = yaml.safe_load(file)
    max_workers, head = int(config.get("max_workers", 0)), config.get("head_node_type")
    types = config.get("available_node_types") or {}
    return AutoscalerLimits(
        # The defaults are Ray's own.
        types=tuple(
            NodeType(
                name=name,
                resources=each.get("resources") or {},
                labels=each.get("labels") or {},
                max_count=int(each.get("max_workers", 0 if name == head else max_workers)),
            )
            for name, each in types.items()
        ),
        max_count=max_workers,
    )


def config_file() -> str | None:
    """The text of the autoscaler's config file, `NO_FILE` if it has none, or None if no autoscaler runs on the head."""
    port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    here = ray.get_runtime_context().get_node_id()
    if any(node.id == here and HEAD in node.resources for node in nodes()):
        return read_config_file(port)
    task = ray.remote(num_cpus=0, resources={HEAD: 0.0001})(read_config_file)
    try:
        found: str | None = ray.get(task.remote(port), timeout=READ_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.info("can't read the autoscaler's file on the head node: %s", error)
        return None
    return found


def read_config_file(port: str) -> str | None:
    """Like `config_file`, on the head itself: found by the command line of this cluster's autoscaler.

    Args:
        port: the cluster's.
    """
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        if not any(argument.endswith("/monitor.py") for argument in arguments[:4]):
            continue
        options = dict(
            argument.split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
        )
        if options.get("--gcs-address", "").rpartition(":")[2] != port:
            continue
        if (file := options.get("--autoscaling-config")) is None:
            return NO_FILE
        try:
            return Path(os.path.expanduser(file)).read_text()
        except OSError:  # the file is another user's
            return None
    return None


def activity() -> Activity:
    """The machines that the autoscaler is starting now; none if there is no autoscaler."""
    return _activity() or Activity(starting={}, failed={})


def has_state() -> bool:
    return _activity() is not None


def _activity() -> Activity | None:
    # Where Ray does not say it, there probably is an autoscaler on Kubernetes.
    found = Activity(starting={}, failed={}) if _IN_KUBERNETES in os.environ else None
    with internals.optional("experiments wait for nodes without knowing what the autoscaler starts"):
        status = internals.cluster_status(ray.get_runtime_context().gcs_address, STATUS_TIMEOUT_S)
        has_autoscaler = int(status.stats.autoscaler_version or 0) > 0
        now = activity_of(status.pending_launches, status.pending_nodes, status.failed_launches)
        found = now if has_autoscaler else None
    return found


def activity_of(launches: Sequence[Any], nodes: Sequence[Any], failed: Sequence[Any]) -> Activity:
    """The activity in Ray's lists of pending launches, pending nodes and failed launches."""
    starting: Counter[str] = Counter()
    for launch in launches:
        starting[launch.ray_node_type_name] += launch.count
    booting = Counter(node.ray_node_type_name for node in nodes)
    starting.update(booting)
    # Ray keeps all failures: only the latest of each type counts.
    latest: dict[str, Any] = {}
    for launch in sorted(failed, key=lambda each: each.failed_ts_s or 0):
        latest[launch.ray_node_type_name] = launch
    return Activity(
        starting=dict(starting),
        failed={name: _reason(launch.details) for name, launch in latest.items()},
        failed_at={name: float(launch.failed_ts_s or 0) for name, launch in latest.items()},
        booting=dict(booting),
    )


def _reason(details: str | None) -> str:
    reason = one_line(details or "")[:300]
    # Ray reports that a launch failed, but mostly not the cloud's reason.
    return reason if reason and not reason.endswith(":") else _SEE_LOG
