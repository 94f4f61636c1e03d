"""Ray's autoscaler, where the cluster has one: what it may start, and what it is doing.

Ray has no public interface for either. What the autoscaler may start is in the file that its process on the head was
given, and only on some platforms in the cluster's own state; what it is doing, its two versions tell in two ways. All
private interfaces that dray uses for this are in this file. Without them an experiment still waits for nodes as its
config says, but says less about it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.experimental.internal_kv import _internal_kv_get

from dray.cluster.nodes import nodes

logger = logging.getLogger("dray")

HEAD = "node:__internal_head__"
"""A resource of the head alone."""
LOOK_S = 60.0
"""How long a look at the head may take: a process may have to start there."""
JOIN_S = 60.0
"""How long machines that already exist may take to join: some ten seconds after `ray up` has started the head."""
FAR = 10_000
"""The number of nodes for a kind without a limit."""
_WITHOUT_A_FILE = "none"
_IN_ITS_LOG = "see monitor.log in Ray's logs on the head"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A kind of machine that the autoscaler may start."""

    resources: Mapping[str, float]
    """Of one machine."""
    most: int
    """How many machines of this kind there may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an autoscaler may start.

    Attributes:
        types: the kinds of machines; None if unknown.
        most: how many machines there may be in all, besides the head.
    """

    types: tuple[NodeType, ...] | None
    most: int = FAR

    def nodes(self) -> list[Mapping[str, float]]:
        """The resources of each machine, with as many of each kind as it allows; `most` does not limit their sum."""
        return [kind.resources for kind in self.types or () for _ in range(min(kind.most, self.most))]


def limits() -> Limits | None:
    """What the autoscaler of the cluster that we are connected to may start; None if it has none, or starts nothing.

    Nothing is started where the machines exist already (Ray's ``local`` provider): all of them join, and a machine's
    resources are known once it has. This waits for those that have not joined yet.
    """
    if (told := _told_to_the_cluster()) is not None:
        return told
    file = _file_of_the_autoscaler()
    if file == _WITHOUT_A_FILE:  # the autoscaler only watches
        return None
    if file is not None:
        provider = yaml.safe_load(file).get("provider", {})
        if "worker_ips" not in provider:
            return limits_of(file)
        _wait_for(1 + len(provider["worker_ips"]))
        return None
    # On Kubernetes the autoscaler is in a container of its own.
    return Limits(types=None) if _states() else None


def _wait_for(machines: int) -> None:
    deadline = time.monotonic() + JOIN_S
    while (there := len(nodes())) < machines:
        if time.monotonic() > deadline:
            logger.warning(
                "only %d of %d machines have joined the Ray cluster; not waiting for the others", there, machines
            )
            return
        time.sleep(0.25)


def limits_of(file: str) -> Limits:
    """What the autoscaler may start, according to its file on the head (YAML or JSON)."""
    config = yaml.safe_load(file)
    most, head = int(config.get("max_workers", 0)), config.get("head_node_type")
    kinds = config.get("available_node_types") or {}
    return Limits(
        # Ray's own defaults.
        types=tuple(
            NodeType(
                resources=kind.get("resources") or {}, most=int(kind.get("max_workers", 0 if name == head else most))
            )
            for name, kind in kinds.items()
        ),
        most=most,
    )


def _told_to_the_cluster() -> Limits | None:
    config = ray._private.state.state.get_cluster_config()
    if config is None or not config.node_group_configs:
        return None
    kinds = [(dict(group.resources), group.max_count) for group in config.node_group_configs]
    return Limits(types=tuple(NodeType(resources=each, most=FAR if n < 0 else n) for each, n in kinds))


def _file_of_the_autoscaler() -> str | None:
    """The text of its file; `_WITHOUT_A_FILE` if it has none; None if no autoscaler runs on the head."""
    port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    here = ray.get_runtime_context().get_node_id()
    if any(node.id == here and HEAD in node.resources for node in nodes()):
        return _look(port)
    look = ray.remote(num_cpus=0, resources={HEAD: 0.0001})(_look)
    try:
        found: str | None = ray.get(look.remote(port), timeout=LOOK_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.info("can't read the autoscaler's file on the head node: %s", error)
        return None
    return found


def _look(port: str) -> str | None:
    """As above, on the head itself: search its processes for the autoscaler of the cluster at this port."""
    if not Path("/proc").is_dir():  # not a cloud machine
        return _WITHOUT_A_FILE
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
            return _WITHOUT_A_FILE
        try:
            return Path(os.path.expanduser(file)).read_text()
        except OSError:  # the file is another user's
            return None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What the autoscaler does about the demand.

    Attributes:
        starting: how many machines were requested from the cloud and are not up yet, by the name of their kind.
        failed: the kinds that it could not get lately, and why.
    """

    starting: Mapping[str, int]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        """As a sentence."""
        could_not = "; ".join(f"it could not start {kind}: {why}" for kind, why in sorted(self.failed.items()))
        return f"the autoscaler is starting {self._starts() or 'none'}" + (f"; {could_not}" if could_not else "")

    def short(self) -> str:
        """In few words. The kinds that it could not get are not shown as starting too, although it keeps trying."""
        starts, failed = self._starts(leave_out=self.failed), ", ".join(sorted(self.failed))
        return ", ".join(filter(None, [starts and f"{starts} starting", failed and f"{failed} not available"]))

    def _starts(self, leave_out: Container[str] = ()) -> str:
        return ", ".join(f"{n} {kind}" for kind, n in sorted(self.starting.items()) if kind not in leave_out)


def doing() -> Doing:
    """What the autoscaler is doing now; nothing if there is none."""
    told = _of_the_second()
    if told is None:
        report = (_of_the_first() or {}).get("autoscaler_report") or {}
        return _by_the_first(report)
    return told


def _states() -> bool:
    """Whether an autoscaler, of either version, has left its state in the cluster."""
    return _of_the_second() is not None or _of_the_first() is not None


def _of_the_first() -> dict[str, Any] | None:
    status = _internal_kv_get("__autoscaling_status")
    return None if not status else dict(json.loads(status))


def _by_the_first(report: Mapping[str, Any]) -> Doing:
    starting = Counter(report.get("pending_launches") or {})
    starting.update(kind for *_, kind, _ in report.get("pending_nodes") or [])
    known = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    whys = {kind: each["unavailable_node_information"] for kind, each in known.items() if not each["is_available"]}
    return Doing(
        starting=dict(starting),
        failed={kind: _in_one_line(why["category"], why["description"]) for kind, why in whys.items() if why},
    )


def _of_the_second() -> Doing | None:
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    if not int(status.stats.autoscaler_version or 0):
        return None
    return _by_the_second(status.pending_launches, status.pending_nodes, status.failed_launches)


def _by_the_second(launches: Sequence[Any], nodes: Sequence[Any], failed: Sequence[Any]) -> Doing:
    starting: Counter[str] = Counter()
    for launch in launches:
        starting[launch.ray_node_type_name] += launch.count
    starting.update(node.ray_node_type_name for node in nodes)
    # All failures are kept: only the latest of each kind counts.
    latest: dict[str, Any] = {}
    for launch in sorted(failed, key=lambda each: each.failed_ts_s or 0):
        latest[launch.ray_node_type_name] = launch
    return Doing(
        starting=dict(starting),
        failed={kind: _reason(launch.details) for kind, launch in latest.items()},
    )


def _reason(details: str | None) -> str:
    told = _in_one_line(details)
    # This version passes on that a launch failed, but mostly not what the cloud said.
    return told if told and not told.endswith(":") else _IN_ITS_LOG


def _in_one_line(*told: str | None) -> str:
    return " ".join(" ".join(part.split()) for part in told if part)[:300]
