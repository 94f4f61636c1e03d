"""The worker groups of a server, as an experiment that borrows them sees them."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray

from dray.cluster.connection import Cluster
from dray.desk import messages
from dray.desk.messages import Message
from dray.errors import DeskLost

DESK = "dray-desk"
"""The name of a server's desk, in its namespace."""
DESK_S = 60.0
"""How long a server may take to replace a desk that has died."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupServer:
    """A server that lends its groups, as those that borrow them know it.

    Attributes:
        address: of its Ray cluster.
        namespace: of its desk, on the cluster.
        local: its cluster is this machine.
    """

    address: str
    namespace: str
    local: bool

    def cluster(self) -> Cluster:
        """The connection to its cluster, which this process has already."""
        return Cluster(own=False, local=self.local, description=f"the worker groups of the server at {self.address}")

    def desk(self) -> Any:
        """The handle of its desk; after the desk has died, that of the next one.

        Raises:
            DeskLost: there has been none for a minute.
        """
        deadline = time.monotonic() + DESK_S
        while True:
            try:
                desk = ray.get_actor(DESK, namespace=self.namespace)
                ray.get(desk.demands.remote({}))
                return desk
            except (ValueError, ray.exceptions.RayActorError):  # one that has died keeps its name until it is replaced
                if time.monotonic() > deadline:
                    raise DeskLost(f"the server on the Ray cluster at {self.address} has no desk") from None
                time.sleep(POLL_S)


class LentGroups:
    """In place of `dray.groups.pool.Groups`: the server starts and ends the groups.

    Attributes:
        error: None: whatever happens to groups, the experiment can continue.
    """

    def __init__(self) -> None:
        self.error = None
        self._groups: dict[int, str] = {}  # by trial

    @property
    def count(self) -> int:
        """The number of groups that train its trials."""
        return len(self._groups)

    ready_count = count

    def on(self, message: Message) -> None:
        """The desk has sent this message."""
        match message:
            case messages.LeaseGranted():
                self._groups[message.trial] = message.group
            case messages.TrialLeft():
                self._groups.pop(message.trial, None)

    def start(self) -> None:
        """The server does."""

    reconcile = start

    def nodes_drain(self, nodes: Collection[str]) -> None:
        """The server watches the nodes."""

    def end(self, *, at_once: bool) -> None:
        """The server does, when no experiment needs them."""
