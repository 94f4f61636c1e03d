"""Whatever happens to the metrics, a run goes on. What they say is tested on a real Ray, in `tests.ray`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray.util import metrics

from dray.display.counts import Counts
from dray.experiment.prometheus import METRICS, Prometheus
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


ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "clusters" / "grafana-dray.json").read_text())
QUERIES = [(panel["title"], each) for panel in DASHBOARD["panels"] for each in panel["targets"]]
METRIC = re.compile(r"ray_(dray_\w+?)(_bucket|_count|_sum)?\b(?!\w)")


def labels_of(query: dict[str, Any]) -> set[str]:
    """The labels that a query selects or groups by, or that its legend shows."""
    expression = query["expr"]
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = [label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(", ")]
    return {*selected, *grouped, *re.findall(r"{{(\w+)}}", query["legendFormat"])}


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_query_names_a_metric_and_its_labels(title: str, query: dict[str, Any]) -> None:
    [(name, suffix)] = METRIC.findall(query["expr"])
    metric = METRICS[name]
    assert bool(suffix) == (metric.kind is metrics.Histogram)
    assert labels_of(query) <= {"experiment", *metric.labels} | ({"le"} if suffix == "_bucket" else set())
    assert (metric.kind is metrics.Gauge) == ("rate(" not in query["expr"]) or name == "dray_restarts_total"


def test_all_metrics_are_drawn() -> None:
    drawn = {METRIC.findall(query["expr"])[0][0] for _, query in QUERIES}
    assert drawn == METRICS.keys()


def test_the_dashboard_lists_the_experiments_of_a_metric() -> None:
    [_, experiment] = DASHBOARD["templating"]["list"]
    assert experiment["query"]["query"] == "label_values(ray_dray_trials, experiment)"
    assert all('experiment=~"$experiment"' in query["expr"] for _, query in QUERIES)


def test_the_docs_list_all_metrics() -> None:
    rows = re.findall(
        r"^\| `ray_(\w+)` \| (.*) \|$", (ROOT / "docs" / "operating-clusters.md").read_text(), re.MULTILINE
    )
    assert [name for name, _ in rows] == list(METRICS)
    for name, what in rows:
        assert all(f"`{label}`" in what for label in METRICS[name].labels)
