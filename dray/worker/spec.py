"""What a worker is started with, and what the trials of one experiment share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from dray.cluster.checks.node import Needs, name_of_this_node
from dray.desk.connection import DeskConnection, DeskUnreachable
from dray.worker.lease import SharedSettings

if TYPE_CHECKING:
    from dray.code.factory import ByValue, FromDirectory, Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSpec:
    """What all trials of an experiment run with.

    Attributes:
        run: name of this run of the experiment, unique on the cluster; also its name at the desk.
        settings: of all its trials.
        load_trial: loads the trial's class, or the program.
        log_format: of the log lines of trials.
        needs: what nodes must have; None if the driver has started the cluster on this machine.
    """

    run: str
    settings: SharedSettings
    load_trial: FromDirectory | ByValue | Sent
    log_format: str
    needs: Needs | None = None

    def check_node(self) -> None:
        """Check that its trials can run on this node.

        Raises:
            UnfitNode: they can't.
        """
        if self.needs is not None:
            self.needs.check_this_node(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The same for all workers of a group.

    Attributes:
        desk: the desk's actor handle.
        owner: name of the driver that started the group, at the desk.
        group: name of the group, unique among the owner's groups that exist.
        start: number of the group's start, unique among the owner's.
        shape: of the group: trials run on groups of their shape.
        environment: variables for its processes, the same for all experiments of this shape.
        deterministic: whether PyTorch is to use deterministic algorithms.
        experiment: whose code is loaded before the first lease; None if it may get trials of any experiment.
        shared_by: how many groups of one worker share a slot.
    """

    desk: Any
    owner: str
    group: str
    start: int
    shape: str = ""
    environment: Mapping[str, str | None]
    deterministic: bool = False
    experiment: ExperimentSpec | None
    shared_by: int

    def connect(self) -> DeskConnection:
        """Connect to the desk.

        Raises:
            DeskUnreachable: this node can't; the message names it.
        """
        try:
            return DeskConnection(ray.get(self.desk.endpoint.remote()))
        except DeskUnreachable as error:
            raise DeskUnreachable(f"node {name_of_this_node()} {error}") from None

    def give_up(self, error: Exception, run: str | None = None) -> None:
        """Report an error that any process in this one's place would have too; wait until the driver ends the run.

        Args:
            run: of an experiment whose code can't be loaded; None: the owner's.
        """
        # Without its causes: the desk may not be able to import their classes.
        error.__cause__ = error.__context__ = None
        ray.get(self.desk.broken.remote(run or self.owner, self.group, error.with_traceback(None)))
