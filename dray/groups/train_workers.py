"""The workers of a Ray Train worker group, without a run of Ray Train around them.

Ray's trainer gives each run a controller, a synchroniser, and a watcher for draining nodes: processes of 0.1 GB each,
whose imports delay the first batch. In dray the driver starts groups, notices deaths, replaces groups and watches nodes
(`dray.groups.group`, `dray.cluster.watch`), and trials report to the desk. What remains are Train's workers, their
ranks, and `ray.train.get_context()`.

Ray has no public way to start only these. All internal APIs of Ray Train that dray starts groups with are in this file;
workers do not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.train import LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks.accelerators import _share_cuda_visible_devices
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, WorkerGroup
from ray.train.v2._internal.execution.worker_group import Worker as TrainWorker
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dray.environment import set_variables
from dray.worker.entry import NoCollectives

# Else print() in a worker also writes each line to Ray's own log.
_NO_PRINT_PATCH = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}


WAIT_S = 1.0
"""How often a start that waits for Ray checks whether its group has been ended."""


class StartAbandoned(Exception):
    """The group was ended while it started."""


class Worker(NamedTuple):
    """A process of a group: Ray Train's actor, whose `execute` runs a function on it, and Ray's id of its node."""

    actor: Any
    node: str


def start_workers(
    function: Callable[[], None],
    placement: PlacementGroup,
    *,
    name: str,
    resources: Mapping[str, float],
    runtime_env: Mapping[str, Any],
    directory: Path,
    is_ending: Callable[[], bool],
) -> list[Worker]:
    """Start a worker in each bundle of a ready placement group, and run a function on each, in a thread.

    Args:
        function: returns when its worker is done.
        name: of the run in Train's context.
        resources, runtime_env: of each worker.
        directory: where Ray Train would keep its state.
        is_ending: whether the group has been ended, and its placement group removed.

    Returns:
        The workers by rank. They end with the placement group, and with this process.

    Raises:
        StartAbandoned: the group was ended meanwhile.
        ray.exceptions.RayError, RuntimeError: a worker could not start, or has died.
    """
    run = TrainRunContext(
        run_config=RunConfig(
            name=name,
            storage_path=str(directory),
            worker_runtime_env=dict(runtime_env),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
        scaling_config=ScalingConfig(
            num_workers=placement.bundle_count, use_gpu="GPU" in resources, resources_per_worker=dict(resources)
        ),
        train_loop_config=None,
        backend_config=None,
        dataset_config=None,
    )
    # Not by the `start()` of Train's worker group: it makes a synchroniser, and has to run in an actor.
    start = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), runtime_env=dict(runtime_env))(
        RayTrainWorker
    )
    actors = [
        start.options(scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle)).remote()
        for bundle in range(placement.bundle_count)
    ]
    try:
        found = _get([actor.get_metadata.remote() for actor in actors], is_ending)
        workers = WorkerGroup._assign_worker_ranks(
            [
                TrainWorker(actor, metadata, dict(resources), placement_group_bundle_index=bundle)
                for bundle, (actor, metadata) in enumerate(zip(actors, found, strict=True))
            ]
        )
        if "GPU" in resources:
            # A worker sees the GPUs of all its group's workers on its node, as NCCL wants, and uses that of its local
            # rank.
            _share_cuda_visible_devices(workers)
        program = ObjectRefWrapper(function)
        # Each worker takes its calls in order: nobody waits for the first before the second is sent.
        calls = [
            each
            for worker in workers
            for each in (
                worker.actor.execute.remote(set_variables, _NO_PRINT_PATCH),
                worker.actor.init_train_context.remote(
                    train_run_context=run,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=NoCollectives(),
                    storage_context=run.run_config.storage_context,
                    worker_callbacks=[],
                    controller_actor=None,
                ),
                worker.actor.run_train_fn.remote(program),
            )
        ]
        _get(calls, is_ending)
    except Exception:
        for actor in actors:
            ray.kill(actor)
        raise
    return [Worker(worker.actor, worker.metadata.node_id) for worker in workers]


def _get(calls: list[Any], is_ending: Callable[[], bool]) -> list[Any]:
    """The results of calls of workers.

    Ray may never fail the first call of an actor whose placement group is removed while its process starts.
    """
    while True:
        try:
            results: list[Any] = ray.get(calls, timeout=WAIT_S)
        except ray.exceptions.GetTimeoutError:
            if is_ending():
                raise StartAbandoned from None
        else:
            return results
