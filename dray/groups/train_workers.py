"""The workers of a Ray Train worker group, without a run of Ray Train around them.

Ray's trainer gives each run a controller, a synchroniser, and a watcher for draining nodes: processes of 0.1 GB each,
whose imports delay the first batch. In dray the driver starts groups, notices deaths, replaces groups and watches nodes
(`dray.groups.group`, `dray.cluster.watch`), and trials report to the desk. What remains are Train's workers and
`ray.train.get_context()`.

Ray has no public way to start only these. This file has all internal APIs of Ray Train that dray uses. Where a version
of Ray has changed them, groups start without them, and `ray.train.get_context()` does not work in trials.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
from ray.train import RunConfig, ScalingConfig
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dray.cluster.internals import optional
from dray.environment import set_variables
from dray.worker.entry import NoTrainRun, own_place, start_thread
from dray.worker.ranks import Ranks, assign, order

WITHOUT_TRAIN = "ray.train.get_context() does not work in trials"
"""The cost of a Ray that lacks Ray Train's internals."""
WAIT_S = 1.0
"""How often a start that waits for Ray checks whether its group has been ended."""


# Else print() in a worker also writes each line to Ray's own log.
_NO_PRINT_PATCH = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}


class StartAbandoned(Exception):
    """The group was ended while it started."""


class Worker(NamedTuple):
    """A process of a group: the actor, whose `execute` runs a function in it, and Ray's id of its node."""

    actor: Any
    node: str


def start_workers(
    function: Callable[[Ranks], None],
    placement: PlacementGroup,
    *,
    name: str,
    resources: Mapping[str, float],
    runtime_env: Mapping[str, Any],
    is_ending: Callable[[], bool],
) -> list[Worker]:
    """Start a worker in each bundle of a ready placement group, and run a function in each, in a thread.

    Args:
        function: takes the worker's ranks, and returns when the worker is done.
        name: of the run in Train's context.
        resources, runtime_env: of each worker.
        is_ending: whether the group has been ended, and its placement group removed.

    Returns:
        The workers by rank. They end with the placement group, and with this process.

    Raises:
        StartAbandoned: the group was ended meanwhile.
        ray.exceptions.RayError, RuntimeError: a worker could not start, or has died.
    """
    # Not by the `start()` of Train's worker group, which makes a synchroniser and has to run in an actor.
    actor_class = _actor_class()
    start = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), runtime_env=dict(runtime_env))(
        actor_class
    )
    actors = [
        start.options(scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle)).remote()
        for bundle in range(placement.bundle_count)
    ]
    try:
        places = _get([actor.execute.remote(own_place) for actor in actors], is_ending)
        indices = order(places)
        workers = [Worker(actors[index], places[index].node) for index in indices]
        ranks = assign([places[index] for index in indices])
        # Each worker takes its calls in order: nobody waits for the first before the second is sent.
        entered = _enter_train(actor_class, name, workers, ranks)
        started = [
            worker.actor.execute.remote(start_thread, function, mine)
            for worker, mine in zip(workers, ranks, strict=True)
        ]
        with optional(WITHOUT_TRAIN):
            try:
                _get(entered, is_ending)
            except ray.exceptions.RayTaskError as error:
                raise TypeError(repr(error.cause)) from None
        _get(started, is_ending)
    except Exception:
        if ray.is_initialized():  # else the call would start another Ray
            for actor in actors:
                ray.kill(actor)
        raise
    return workers


def _actor_class() -> Any:
    """Ray Train's worker, or a plain class where this Ray has none. Either way `execute` is dray's own, since its calls
    tell the driver of deaths."""
    with contextlib.suppress(Exception):  # a newer Ray may have changed anything
        from ray.train.v2._internal.execution.worker_group import RayTrainWorker as TrainsWorker

        inspect.signature(TrainsWorker).bind()  # it starts without arguments
        return _with_execute(TrainsWorker)
    return _with_execute(object)


def _with_execute(base: Any) -> Any:
    class RayTrainWorker(base):  # type: ignore[misc]
        __qualname__ = "RayTrainWorker"  # as Ray's commands show it

        def execute(self, function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

    return RayTrainWorker


def _enter_train(actor_class: Any, name: str, workers: list[Worker], ranks: list[Ranks]) -> list[Any]:
    """Make `ray.train.get_context()` work in the workers, if this Ray allows it. Returns the calls."""
    calls: list[Any] = []
    with optional(WITHOUT_TRAIN):
        from ray.train.v2._internal.execution.context import TrainRunContext

        run = TrainRunContext(
            **_accepted(
                TrainRunContext,
                run_config=RunConfig(name=name),
                scaling_config=ScalingConfig(num_workers=len(workers)),
                train_loop_config=None,
                backend_config=None,
                dataset_config=None,
                datasets={},  # until Ray 2.56
            )
        )
        context = _accepted(
            actor_class.init_train_context,
            train_run_context=run,
            synchronization_actor=NoTrainRun(),
            storage_context=NoTrainRun(),
            controller_actor=NoTrainRun(),
            worker_callbacks=[],
        )
        calls = [
            call
            for (actor, _), mine in zip(workers, ranks, strict=True)
            for call in (
                actor.execute.remote(set_variables, _NO_PRINT_PATCH),
                actor.init_train_context.remote(**context, distributed_context=mine),
            )
        ]
    return calls


def _accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that this Ray's version of a function takes. It raises a TypeError itself if it needs others."""
    return {name: arguments[name] for name in inspect.signature(function).parameters if name in arguments}


def _get(calls: list[Any], is_ending: Callable[[], bool]) -> list[Any]:
    """The results of calls of workers.

    Ray may never fail the first call of an actor whose placement group is removed while its process starts.
    """
    while True:
        if not ray.is_initialized():  # meanwhile; the call would start another Ray
            raise StartAbandoned
        try:
            results: list[Any] = ray.get(calls, timeout=WAIT_S)
        except ray.exceptions.GetTimeoutError:
            if is_ending():
                raise StartAbandoned from None
        else:
            return results
