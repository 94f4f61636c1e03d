"""The specifications of an experiment and of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dray.cluster.node_check import Needs
from dray.rpc.connection import Endpoint
from dray.worker.lease import SharedSettings

if TYPE_CHECKING:
    from dray.code.factory import FromDirectory, Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSpec:
    """The specification of an experiment, shared by all its trials with the same code.

    Attributes:
        run: name of this run of the experiment, unique on the cluster; also its name at the desk.
        load_trial: loads the trial class, or the program.
        code: the variant of the code that it loads; None: the experiment's own.
        needs: requirements of nodes; None if the driver has started the cluster on this machine.
    """

    run: str
    settings: SharedSettings
    load_trial: FromDirectory | Sent
    code: str | None = None
    log_format: str
    needs: Needs | None = None

    def check_node(self) -> None:
        """Raise `UnfitNode` if its trials can't run on this node."""
        if self.needs is not None:
            self.needs.check_this_node(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The specification of a worker, the same for all workers of a group.

    Attributes:
        owner: name at the desk of the client that started the group.
        group: unique among the owner's existing groups.
        start: number of the group's start, unique at the desk.
        shape: trials run on groups of their shape.
        environment: variables for its processes, the same for all experiments of this shape.
        experiment: the experiment whose code is loaded before the first lease; None if it serves any experiment.
        shared_by: number of one-worker groups that share a slot.
    """

    desk: Endpoint
    owner: str
    group: str
    start: int
    shape: str = ""
    environment: Mapping[str, str | None]
    deterministic: bool = False
    experiment: ExperimentSpec | None
    shared_by: int
