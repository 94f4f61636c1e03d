"""Drivers as Ray's jobs, on a cluster with a token: who may, what an error looks like, and what a stop leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import jobs
from tests.cluster.namespaces import isolated, run_isolated
from tests.ray.harness import ends

pytestmark = [pytest.mark.ray, pytest.mark.slow, *isolated]


def seen(directory: Path, case: str) -> dict[str, Any]:
    ran = run_isolated(jobs.__file__, directory, case, home=directory / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    for name, command in found.items():
        if isinstance(command, dict):
            print(f"{name}: exit code {command['rc']} after {command['seconds']:.1f} s")
    return found


@pytest.mark.long
def test_a_job_needs_the_clusters_token_and_so_does_a_driver_which_says_so_in_a_line(tmp_path: Path) -> None:
    found = seen(tmp_path, "token")
    right = found["job, right"]
    assert right["rc"] == 0, right["said"]
    assert "states: COMPLETED" in right["said"]
    assert ends(tmp_path / "right") == {0: 1}
    assert found["jobs"]["said"].count("submission_id='raysubmit_") == 1, "and no other job was taken"
    none = "it requires a token, and this process has none; export RAY_AUTH_MODE=token"
    for name, why in {
        "none": none,
        "none, but asked for": none,
        "wrong": "it rejects this process's token; export RAY_AUTH_MODE=token",
    }.items():
        job, driver, command = (found[f"{kind}, {name}"] for kind in ("job", "driver", "command"))
        assert job["rc"] == 1
        assert "AuthenticationError" in job["said"]
        assert driver["rc"] == 1
        told = f"the Ray cluster at {jobs.GCS} refuses this process: {why}"
        assert f"ConnectionError: {told}" in driver["said"].splitlines()[-1]
        assert command["rc"] == 1
        assert command["said"].count("\n") == 1, command["said"]
        assert command["said"].startswith(f"dray: {told}")
        assert not (tmp_path / name / "trial_0").exists()
    token = (tmp_path / "home" / ".ray" / "auth_token").read_text().strip()
    assert token not in json.dumps(found), "it is never shown"


@pytest.mark.long
def test_a_job_that_is_stopped_has_saved_and_another_goes_on(tmp_path: Path) -> None:
    found = seen(tmp_path, "stopped")
    assert "was stopped" in found["stopped"]["said"]
    assert found["stop"]["seconds"] < 60, "it has ended by itself"
    assert f"dray experiment resume {tmp_path / 'stopped'}" in found["log"]["said"]
    trained = found["trained"]
    assert trained == list(range(len(trained)))
    assert 0 < found["saved"] == len(trained) < jobs.BATCHES
    assert found["resumed"]["rc"] == 0, found["resumed"]["said"]
    assert found["all"] == list(range(jobs.BATCHES)), "not a batch is lost, and none trained twice"
