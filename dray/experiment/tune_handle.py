"""How Tune's handle fetches the results of an experiment's trials, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import dray.experiment.results  # noqa: F401 - messages have what it registers
from dray.rpc.connection import Connection, Endpoint
from searchers.events import TrialResult


def results_of(endpoint: Endpoint) -> Callable[[int], Sequence[TrialResult] | None]:
    """Connect to an experiment's driver to fetch results, as `searchers.ray_tune.Handle` does."""
    driver = Connection(endpoint)

    def fetch(process: int) -> Sequence[TrialResult] | None:
        results: Sequence[TrialResult] | None = driver.fetch(process).result()
        return results

    return fetch
