"""Starts what the driver owns on a Ray cluster: the desk actor, and the worker groups that are lent to trials.

A group is one Ray Train run, kept up for the whole experiment by a thread of the driver. The driver owns it, not a Tune
trainable: Tune ends cached actors when nothing is queued, and their groups would end with them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import ray
import ray.train

from dray.cluster.deaths import Deaths
from dray.cluster.desk import Desk
from dray.cluster.entry import serve_leases
from dray.cluster.train_run import TrainRun, lacking
from searchers.ray_tune import HEAD_NODE

END_S = 30.0
"""How long runs may take to end after they were told to."""


def start_desk(name: str, runtime_env: Mapping[str, Any]) -> Any:
    """The desk as an actor on the head node, found by its name in this job's namespace. It dies with the driver."""
    # The long polls of all ranks and handles are open at the same time.
    actor = ray.remote(num_cpus=0, resources=HEAD_NODE, max_concurrency=100_000)(Desk)
    return actor.options(name=name, runtime_env=dict(runtime_env) or None).remote()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of a group: how many, and the resources of each."""

    per_trial: int
    """Workers of a group, one per slot."""
    gpu: bool
    cpus_per_slot: float
    runtime_env: Mapping[str, Any]
    placement_strategy: str = "PACK"
    """How Ray spreads the workers over nodes."""
    shared_by: int = 1
    """How many groups of one worker share a slot."""

    def __str__(self) -> str:
        """The resources of a group, as text."""
        gpu = f"{Fraction(1, self.shared_by)} GPU and " if self.gpu else ""
        return f"{self.per_trial} x ({gpu}{self._cpus})"

    @property
    def taken(self) -> float:
        """How many slots a group takes: a whole number, or 1/n of one."""
        return self.per_trial if self.shared_by == 1 else 1 / self.shared_by

    @property
    def share(self) -> str:
        """What a group has of a slot that it shares, as text: 1/4 GPU; otherwise empty."""
        if self.shared_by == 1:
            return ""
        return f"{Fraction(1, self.shared_by)} GPU" if self.gpu else self._cpus

    @property
    def _cpus(self) -> str:
        cpus = Fraction(self.cpus_per_slot) / self.shared_by
        return f"{cpus} CPU{'s' * (cpus > 1)}"

    @property
    def kind(self) -> str:
        """What a slot is: "gpu" or "cpu"."""
        return "gpu" if self.gpu else "cpu"

    @property
    def resources(self) -> dict[str, float]:
        """Of each worker, for Ray."""
        has = {"CPU": float(self.cpus_per_slot), **({"GPU": 1.0} if self.gpu else {})}
        # Rounded down to Ray's precision: however Ray rounds, n shares are no more than the whole.
        return {name: math.floor(amount * 10_000 / self.shared_by) / 10_000 for name, amount in has.items()}


class WorkerGroup:
    """One Ray Train run whose workers serve leases until the desk closes.

    Args:
        name: unique within the experiment.
        run: the name of this run of the experiment, unique on the cluster.
        desk: the desk's actor handle.
        slots: size and resources.
        own_cluster: the cluster is for this experiment alone.
        work: what every worker gets, see ``dray.cluster.entry.serve_leases``.
        directory: where Ray Train keeps its own state.
        on_end: called in the group's thread with the error that ended the run, or None.
    """

    def __init__(
        self,
        *,
        name: str,
        run: str,
        desk: Any,
        slots: Slots,
        own_cluster: bool,
        work: Mapping[str, Any],
        directory: Path,
        on_end: Callable[[str, BaseException | None], None],
    ) -> None:
        self.name, self.run = name, f"{run}-{name}"
        self.abandoned = False
        self._trainer = TrainRun(
            serve_leases,
            own_cluster=own_cluster,
            config={**work, "desk": desk, "group": name},
            scaling_config=ray.train.ScalingConfig(
                num_workers=slots.per_trial,
                use_gpu=slots.gpu,
                resources_per_worker=slots.resources,
                placement_strategy=slots.placement_strategy,
            ),
            run_config=ray.train.RunConfig(
                name=self.run,
                storage_path=str(directory),
                # The driver counts restarts, per trial; a group may lose its workers any number of times.
                failure_config=ray.train.FailureConfig(max_failures=-1, controller_failure_limit=-1),
                worker_runtime_env=dict(slots.runtime_env),
                logging_config=ray.train.LoggingConfig(log_level="WARNING"),
                callbacks=[Deaths(desk, name)],
            ),
        )
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name=f"dray-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._trainer.fit()
        except BaseException as e:  # whatever it is, the driver handles it
            error = e
        self._on_end(self.name, error)

    def ended(self, by: float) -> bool:
        """Wait for the run until the time ``by`` (``time.monotonic()``). Returns whether it has ended."""
        self._thread.join(max(0.0, by - time.monotonic()))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """End the run at once, with its workers. Call `free` when it has ended."""
        self.abandoned = True
        self._trainer.abandon()

    def free(self) -> None:
        """Free the resources of a run that was abandoned."""
        self._trainer.free()


def waiting(groups: Mapping[str, WorkerGroup]) -> set[str]:
    """The names of the groups that wait for resources for their workers, or have lost them."""
    names = {group.run: name for name, group in groups.items()}
    return {names[run] for run in lacking(names)}


def end_groups(groups: Collection[WorkerGroup], within_s: float) -> None:
    """Give the runs ``within_s`` seconds, all together, to end by themselves; then end them.

    A thread that still waits for Ray when the connection is closed may crash the whole process.
    """
    deadline = time.monotonic() + within_s
    left = [group for group in groups if group.abandoned or not group.ended(deadline)]
    for group in left:
        group.abandon()
    deadline = time.monotonic() + END_S
    for group in left:
        if group.ended(deadline):
            group.free()
