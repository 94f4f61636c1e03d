"""What a worker is started with, in tests of workers without an experiment."""

from __future__ import annotations

from typing import Any

from dray.worker.spec import WorkerSpec


def worker_spec(desk: Any, settings: Any, **fields: Any) -> WorkerSpec:
    """On this machine, with a slot of its own."""
    defaults = {"run": "run", "group": "group-0", "start": 1, "load_trial": None, "shared_by": 1, "needs": None}
    defaults |= {"log_format": "%(message)s"}
    return WorkerSpec(desk=desk, settings=settings, **{**defaults, **fields})
