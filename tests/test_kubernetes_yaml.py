"""The files for KubeRay are what Ray reads, and what a cluster's administrator demands of pods."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import dray  # noqa: F401 - a fixture
from tests.cli.said import Said
from tests.test_cluster_yaml import pinned_ray

pytestmark = pinned_ray

ROOT = Path(__file__).parents[1]
FILES = ["clusters/kuberay.yaml", "clusters/kuberay-cluster.yaml"]


@cache
def objects(file: str) -> dict[str, Any]:
    """The objects of a file by their kind; as JSON has them, each of YAML's anchors for itself."""
    return {each["kind"]: json.loads(json.dumps(each)) for each in yaml.safe_load_all((ROOT / file).read_text())}


def cluster(file: str) -> dict[str, Any]:
    found = objects(file)
    spec: dict[str, Any] = (
        found["RayJob"]["spec"]["rayClusterSpec"] if "RayJob" in found else found["RayCluster"]["spec"]
    )
    return spec


def pods(file: str) -> dict[str, dict[str, Any]]:
    """The pod of each group, by name."""
    spec = cluster(file)
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    return {name: group["template"]["spec"] for name, group in groups.items()}


@pytest.mark.parametrize("file", FILES)
def test_pods_are_guaranteed_their_resources_and_have_no_rights(file: str) -> None:
    autoscaler = cluster(file)["autoscalerOptions"]
    containers = [autoscaler, *(container for pod in pods(file).values() for container in pod["containers"])]
    for container in containers:
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for pod in pods(file).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        # KubeRay would make it as large as the memory.
        [shm] = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("file", FILES)
def test_ray_reads_worker_groups_that_start_from_zero_with_spot_first(file: str) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    resource = {"metadata": {"name": "dray", "namespace": "default"}, "spec": cluster(file)}
    config = _derive_autoscaling_config_from_ray_cr(resource)
    types = config["available_node_types"]
    head = types[config["head_node_type"]]
    assert (head["resources"]["CPU"], head["max_workers"]) == (0, 0)
    assert {name: (each["min_workers"], each.get("priority", 0)) for name, each in types.items() if each != head} == {
        "spot": (0, 10),
        "on-demand": (0, 0),
    }
    for name in ("spot", "on-demand"):
        assert types[name]["resources"].items() >= {"CPU": 8, "GPU": 1}.items()
    assert config["idle_timeout_minutes"] == 5


@pytest.mark.parametrize("file", FILES)
def test_variables_for_ray_are_variables_of_ray(file: str) -> None:
    containers = [cluster(file)["autoscalerOptions"], *(pod["containers"][0] for pod in pods(file).values())]
    names = {each["name"] for container in containers for each in container["env"] if each["name"].startswith("RAY_")}
    source = Path(importlib.metadata.distribution("ray").locate_file("ray").__fspath__())
    files = ("_private/ray_constants", "dashboard/modules/job/job_supervisor", "autoscaler/v2/instance_manager/config")
    known = "".join((source / f"{name}.py").read_text() for name in files)
    assert len(names) > 1
    assert all(f'"{name}"' in known for name in names)


@pytest.mark.parametrize("file", FILES)
def test_ray_is_the_one_that_dray_supports_and_asks_for_a_token(file: str) -> None:
    assert cluster(file)["rayVersion"] == importlib.metadata.version("ray")
    assert cluster(file)["authOptions"]["mode"] == "token"
    assert cluster(file)["autoscalerOptions"]["version"] == "v2"


def test_a_cluster_has_the_nodes_of_a_job() -> None:
    groups = [copy.deepcopy(cluster(file)["workerGroupSpecs"]) for file in FILES]
    for group in groups[1]:
        for field in ("command", "args"):  # where KubeRay's own are overwritten
            del group["template"]["spec"]["containers"][0][field]
    assert groups[0] == groups[1]


def test_a_job_is_one_that_kueue_can_suspend_and_that_continues() -> None:
    job = objects(FILES[0])["RayJob"]
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert len(job["metadata"]["name"]) <= 47
    assert " --path /results/" in job["spec"]["entrypoint"]
    head = pods(FILES[0])["head"]
    patience = next(each for each in head["containers"][0]["env"] if each["name"] == "RAY_JOB_STOP_WAIT_TIME_S")
    assert int(patience["value"]) < head["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("file", FILES)
def test_each_place_to_fill_in_has_a_comment(file: str) -> None:
    text = (ROOT / file).read_text()
    names = set(re.findall(r"FILL_IN_\w+", text))
    assert names >= {"FILL_IN_IMAGE", "FILL_IN_BUCKET", "FILL_IN_ACCOUNT"}
    assert text.count("FILL IN") >= 3


@pytest.mark.parametrize("file", FILES)
def test_validate_names_what_checks_manifests(file: str, dray: Callable[..., Said]) -> None:  # noqa: F811
    error = dray("cluster", "validate", ROOT / file).is_one_line()
    assert f"kubectl apply --dry-run=server -f {ROOT / file}" in error
