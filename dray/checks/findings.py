"""The findings of ``dray cluster check``, derived from facts about the nodes. ``checks.cluster`` asks the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dray.checks.inspector import Disk
from dray.cluster.node_check import REMEDIES, other_versions
from dray.text import counted

MAX_SKEW_S = 5.0
LOW_DISK_BYTES = 1 << 30
RAY_DISK_LIMIT = 0.95
"""Ray stores no objects on a disk of which more than this share is used (``RAY_local_fs_capacity_threshold``)."""


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """The facts about a node. A version is "" if the package is missing, or the version is unknown."""

    address: str
    host: str = ""
    gpus_of_ray: int = 0
    python: str = ""
    ray: str = ""
    torch: str = ""
    dray: str = ""
    cuda: str = ""
    nccl: str = ""
    gpus: list[str] = field(default_factory=list)  # the names of the GPUs that torch sees
    efa_devices: int = 0  # AWS's network devices
    nccl_plugin: bool = False  # for the network, which EFA needs
    nccl_environment: dict[str, str] = field(default_factory=dict)  # variables that NCCL or its plugin reads
    disks: list[Disk] = field(default_factory=list)  # the disks that Ray, trials and data loaders write to
    has_token: bool | None = None  # Ray requires one; None without Ray
    clock_s: float | None = None  # ahead of the driver's
    sends_bytes_s: float | None = None  # to the next node in the list

    @property
    def name(self) -> str:
        return f"{self.address} ({self.host})" if self.host else self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    node: str  # its name; "" for the cluster as a whole
    what: str
    is_wrong: bool  # trials would fail, or strangers could run code; False: only a note


@dataclass(slots=True, kw_only=True)
class ClusterCheck:
    address: str | None  # None: this machine alone
    storage: str
    nodes: list[Node]
    findings: list[Finding] = field(default_factory=list)
    reduces_bytes_s: float | None = None  # the "bus bandwidth" of an NCCL all-reduce over all free GPUs

    @property
    def is_fit(self) -> bool:
        return not any(finding.is_wrong for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_fit": self.is_fit}

    def add_error(self, node: str, what: str) -> None:
        self.findings.append(Finding(node=node, what=what, is_wrong=True))

    def add_note(self, node: str, what: str) -> None:
        self.findings.append(Finding(node=node, what=what, is_wrong=False))

    def take_facts(self, node: Node, facts: Mapping[str, Any], drivers_versions: Mapping[str, str]) -> None:
        """Record a node's facts, which `Inspector.facts` returns, and the errors that follow from them."""
        error, full = facts["error"], facts["full"]
        for name in facts.keys() - {"error", "full"}:
            setattr(node, name, facts[name])
        if (other := other_versions(drivers_versions, facts)) is not None:
            self.add_error(node.name, f"{other.what}; {REMEDIES['versions']}")
        if error:
            self.add_error(node.name, f"torch can't be imported: {error}")
        elif len(node.gpus) < node.gpus_of_ray:
            why = f"it is built for CUDA {node.cuda}" if node.cuda else "it is built without CUDA"
            self.add_error(
                node.name, f"Ray counts {counted(node.gpus_of_ray, 'GPU')}, torch sees {len(node.gpus)}; {why}"
            )
        elif node.gpus and not node.nccl:
            self.add_error(node.name, "torch is built without NCCL: trials can't have several GPUs")
        if node.efa_devices and node.gpus and not node.nccl_plugin:
            self.add_note(
                node.name,
                f"it has {counted(node.efa_devices, 'EFA device')}, but NCCL uses TCP: it finds no libnccl-net.so; add "
                "/opt/amazon/ofi-nccl/lib to LD_LIBRARY_PATH before Ray starts, or install it by AWS's EFA installer",
            )
        if full:
            self.add_error(node.name, f"{full}; {REMEDIES['full']}")
        for disk in node.disks:
            if disk.free < LOW_DISK_BYTES and not full:
                self.add_note(node.name, f"only {disk.free >> 20} MiB are free on {disk.path}")
            elif disk.path != "/dev/shm" and disk.free < (1 - RAY_DISK_LIMIT) * disk.size:
                used = f"{100 - 100 * disk.free / disk.size:.0f} %"
                self.add_note(node.name, f"{disk.path} is {used} full: Ray stores no objects there from 95 % on")

    def take_clock(self, node: Node, ahead: float) -> None:
        node.clock_s = ahead
        if abs(ahead) > MAX_SKEW_S:
            self.add_error(
                node.name,
                f"its clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}: the times of its metrics are "
                "wrong, and object stores refuse clocks that are minutes off; set it with chrony or systemd-timesyncd",
            )

    def compare_nodes(self) -> None:
        nccl = {node.nccl for node in self.nodes if node.gpus and node.nccl}
        if len(nccl) > 1:
            where = ", ".join(f"{node.nccl} on {node.name}" for node in self.nodes if node.gpus)
            what = f"nodes have different versions of NCCL: {where}; install the same build of torch on all"
            self.add_error("", what)
        if any(node.has_token is False for node in self.nodes):
            self.add_error(
                "",
                "Ray requires no token: whoever reaches its ports can run code there; before Ray starts, run `ray "
                "get-auth-token --generate`, copy its file to all nodes, and set RAY_AUTH_MODE=token",
            )
