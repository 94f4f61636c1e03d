"""Whatever happens to the metrics, a run goes on. What they say is tested on a real Ray, in `tests.ray`."""

from __future__ import annotations

from collections import Counter

import pytest

from dray.display.counts import Counts
from dray.experiment.prometheus import Prometheus
from searchers.views import State


def test_metrics_that_fail_are_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def states() -> Counter[State]:
        asked.append(True)
        raise RuntimeError("no metrics today")

    metrics = Prometheus("asha", counts=Counts(), states=states, busy_slots=lambda: 1)
    for _ in range(3):
        metrics.update(at_once=True)
    assert asked == [True]
    [record] = caplog.records
    assert record.getMessage() == "the metrics of asha are no longer exported: RuntimeError('no metrics today')"


def test_nothing_is_counted_between_two_exports() -> None:
    asked: list[bool] = []

    def states() -> Counter[State]:
        asked.append(True)
        return Counter()

    metrics = Prometheus("asha", counts=Counts(), states=states, busy_slots=lambda: 1)
    for _ in range(1000):  # as often as the driver reads its messages
        metrics.update()
    assert asked == [True]
