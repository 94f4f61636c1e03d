"""The network interface by which the ranks of a trial connect, and those of the cluster check."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from dray.training.parallel.transport import use_interface_of

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
