"""What Ray's metrics endpoint says of experiments, read by Prometheus's own parser."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

import ray
from prometheus_client.parser import text_string_to_metric_families

from dray.experiment.prometheus import METRICS


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the endpoint, without Ray's prefix."""

    name: str
    labels: dict[str, str]
    value: float


def scraped() -> list[Sample]:
    """What this node's endpoint has of dray."""
    [node] = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [
        Sample(sample.name.removeprefix("ray_"), dict(sample.labels), sample.value)
        for family in families
        if family.name.startswith("ray_dray_")
        for sample in family.samples
    ]


def values(samples: list[Sample], name: str, experiment: str) -> dict[str, float]:
    """The values of a metric by its own label, "" if it has none; those of 0 are left out."""
    own = METRICS[name].labels if name in METRICS else ()
    mine = [each for each in samples if each.name == name and each.labels["experiment"] == experiment]
    return {"".join(each.labels[label] for label in own): each.value for each in mine if each.value}
