"""What the autoscaler may start, and what it is doing, without a cluster: files and states are given here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.autoscaler.v2.schema import LaunchRequest, NodeInfo
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from dray.cluster import autoscaler
from dray.cluster.autoscaler import limits_of
from dray.cluster.view import Activity, AutoscalerLimits

UNKNOWN = AutoscalerLimits(types=None)
FILE = """
max_workers: 6
head_node_type: head
available_node_types:
  head: {resources: {CPU: 4, GPU: 0}, node_config: {}}
  spot: {resources: {CPU: 8, GPU: 2}, max_workers: 4, node_config: {}, labels: {ray.io/accelerator-type: L4}}
  other: {resources: {CPU: 16}, node_config: {}}
"""


# --------------------------------------------------------------------------------------------------------- its file
def test_limits_come_from_the_config_file() -> None:
    found = limits_of(FILE)
    assert found.types is not None
    assert [kind.max_count for kind in found.types] == [0, 4, 6], "Ray's defaults: none of the head, else as of all"
    assert found.max_count == 6
    assert [(kind.name, kind.labels) for kind in found.types] == [
        ("head", {}),
        ("spot", {"ray.io/accelerator-type": "L4"}),
        ("other", {}),
    ]
    assert sum(node.get("GPU", 0) for node in found.nodes()) == 8
    assert [len(found.nodes([kind])) for kind in ("L4", "A100")] == [4, 0]


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that looks like the autoscaler's."""
    script = tmp_path / "monitor.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    started = []

    def start(*arguments: str) -> None:
        started.append(subprocess.Popen([sys.executable, "-u", script, *arguments], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"up\n"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_file_is_that_of_this_clusters_process(monitor: Any, tmp_path: Path) -> None:
    port = f"{os.getpid() + 100_000}"  # that no Ray of this machine has
    assert autoscaler.read_config_file(port) is None
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    monitor("--gcs-address=10.0.0.1:1", f"--autoscaling-config={tmp_path / 'none.yaml'}")
    monitor(f"--gcs-address=10.0.0.1:{port}", f"--autoscaling-config={file}", "--logs-dir=a=b")
    assert autoscaler.read_config_file(port) == FILE


@pytest.mark.parametrize(
    ("file", "states", "expected"),
    [
        (FILE, True, limits_of(FILE)),
        (autoscaler.NO_FILE, True, None),
        (None, True, UNKNOWN),  # it is elsewhere, as on Kubernetes
        (None, False, None),
    ],
)
def test_whether_there_is_an_autoscaler(
    file: str | None, states: bool, expected: AutoscalerLimits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "config_file", lambda: file)
    monkeypatch.setattr(autoscaler, "has_state", lambda: states)
    assert autoscaler.limits() == expected


def test_an_autoscaler_on_kubernetes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its container starts beside that of the head, and a job as soon as the head is up."""
    states = [True, False, False]
    monkeypatch.setattr(autoscaler, "config_file", lambda: None)
    monkeypatch.setattr(autoscaler, "has_state", lambda: states.pop())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert autoscaler.limits() == UNKNOWN
    assert not states


OWN_MACHINES = "provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}"


def node(*, alive: bool = True) -> dict[str, Any]:
    """As Ray describes it."""
    return {"NodeID": "id", "NodeManagerAddress": "10.0.0.1", "Alive": alive, "Resources": {}, "Labels": {}}


def test_existing_machines_are_waited_for_and_no_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, dead = node(), node(alive=False)
    seen = [[alive, dead], [alive, dead, alive, alive]]
    monkeypatch.setattr(autoscaler, "config_file", lambda: OWN_MACHINES)
    monkeypatch.setattr(ray, "nodes", lambda: seen.pop(0))
    assert autoscaler.limits() is None
    assert not seen


def test_a_machine_that_does_not_join_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoscaler, "config_file", lambda: OWN_MACHINES)
    monkeypatch.setattr(ray, "nodes", lambda: [node(), node()])
    monkeypatch.setattr(autoscaler, "JOIN_S", -1.0)
    assert autoscaler.limits() is None
    assert "only 2 of 3 machines" in caplog.text


# ------------------------------------------------------------------------------------------------- what it is doing
def launch(kind: str, count: int, *, failed: int | None = None, details: str | None = None) -> LaunchRequest:
    status = LaunchRequest.Status.PENDING if failed is None else LaunchRequest.Status.FAILED
    return LaunchRequest(
        instance_type_name="",
        ray_node_type_name=kind,
        count=count,
        state=status,
        request_ts_s=0,
        failed_ts_s=failed,
        details=details,
    )


def test_activity_is_read_from_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = GetClusterStatusReply()
    reply.autoscaling_state.autoscaler_state_version = 1
    reply.autoscaling_state.pending_instance_requests.add(ray_node_type_name="spot", count=2)
    reply.autoscaling_state.failed_instance_requests.add(ray_node_type_name="b", reason="no capacity", failed_ts=9)
    client = SimpleNamespace(get_cluster_status=lambda **_: reply.SerializeToString())
    monkeypatch.setattr("ray.autoscaler.v2.sdk.GcsClient", lambda address: client)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:1"))
    assert autoscaler.activity() == Activity(starting={"spot": 2}, failed={"b": "no capacity"}, failed_at={"b": 9.0})
    reply.autoscaling_state.autoscaler_state_version = 0
    assert not autoscaler.has_state(), "no autoscaler has written it yet"


def test_activity_is_what_starts_and_the_latest_failures() -> None:
    node = NodeInfo(instance_type_name="", ray_node_type_name="spot", instance_id="i", ip_address="")
    failed = [launch("b", 1, failed=9, details="second\n  try"), launch("b", 1, failed=2, details="first")]
    found = autoscaler.activity_of([launch("spot", 2)], [node], failed)
    assert found == Activity(
        starting={"spot": 3}, failed={"b": "second try"}, failed_at={"b": 9.0}, booting={"spot": 1}
    )


@pytest.mark.parametrize("details", [None, "", "Failed to launch 1 nodes of type b with request id 7: "])
def test_without_a_reason_the_log_is_named(details: str | None) -> None:
    told = str(autoscaler.activity_of([], [], [launch("b", 1, failed=1, details=details)]))
    assert told.endswith("it could not start b: see monitor.log in Ray's logs on the head")


def test_activity_as_text() -> None:
    assert str(Activity(starting={}, failed={})) == "the autoscaler is starting none"
    both = Activity(starting={"spot": 2, "cpu": 1}, failed={"b": "no capacity"})
    assert str(both) == "the autoscaler is starting 1 cpu, 2 spot; it could not start b: no capacity"
    assert both.short() == "1 cpu, 2 spot starting, b not available"
    again = Activity(starting={"b": 1}, failed={"b": "no capacity"})
    assert str(again) == "the autoscaler is starting 1 b; it could not start b: no capacity"
    assert again.short() == "b not available"
