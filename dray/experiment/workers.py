"""What the worker groups of a run are made of: their slots, the trial's code, and the settings of all trials."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dray
from dray.cluster.connection import Cluster
from dray.code.factory import ByValue, FromDirectory, Sent
from dray.config.resources import Resources
from dray.config.schema import ExperimentConfig
from dray.environment import device
from dray.experiment.preflight import check_nodes
from dray.experiment.send_code import send_code
from dray.groups.capacity import Capacity, find_slots, gpu_types
from dray.groups.elastic import Elastic
from dray.groups.group import Slots, WorkerGroup
from dray.records.directory import ExperimentDirectory
from dray.worker.lease import SharedSettings
from dray.worker.spec import ExperimentSpec, WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of a run, before any group is started.

    Attributes:
        experiment: what all trials run with; its name of this run is unique: one that resumes the experiment has
            another.
        slots: of a group; of the smallest, if its size may change.
        capacity: how many groups fit.
        elastic: the size of the only group, if it may change.
        share: what slots its trials may have: priority, weight, max_slots, as `dray.desk.client.Client` has it.
        directory: where Ray Train would keep its state.
    """

    experiment: ExperimentSpec
    slots: Slots
    capacity: Capacity
    elastic: Elastic | None
    share: Mapping[str, Any]
    directory: Path

    @property
    def shape(self) -> str:
        """Groups of equal shapes can run each other's trials: their slots and processes are equal.

        With ``reuse_workers: false`` they are new for each trial, also if earlier ones were of other experiments.
        """
        settings = self.experiment.settings
        parts = (
            self.slots,
            sorted(settings.environment.items()),
            settings.deterministic,
            settings.collective_timeout_s,
            settings.reuse_workers,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def claim(self) -> dict[str, Any]:
        """What its trials ask for and may have of a server, as `dray.desk.client.Client` has it."""
        size, unit = self.slots.taken * self.slots.unit, self.slots.unit
        return {"shape": self.shape, "kind": self.slots.kind, "size": size, "unit": unit, **self.share}

    def start(self, desk: Any, group: str, start: int, slots: Slots, *, owner: str, lent: bool = False) -> WorkerGroup:
        """Start a group, as the owner's start with this number.

        Args:
            lent: it may get trials of any experiment with groups of this shape.
        """
        settings = self.experiment.settings
        spec = WorkerSpec(
            desk=desk,
            owner=owner,
            group=group,
            start=start,
            shape=self.shape,
            environment=settings.environment,
            deterministic=settings.deterministic,
            experiment=None if lent else self.experiment,
            shared_by=slots.shared_by,
        )
        return WorkerGroup(spec, slots=slots, directory=self.directory)


def prepare_workers(
    config: ExperimentConfig,
    directory: ExperimentDirectory,
    cluster: Cluster,
    load_trial: FromDirectory | ByValue,
    rungs: Sequence[float],
    say: Callable[[str], None],
    *,
    borrows: bool = False,
) -> Workers:
    """Find the slots, send the code to a cluster of others, and check its nodes.

    Args:
        load_trial: loads the trial's class on workers on this machine.
        rungs: absolute lengths at which the search decides, as its method counts them.
        say: prints a line for the user.
        borrows: the worker groups are a server's.

    Raises:
        ConfigError: the cluster can't have room for a group, a node lacks something, or the code is too large.
    """
    sizes, resources = config.slots_per_trial, config.resources
    kind, limits = find_slots(cluster, resources, sizes[0])
    loads: FromDirectory | ByValue | Sent = load_trial
    runtime_env: dict[str, Any] = {}
    if not cluster.local:
        loads, runtime_env = send_code(load_trial, directory, config, say, borrows=borrows)
    slots = Slots(
        per_trial=sizes[0],
        gpu=kind == "gpu",
        cpus_per_slot=resources.cpus_per_slot,
        runtime_env=runtime_env,
        placement_strategy=resources.placement_strategy,
        shared_by=resources.trials_per_slot,
        gpu_types=gpu_types(resources, limits),
    )
    run = f"{directory.path.name}-{secrets.token_hex(4)}"
    is_elastic = len(sizes) > 1
    needs = None if cluster.local else check_nodes(directory, run, gpu=slots.gpu)
    settings = SharedSettings.of(config, rungs, device(gpu=slots.gpu))
    return Workers(
        experiment=ExperimentSpec(
            run=run, settings=settings, load_trial=loads, log_format=dray.LOG_FORMAT, needs=needs
        ),
        slots=slots,
        capacity=Capacity(slots, limits, sizes[0] if is_elastic else resources.max_slots),
        elastic=Elastic(slots, sizes, name=run) if is_elastic else None,
        share=share_of(resources, slots),
        directory=directory.ray,
    )


def share_of(resources: Resources, slots: Slots) -> dict[str, Any]:
    """What slots an experiment may have, in the units of `dray.desk.client.Client`: GPUs, or CPUs."""
    most = None if resources.max_slots is None else resources.max_slots * slots.unit
    return {"priority": resources.priority, "weight": resources.weight, "max_slots": most}
