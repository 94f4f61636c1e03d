"""A Ray Train run without the processes and imports that dray's worker groups do not need.

Beside a run's controller and workers, Ray Train starts five actors. Each imports Ray Train anew, which takes about a
second of CPU, most of it before the first batch. Not needed here are `DatasetManager` (for Ray datasets; trials have
data loaders of their own); `AutoscalingCoordinator`, which outlives the search (the pending placement group is what
asks the autoscaler for nodes, and it does not); and `PlacementGroupCleaner`, a detached actor per run that frees what a
dead controller held, but only if its group was complete (the driver can free it at any moment, by name). And Ray's
controller imports torch only to have the workers join a process group, which they do by themselves
(`dray.cluster.process_group`); hence no `TorchTrainer`.

Ray has no public switch for these. All internal APIs of Ray Train that the driver and the controller use are in this
file; workers do not import it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Container
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution import controller
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dray.cluster.ray_cluster import TRAIN_ENVIRONMENT


class _Neighbours(Backend):  # type: ignore[misc]  # Ray's classes are untyped here
    # A worker sees the GPUs of all its group's workers on its node, as NCCL wants, and uses that of its local rank.
    share_cuda_visible_devices = True


class _Workers(BackendConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[Backend]:
        return _Neighbours


class _FixedSize(FixedScalingPolicy):  # type: ignore[misc]
    """A fixed number of workers. Only their placement group asks the autoscaler for nodes."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Do not ask the autoscaler."""

    def _maybe_send_resource_request(self) -> None:
        """Do not ask the autoscaler."""


class _NamedWorkers(WorkerGroup):  # type: ignore[misc]
    """Workers whose placement group has a name by which the driver finds it, even if the controller dies."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        workers = worker_group_context
        return DefaultPlacementGroupHandle(
            placement_group(
                [workers.resources_per_worker] * workers.num_workers,
                strategy=workers.placement_strategy,
                # A unique name: a group that is being removed keeps its own for a while.
                name=f"{self._train_run_context.run_config.name}/{uuid.uuid4().hex[:8]}",
            )
        )


def lacking(runs: Container[str]) -> set[str]:
    """The names of those runs that wait for resources for their workers, or have lost them."""
    states: dict[str, set[str]] = {}
    for group in placement_group_table().values():
        run = group["name"].rpartition("/")[0]
        if run in runs and group["state"] != "REMOVED":
            states.setdefault(run, set()).add(group["state"])
    return {run for run, known in states.items() if "CREATED" not in known}


class TrainController(controller.TrainController):  # type: ignore[misc]
    worker_group_cls = _NamedWorkers


class TrainRun(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function on each worker of a group.

    Args:
        function: called on each worker with ``config``.
        own_cluster: the cluster is for this experiment alone, with its settings.
        config, scaling_config, run_config: as in `ray.train.torch.TorchTrainer`; the run's name is unique on the
            cluster.
    """

    def __init__(
        self, function: Callable[[dict[str, Any]], None], *, own_cluster: bool, config: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(function, train_loop_config=config, backend_config=_Workers(), **options)
        self._name, self._own_cluster = options["run_config"].name, own_cluster
        self._controller: Any = None
        self._abandoned = False

    def abandon(self) -> None:
        """End the run at once, with its workers; `fit()` raises. May be called from any thread, at any moment."""
        self._abandoned = True
        if self._controller is not None:
            ray.kill(self._controller)

    def free(self) -> None:
        """Free what a dead controller held and could not free."""
        for group in placement_group_table().values():
            if group["name"].startswith(f"{self._name}/") and group["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # it may be gone by now
                    remove_placement_group(get_placement_group(group["name"]))

    def _create_default_callbacks(self) -> list[Any]:
        useless = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [one for one in super()._create_default_callbacks() if not isinstance(one, useless)]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        # Ray Train gives its controller, and so all that the controller starts, a runtime environment: none of these
        # could then use a process that Ray has ready. On a cluster of our own Ray has the variables already.
        where: dict[str, Any] = {}
        if not self._own_cluster:
            # On the driver's node, with its settings of Ray Train, as Train does it.
            given = {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
            node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            environment = {**self.run_config.worker_runtime_env, "env_vars": {**TRAIN_ENVIRONMENT, **given}}
            where = {"runtime_env": environment, "scheduling_strategy": node}
        options["scaling_policy"] = _FixedSize(self.scaling_config)
        self._controller = ray.remote(num_cpus=0, **where)(TrainController).remote(**options)
        if self._abandoned:
            ray.kill(self._controller)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())
