"""By which network interface the ranks of a trial connect, and the cluster check's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.cluster.nodes import use_interface_of
from tests.cluster import misnamed
from tests.cluster.namespaces import isolated, run_isolated


def on_two_machines(test: Any) -> Any:
    for mark in (pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated):
        test = mark(test)
    return test


INTERFACES = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7", "fe80::1%eth0"]}


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.7", "eth0"), ("127.0.0.1", "lo"), ("127.0.0.2", "lo"), ("::1", "lo"), ("203.0.113.9", None)],
)
def test_the_interface_is_the_one_with_the_nodes_address(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None
) -> None:
    found = {name: [SimpleNamespace(address=each) for each in addresses] for name, addresses in INTERFACES.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    monkeypatch.setattr(os, "environ", {})
    use_interface_of(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_an_interface_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "bond0"


@on_two_machines
def test_nodes_whose_names_are_loopback_addresses_train_together(tmp_path: Path) -> None:
    ran = run_isolated(misnamed.__file__, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    findings = [each["what"] for each in json.loads(seen["check"]["out"])["findings"]]
    assert [what for what in findings if "all-reduce" in what] == []
    assert seen["trial"]["code"] == 0, seen["trial"]["err"]
    assert "1 trial (1 completed)" in seen["trial"]["err"]
