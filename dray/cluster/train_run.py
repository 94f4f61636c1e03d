"""A Ray Train run without the processes and imports that worker groups of dray have no use for.

Ray Train starts, beside a run's controller and its workers, five actors, each of which imports Ray Train anew: about a
second of CPU, most of it in the way of the first batch. Of no use here are `DatasetManager` (Ray datasets; trials bring
data loaders of their own), and on a cluster of our own `AutoscalingCoordinator` (it cannot grow) and
`PlacementGroupCleaner` (the driver frees what a dead controller held, and ends with its cluster). And the controller
imports torch only to have the workers join a process group, which they do by themselves
(`dray.cluster.process_group`); hence no `TorchTrainer`.

Ray offers no public switch for these. All that is used of Ray Train's inside is in this file.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.logging.patch_print import _original_print
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def print_as_python_does() -> None:
    """Undo what Ray Train has made of ``print`` in a worker: a line of its own log, and of the trial's own log too."""
    builtins.print = _original_print


class _Neighbours(Backend):  # type: ignore[misc]  # Ray's classes are untyped here
    # A worker sees the GPUs of all workers of its group on its node, as NCCL wants, and uses that of its local rank.
    share_cuda_visible_devices = True


class _Workers(BackendConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[Backend]:
        return _Neighbours


class _FixedSize(FixedScalingPolicy):  # type: ignore[misc]
    """As many workers as were asked for, on a cluster without an autoscaler to ask for them."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Asks nobody."""

    def _maybe_send_resource_request(self) -> None:
        """Asks nobody."""


class TrainRun(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function on each worker of a group.

    Args:
        function: called on each worker with ``config``.
        grows: the cluster may have an autoscaler, which the run then tells what it needs.
        config, scaling_config, run_config: as `ray.train.torch.TorchTrainer` has them.
    """

    def __init__(
        self, function: Callable[[dict[str, Any]], None], *, grows: bool, config: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(function, train_loop_config=config, backend_config=_Workers(), **options)
        self._grows = grows
        self._controller: Any = None
        self._abandoned = False

    def abandon(self) -> None:
        """End the run at once, with its workers: `fit()` raises. From any thread, at any moment."""
        self._abandoned = True
        if self._controller is not None:
            ray.kill(self._controller)

    def _create_default_callbacks(self) -> list[Any]:
        useless = (DatasetsCallback,) if self._grows else (DatasetsCallback, PlacementGroupCleanerCallback)
        return [one for one in super()._create_default_callbacks() if not isinstance(one, useless)]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        where: dict[str, Any] = {}
        if self._grows:
            # Beside the driver, with its settings of Ray Train, as Train itself does.
            settings = {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
            node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            where = {"runtime_env": {"env_vars": settings}, "scheduling_strategy": node}
        else:
            # Ray Train gives its controller a runtime environment, and so all that the controller starts: none of
            # these could then run in a process that Ray has ready. On a cluster of our own, Ray itself has it.
            options["scaling_policy"] = _FixedSize(self.scaling_config)
        self._controller = ray.remote(num_cpus=0, **where)(TrainController).remote(**options)
        if self._abandoned:
            ray.kill(self._controller)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())
