"""A borrowing experiment's side of a server's worker groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dray.groups.lender import GroupKind
from dray.leases import messages
from dray.leases.messages import Message
from dray.rpc.calls import Call
from dray.rpc.connection import Connection, ConnectionLost, Endpoint

if TYPE_CHECKING:
    from dray.cluster.connection import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupServer:
    """The address of a server's Ray cluster, and the endpoint of its desk, for the experiments that borrow its groups.
    `local`: the cluster is this machine."""

    address: str
    endpoint: Endpoint
    local: bool

    def cluster(self) -> Cluster:
        """The cluster, to which this process is connected already."""
        from dray.cluster.connection import Cluster  # imports Ray

        return Cluster(own=False, local=self.local, description=f"the Ray cluster of the server at {self.address}")


class BorrowedGroups:
    """Replaces a `dray.groups.lender.Lender` in an experiment on a server, which starts and ends the groups.

    Args:
        client: the name of this run.
        endpoint: the endpoint for its trials' reports.
        share: see `dray.groups.lender.Lender.add`.
        hear: called with each message of the server's desk, in any thread.
    """

    def __init__(
        self,
        server: GroupServer,
        client: str,
        kind: GroupKind,
        endpoint: Endpoint,
        share: Mapping[str, Any],
        hear: Callable[[Message], None],
    ) -> None:
        self._client, self._leases = client, set[int]()
        self._hear = hear
        self._desk = Connection(server.endpoint, on_push=self._heard)
        self._desk.add(client, kind, endpoint, dict(share)).result()

    def _heard(self, message: Message) -> None:
        match message:
            case messages.LeaseGranted(lease=lease):
                self._leases.add(lease)
            case messages.GroupFreed(lease=lease) | messages.LeaseOver(lease=lease):
                self._leases.discard(lease)
        self._hear(message)

    @property
    def count(self) -> int:
        """The number of groups that are training this run's trials."""
        return len(self._leases)

    ready_count = count

    def send(self, method: str, *args: Any) -> None:
        """Call a method of the desk."""
        self._desk.tell(method, *args)

    def take(self, call: Call) -> None:
        """Reject the call: workers call the server's desk."""
        call.fail("the groups are a server's")

    def step(self) -> None:
        """Check the connection; the server decides on the number of groups.

        Raises:
            ConnectionLost: the server has forgotten this client: the experiment needs another process.
        """
        if self._desk.is_lost:
            raise ConnectionLost("lost the connection to the server")

    def nodes_drain(self, nodes: Iterable[str]) -> None:
        """No-op: the server watches the nodes."""

    def end(self) -> None:
        """Let the server forget this client once its trials have left."""
        self._desk.tell("remove", self._client)
        self._desk.close()
