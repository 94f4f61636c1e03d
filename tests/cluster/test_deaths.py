"""What Ray Train's controller has of workers that die, as the desk hears it; the errors are Ray's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from dray.cluster.deaths import Deaths
from dray.cluster.failure import LOW_MEMORY
from dray.cluster.worker import GroupRetired


def failed(cause: Exception) -> Exception:
    """As Ray Train has a worker that does not answer."""
    return WorkerHealthCheckFailedError("A worker health check failed.\nWorker info: ...", failure=cause)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ({1: failed(ActorDiedError())}, [("g", {1: ""})]),
        (
            {
                0: failed(RayActorError(error_msg="The actor died because its node has died. Node Id: 0f")),
                2: ValueError("x"),
            },
            [("g", {0: "Ray has lost the node"})],
        ),
        (
            {1: failed(OutOfMemoryError(f"Task was killed due to the node {LOW_MEMORY}."))},
            [("g", {1: f"Ray killed it, because its node was {LOW_MEMORY}"})],
        ),
        ({0: failed(ActorUnavailableError("no route", actor_id=None))}, [("g", {0: ""})]),
        # Processes that were told to end, and a word that the controller could not read: nobody died.
        ({0: GroupRetired("worker group g restarts"), 1: failed(TypeError("can't unpickle"))}, []),
    ],
    ids=["died", "with its node", "killed by Ray", "out of reach", "none"],
)
def test_desk_hears_who_died_and_what_ray_knows_of_why(errors: dict[int, Exception], told: list[Any]) -> None:
    heard: list[Any] = []
    desk = SimpleNamespace(died=SimpleNamespace(remote=lambda *words: heard.append(words)))
    Deaths(desk, "g").after_exception(None, errors)
    assert heard == told
