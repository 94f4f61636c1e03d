"""The desk as an actor of Ray, and how its clients connect to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray

from dray.desk.connection import DeskConnection, DeskUnreachable, Endpoint, listen
from dray.desk.desk import Desk
from dray.desk.results import TrialResult


class DeskActor(Desk):
    """The desk, which listens once somebody wants to connect."""

    _listening: asyncio.Future[Endpoint] | None = None

    async def endpoint(self) -> Endpoint:
        """Where to connect."""
        self._listening = self._listening or asyncio.ensure_future(listen(self, ray.util.get_node_ip_address()))
        return await self._listening


def start_desk(name: str, client: str, *, shape: str = "", runtime_env: Mapping[str, Any]) -> Any:
    """The desk as an actor on the head node, found by its name in this job's namespace. It dies with the driver, its
    first client."""
    from searchers.ray_tune import HEAD_NODE  # here, as the actor's process, which imports this module, needs no Tune

    # Calls that wait for hours are open at the same time.
    actor = ray.remote(num_cpus=0, resources=HEAD_NODE, max_concurrency=100_000)(DeskActor)
    return actor.options(name=name, runtime_env=dict(runtime_env) or None).remote(client, shape)


def connect(desk: Any) -> DeskConnection:
    """Connect to a desk, given its actor handle.

    Raises:
        ray.exceptions.RayActorError: it has died.
        DeskUnreachable: this machine can't reach it.
    """
    return DeskConnection(ray.get(desk.endpoint.remote()))


def results_of(desk: str, namespace: str, handle: str) -> Callable[[int], list[TrialResult] | None]:
    """Connect to a desk to fetch results, as `searchers.ray_tune.Handle` does.

    Args:
        desk: The actor's name.
        namespace: Its namespace.
        handle: Its name at the desk.
    """
    connection = connect(ray.get_actor(desk, namespace=namespace))

    def fetch(process: int) -> list[TrialResult] | None:
        results: list[TrialResult] | None = []
        while results == []:
            try:
                results = connection.serve(handle, process).result()
            except DeskUnreachable:  # the driver notices it as well, and starts over with another handle
                return None
        return results

    return fetch
