"""What a worker is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from dray.cluster.checks.node import Needs
from dray.worker.lease import SharedSettings

if TYPE_CHECKING:
    from dray.code.factory import ByValue, FromDirectory, Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The same for all workers of a group.

    Attributes:
        run: name of this run of the experiment, unique on the cluster.
        group: name of the group, unique among the groups that exist.
        start: number of the group's start, unique in this run.
        desk: the desk's actor handle.
        settings: of all trials.
        load_trial: loads the trial's class, or the program.
        log_format: of the log lines of trials.
        shared_by: how many groups of one worker share a slot.
        needs: what the node must have; None if the driver has started the cluster on this machine.
    """

    run: str
    group: str
    start: int
    desk: Any
    settings: SharedSettings
    load_trial: FromDirectory | ByValue | Sent
    log_format: str
    shared_by: int
    needs: Needs | None

    def give_up(self, error: Exception) -> None:
        """Report an error that any process in this one's place would have too; wait until the driver ends the run."""
        # Without its causes: the desk may not be able to import their classes.
        error.__cause__ = error.__context__ = None
        ray.get(self.desk.broken.remote(self.group, error.with_traceback(None)))
