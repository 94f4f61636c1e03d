"""Worker groups of a server that no experiment needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.serving import served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


@pytest.mark.long
def test_groups_that_no_experiment_needs_end_and_leave_nothing(tmp_path: Path) -> None:
    with served(tmp_path / "results", idle_s=1) as server:
        left = server.home / ".server"
        for name, environment in (("plain", {}), ("red", {"environment_variables": ["COLOUR=red"]})):
            submitted = server.submit(name, environment=environment)
            server.wait_for(lambda: list(left.glob("server-*")), "groups")
            server.wait_until(submitted, "COMPLETED")
        server.wait_for(lambda: not list(left.glob("server-*")), "nothing to be left of them")
        assert server.client.status().groups == 0
        server.wait_until(server.submit("afterwards"), "COMPLETED")
