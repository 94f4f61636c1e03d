"""cluster.yaml passes Ray's validation, and keeps what Ray does not check."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    assert prepared["head_start_ray_commands"] == cluster["head_start_ray_commands"]


def test_head_does_no_training_and_is_not_spot(cluster: dict[str, Any]) -> None:
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert head["resources"]["GPU"] == 0
    assert head["max_workers"] == 0
    assert "InstanceMarketOptions" not in head["node_config"]


def test_workers_go_to_zero_within_bounds_and_have_a_fallback(cluster: dict[str, Any]) -> None:
    workers = {k: v for k, v in cluster["available_node_types"].items() if k != cluster["head_node_type"]}
    assert all(w["min_workers"] == 0 < w["max_workers"] <= cluster["max_workers"] for w in workers.values())
    spot = ["InstanceMarketOptions" in w["node_config"] for w in workers.values()]
    assert spot == [True, False], "spot first, on demand as the fallback"


def test_all_nodes_have_one_image_of_our_choice(cluster: dict[str, Any]) -> None:
    images = {node["node_config"]["ImageId"] for node in cluster["available_node_types"].values()}
    assert len(images) == 1
    assert images != {""}


def test_node_fields_are_ec2s(cluster: dict[str, Any]) -> None:
    # Ray accepts any field here, and AWS refuses it only when a node is launched.
    known = {"InstanceType", "ImageId", "BlockDeviceMappings", "InstanceMarketOptions", "IamInstanceProfile"}
    for node in cluster["available_node_types"].values():
        assert node["node_config"].keys() <= known


def test_a_driver_on_the_head_joins_the_cluster(cluster: dict[str, Any]) -> None:
    # `ray submit` runs it with what ~/.bashrc exports, and names no address itself.
    [exports] = [line for line in cluster["setup_commands"] if "export" in line]
    assert " RAY_ADDRESS=auto " in exports


def test_mounted_files_of_the_repository_exist(cluster: dict[str, Any]) -> None:
    mounted = [local for local in cluster["file_mounts"].values() if not local.startswith("~")]
    assert mounted
    assert all((ROOT / local).exists() for local in mounted)
    assert (ROOT / "constraints.txt").exists()


def test_every_node_has_the_token_and_no_port_is_open_to_the_world(cluster: dict[str, Any]) -> None:
    assert any(remote.endswith("/.ray/auth_token") for remote in cluster["file_mounts"])
    starts = [
        c for key in ("head_start_ray_commands", "worker_start_ray_commands") for c in cluster[key] if "start" in c
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "0.0.0.0" not in " ".join(starts)
    assert "--autoscaling-config" in starts[0]
