"""What a worker is started with, in tests of workers without an experiment."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dray.storage import CheckpointStore
from dray.training.units import Batch
from dray.worker.lease import SharedSettings, TrialLease
from dray.worker.spec import ExperimentSpec, WorkerSpec

SETTINGS = SharedSettings(
    config={},
    metric="loss",
    smaller_is_better=True,
    max_length=Batch(100),
    rungs=(),
    validation_period=None,
    checkpoint_period=None,
)


def lease_in(directory: Path, **fields: Any) -> TrialLease:
    """A lease of a trial in this directory."""
    usual = {"number": 1, "client": "run", "trial_id": 1, "trial_seed": 0, "hparams": {}, "last_step": None}
    return TrialLease(trial_dir=directory, store=CheckpointStore(directory), **{**usual, **fields})


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
