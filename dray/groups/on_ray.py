"""All that a driver or a server asks of Ray while it runs, in one object: a simulation gives them another."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import ray

from dray import private
from dray.cluster import autoscaler
from dray.cluster.connection import Cluster
from dray.cluster.internals import draining_nodes
from dray.cluster.nodes import nodes
from dray.cluster.view import AutoscalerLimits, ClusterView
from dray.cluster.watch import Watch
from dray.groups.group import WorkerGroup
from dray.groups.reservation import Reservation
from searchers.events import TrialResult
from searchers.ray_tune import TuneDriver


class OnRay:
    """The Ray cluster to which this process is connected. `group` and `reserve` make worker groups and reservations."""

    group = WorkerGroup
    reserve = Reservation

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def address(self) -> str:
        """The address at which other processes join the cluster."""
        address: str = ray.get_runtime_context().gcs_address
        return address

    def job(self) -> str:
        """A name of this process, unique on the cluster."""
        return str(ray.get_runtime_context().get_job_id())

    def host(self) -> str:
        """This machine's name for the cluster's other machines."""
        host: str = ray.util.get_node_ip_address()
        return host

    def limits(self) -> AutoscalerLimits | None:
        """What an autoscaler may start; None without one."""
        return None if self.cluster.own else autoscaler.limits()

    def look(self, limits: AutoscalerLimits | None, *, waiting: bool = False) -> ClusterView:
        """What the cluster looks like now; if groups are waiting, also free resources, and what the autoscaler is
        starting."""
        return ClusterView(
            nodes=tuple(nodes()),
            draining=frozenset(draining_nodes()),
            limits=limits,
            free=ray.available_resources() if waiting else None,
            activity=autoscaler.activity() if waiting and limits is not None else None,
            time=time.time(),
        )

    def watch(self, *, draining: Callable[[Collection[str]], None], silent: Callable[[], None]) -> Watch:
        """Watch its processes, and its nodes if they may be removed."""
        return Watch(self.cluster.addresses(), draining=None if self.cluster.own else draining, silent=silent)

    def tune(self, source: Callable[[], Callable[[int], Sequence[TrialResult] | None]], directory: Path) -> TuneDriver:
        """A Tune driver whose handle gets its results from `source`, and whose files are in this directory."""
        private.make_directory(directory)  # Tune writes the key of the connection to it
        # The handle imports dray as this process does only on this machine.
        path = None if self.cluster.local else str(Path(__file__).parents[2])
        return TuneDriver(source=source, directory=directory, path=path)
