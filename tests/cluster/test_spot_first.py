"""Ray's autoscaler takes spot machines first, and others when there are none: by its own function that chooses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.node_provider_availability_tracker import NodeProviderAvailabilityTracker
from ray.autoscaler._private.resource_demand_scheduler import get_nodes_for
from ray.autoscaler.node_launch_exception import NodeLaunchException

from dray.cluster.spot_first import score

ROOT = Path(__file__).parents[2]


def types() -> dict[str, Any]:
    """Those of cluster.yaml, as Ray fills them out on AWS."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())["available_node_types"]
    for name in ("gpu_spot", "gpu_on_demand"):
        found[name]["resources"] = {"CPU": 8, "GPU": 1, "memory": 1 << 34, "accelerator_type:A10G": 1}
    return found


class Launches(NodeProviderAvailabilityTracker):  # type: ignore[misc]  # Ray's classes are untyped here
    """What Ray remembers of them."""

    def failed(self, node_type: str, at: int) -> None:
        self.update_node_availability(node_type, at, NodeLaunchException("InsufficientInstanceCapacity", "none", None))

    def chosen(self, slots: int, **types_: Any) -> dict[str, int]:
        scorer = partial(score, node_availability_summary=self.summary())
        resources = [{"GPU": 1, "CPU": 1}] * slots
        found, _ = get_nodes_for(types_ or types(), {"head": 1}, "head", 8, resources, scorer)
        return dict(found)


@pytest.fixture
def launches() -> Launches:
    return Launches(timer=lambda: 1000.0)


def test_spot_machines_come_first(launches: Launches) -> None:
    assert launches.chosen(2) == {"gpu_spot": 2}


def test_what_no_spot_machine_is_left_for_is_on_demand(launches: Launches) -> None:
    few = types()
    few["gpu_spot"]["max_workers"] = 3
    assert launches.chosen(5, **few) == {"gpu_spot": 3, "gpu_on_demand": 2}


def test_when_there_are_no_spot_machines_others_come_and_no_more_than_allowed(launches: Launches) -> None:
    launches.failed("gpu_spot", at=900)
    assert launches.chosen(2) == {"gpu_on_demand": 2}
    # Three slots, but two machines on demand: for the third a spot machine is asked for again.
    assert launches.chosen(3) == {"gpu_on_demand": 2, "gpu_spot": 1}


def test_when_there_are_no_machines_at_all_spot_ones_are_asked_for_again(launches: Launches) -> None:
    launches.failed("gpu_spot", at=900)
    launches.failed("gpu_on_demand", at=950)
    assert launches.chosen(1) == {"gpu_spot": 1}


def test_after_half_an_hour_spot_machines_are_tried_again(launches: Launches) -> None:
    launches.failed("gpu_spot", at=1000)
    launches.timer = lambda: 1000.0 + 1799
    assert launches.chosen(1) == {"gpu_on_demand": 1}
    launches.timer = lambda: 1000.0 + 1801
    assert launches.chosen(1) == {"gpu_spot": 1}


def test_a_large_machine_is_not_taken_for_being_spot(launches: Launches) -> None:
    larger = types()
    larger["gpu_spot"]["resources"] |= {"CPU": 96, "GPU": 8}
    assert launches.chosen(1, **larger) == {"gpu_on_demand": 1}
    launches.failed("gpu_on_demand", at=900)
    assert launches.chosen(1, **larger) == {"gpu_spot": 1}


def test_what_asks_for_no_gpu_takes_none_that_is_to_be_had(launches: Launches) -> None:
    more = {**types(), "cpu": {"resources": {"CPU": 8}, "max_workers": 2, "node_config": {}}}
    launches.failed("cpu", at=900)
    scorer = partial(score, node_availability_summary=launches.summary())
    found, _ = get_nodes_for(more, {"head": 1}, "head", 8, [{"CPU": 1}], scorer)
    assert dict(found) == {"cpu": 1}


def test_what_fits_on_no_machine_starts_none(launches: Launches) -> None:
    scorer = partial(score, node_availability_summary=launches.summary())
    assert get_nodes_for(types(), {"head": 1}, "head", 8, [{"GPU": 2}], scorer)[0] == {}
