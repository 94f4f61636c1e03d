"""`dray cluster check`: what it finds, and that it finds nothing where all is well."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray.checks.cluster import ahead_s, each_gpu
from dray.checks.findings import ClusterCheck, Node
from dray.checks.inspector import Disk, Inspector, efa_devices
from dray.cluster.node_check import write_sign
from dray.environment import versions
from dray.storage import Location
from tests.cli.conftest import dray, home, simulated_once  # noqa: F401 - fixtures
from tests.cli.said import Said
from tests.docs.pages import JSON
from tests.docs.test_cli_page import fields

Dray = Callable[..., Said]
GIB = 1 << 30

# ---------------------------------------------------------------------------------------------------------- judging


def facts(**others: Any) -> dict[str, Any]:
    """What a node tells that is as it should be: one that has a GPU."""
    return {
        "host": "gpu-1",
        "cuda": "12.8",
        "nccl": "2.27.3",
        "gpus": ["H200"],
        "error": "",
        "full": "",
        "disks": [Disk(path="/tmp", free=50 * GIB, size=100 * GIB)],
        "has_token": True,
        "python": "3.11.7",
        "ray": "2.60.0",
        "torch": "2.9.1+cu128",
        "dray": "0.1.0",
        "efa_devices": 0,
        "nccl_plugin": False,
        "nccl_environment": {},
        **others,
    }


def disk(path: str, free: int, size: int) -> dict[str, Any]:
    return {"disks": [Disk(path=path, free=free, size=size)]}


@pytest.mark.parametrize(
    ("others", "is_wrong", "told"),
    [
        ({}, None, ""),
        (
            {"torch": "2.9.0+cu128"},
            True,
            "has torch 2.9.0+cu128, but the driver has torch 2.9.1+cpu; install the driver's ",
        ),
        ({"error": "No module named 'torch'"}, True, "torch can't be imported: No module named 'torch'"),
        ({"gpus": []}, True, "Ray counts 1 GPU, torch sees 0; it is built for CUDA 12.8"),
        ({"gpus": [], "cuda": ""}, True, "Ray counts 1 GPU, torch sees 0; it is built without CUDA"),
        ({"gpus": ["H200", "H200"]}, None, ""),  # Ray was given one of them
        ({"nccl": ""}, True, "torch is built without NCCL"),
        ({"full": "has a full disk: 3 MiB are free on /tmp"}, True, "has a full disk: 3 MiB are free on /tmp; free"),
        (disk("/tmp", GIB - 1, 10 * GIB), False, "only 1023 MiB are free on /tmp"),
        (disk("/tmp", 4 * GIB, 100 * GIB), False, "/tmp is 96 % full: Ray stores no objects there from 95 % on"),
        (disk("/dev/shm", 4 * GIB, 100 * GIB), None, ""),
        (disk("/dev/shm", 64 << 20, 64 << 20), False, "only 64 MiB are free on /dev/shm"),
        ({"efa_devices": 4, "nccl_plugin": True}, None, ""),
        ({"efa_devices": 4}, False, "it has 4 EFA devices, but NCCL uses TCP: it finds no libnccl-net.so"),
    ],
)
def test_findings_on_a_node(others: dict[str, Any], is_wrong: bool | None, told: str) -> None:
    node = Node(address="10.0.0.7", gpus_of_ray=1)
    found = ClusterCheck(address="10.0.0.1:6379", storage="s3://bucket", nodes=[node])
    drivers = {name: facts()[name] for name in ("python", "ray", "dray")} | {"torch": "2.9.1+cpu"}
    found.take_facts(node, facts(**others), drivers)
    assert [finding.is_wrong for finding in found.findings] == ([] if is_wrong is None else [is_wrong])
    assert all(finding.what.startswith(told) for finding in found.findings)
    assert all(finding.node == "10.0.0.7 (gpu-1)" for finding in found.findings)
    assert found.is_fit is not is_wrong


def test_efa_devices_are_those_with_its_driver(tmp_path: Path) -> None:
    for device, driver in (("rdmap0s6", "efa"), ("rdmap1s6", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "infiniband" / device / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert efa_devices(tmp_path / "infiniband") == 2
    assert efa_devices(tmp_path / "nowhere") == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_plugin_is_found_as_nccl_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = "libc.so.6"  # a library that there is
    monkeypatch.setenv("NCCL_NET_PLUGIN", plugin)
    monkeypatch.setenv("FI_EFA_USE_HUGE_PAGE", "0")
    seen = Inspector().facts()
    assert seen["nccl_plugin"]
    assert seen["nccl_environment"] == {"FI_EFA_USE_HUGE_PAGE": "0", "NCCL_NET_PLUGIN": plugin}


def test_clocks_are_compared_by_the_quickest_answer() -> None:
    """A clock that is 7 s ahead, asked over a network whose answers take most of an exchange to come back."""
    time = 100.0
    takes = iter([(0.5, 3.0), (0.1, 0.2), (0.2, 0.2), (2.0, 2.0), (1.0, 0.0)])

    def ask() -> float:
        nonlocal time, back
        there, back = next(takes)
        time += there
        return time + 7

    back = 0.0

    def now() -> float:
        nonlocal time, back
        time, back = time + back, 0.0
        return time

    # By hand: asked at t, it says t + 0.1 + 7 and the answer is there at t + 0.3, whose middle is t + 0.15.
    assert ahead_s(ask, now) == pytest.approx(7 - 0.05)


@pytest.mark.parametrize(
    ("ahead", "told"),
    [(4.9, None), (-4.9, None), (5.1, "its clock is 5 s ahead: "), (-90.0, "its clock is 90 s behind: ")],
)
def test_a_clock_that_goes_wrong(ahead: float, told: str | None) -> None:
    node = Node(address="10.0.0.7")
    found = ClusterCheck(address=None, storage="", nodes=[node])
    found.take_clock(node, ahead)
    assert [finding.what[: len(told or "")] for finding in found.findings] == ([] if told is None else [told])


# --------------------------------------------------------------------------------------------------- on one machine


def test_messages_arrive_and_unreachable_listeners_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dray.checks.inspector.SENDING_S", 0.01)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    inspector = Inspector()
    speed, error = inspector.send(inspector.listen())
    assert (speed is not None and speed > 0, error) == (True, "")
    with socket.socket() as deaf:  # the port is its own, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        assert inspector.send(deaf.getsockname()) == (None, "[Errno 111] Connection refused")


def test_every_gpu_of_every_node_takes_part_in_the_all_reduce() -> None:
    nodes = {Node(address="10.0.0.7", gpus_of_ray=8, gpus=["H100"] * 8): "a", Node(address="10.0.0.8"): "no GPU"}
    nodes |= {Node(address="10.0.0.9", gpus_of_ray=2, gpus=["H100"] * 8): "b"}
    assert each_gpu(nodes) == ["a"] * 8 + ["b"] * 2


def test_a_node_leaves_what_the_driver_then_sees(tmp_path: Path) -> None:
    write_sign(tmp_path, "sign")
    inspector = Inspector()
    assert inspector.storage(Location.of(tmp_path), "sign", "node-1") is None
    assert (tmp_path / "node-1").read_text() == "node-1"
    assert inspector.storage(Location.of(tmp_path), "another", "node-2") is not None
    assert not (tmp_path / "node-2").exists()


@pytest.mark.slow
def test_without_a_cluster_this_machine_is_looked_at(home: Path, dray: Dray) -> None:  # noqa: F811
    found = dray("cluster", "check", "--json").value
    assert (found["address"], found["is_fit"], found["findings"]) == (None, True, only_notes(found["findings"]))
    assert found["storage"] == str(home)
    [node] = found["nodes"]
    assert {name: node[name] for name in versions()} == versions()
    assert sorted(path.name for path in home.iterdir()) == ["digits-1"], "and nothing is left there"
    assert fields(found) <= JSON["cluster check"]


def only_notes(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in findings if not finding["is_wrong"]]


@pytest.mark.long
@pytest.mark.slow
def test_storage_is_that_of_a_config(home: Path, dray: Dray, tmp_path: Path) -> None:  # noqa: F811
    searcher = "searcher: {name: single, metric: loss, max_length: {batches: 1}}\n"
    (tmp_path / "file").touch()
    config = tmp_path / "asha.yaml"
    config.write_text(f"{searcher}checkpoint_storage: {tmp_path / 'file' / 'results'}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_DEBUG", "WARN")
        said = dray("cluster", "check", "--storage", config)
    assert said.code == 1
    assert f"error  the driver can't write to {tmp_path / 'file' / 'results'}: " in said.out
    assert re.search(r"^\S+: \d+ EFA devices?, NCCL with(out)? plugin, NCCL_DEBUG=WARN$", said.out, re.MULTILINE)
    assert said.out.endswith(": 1 error\n")


@pytest.mark.parametrize("where", ["s3://", "s3://bucket?regoin=x"])
def test_a_storage_that_there_can_not_be_is_bad_input(where: str, home: Path, dray: Dray) -> None:  # noqa: F811
    assert "--storage: s3://" in dray("cluster", "check", "--storage", where).is_one_line()
