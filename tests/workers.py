"""What a worker is started with, in tests of workers without an experiment."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

from dray.worker.spec import ExperimentSpec, WorkerSpec


def connected(desk: object) -> Any:
    """A `Connection` to a fake, whose plain methods answer at once."""

    def call(method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(desk, method)(*args, **kwargs))
        return answer

    class Connection:
        tell = staticmethod(call)

        def close(self) -> None:
            """There is none."""

        def __getattr__(self, method: str) -> Any:
            return functools.partial(call, method)

    return Connection()


def links(desk: object) -> dict[str, Any]:
    """The connections of a trial's host, both to the same fake."""
    connection = connected(desk)
    return {"driver": connection, "desk": connection}


def experiment_spec(settings: Any, *, run: str = "run", load_trial: Any = None, needs: Any = None) -> ExperimentSpec:
    return ExperimentSpec(run=run, settings=settings, load_trial=load_trial, log_format="%(message)s", needs=needs)


def worker_spec(desk: Any, settings: Any, *, owner: str = "run", load_trial: Any = None, **fields: Any) -> WorkerSpec:
    """On this machine, with a slot of its own, for an experiment whose driver owns the group."""
    defaults = {"group": "group-0", "start": 1, "shared_by": 1}
    experiment = experiment_spec(settings, run=owner, load_trial=load_trial)
    environment = getattr(settings, "environment", {})
    return WorkerSpec(desk=desk, owner=owner, environment=environment, experiment=experiment, **{**defaults, **fields})
