"""Alerts of a server and of its experiments, on a real Ray: by commands, and whatever is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ray.harness import journal
from tests.ray.serving import served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]


def told(file: Path) -> list[dict[str, Any]]:
    """What a command has been given."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_people_are_told_of_each_thing_once_though_the_driver_is_killed(tmp_path: Path) -> None:
    own, operators = tmp_path / "own", tmp_path / "operators"
    settings = tmp_path / "server.yaml"
    settings.write_text(f"notify: {{command: 'cat >> {operators}; echo >> {operators}', idle: 1s}}")
    notify = {"command": f"cat >> {own}; echo >> {own}", "budget": 0.003}
    with served(tmp_path / "results", settings=settings) as server:
        options = {"entrypoint": "recorded:Faulty", "budget": {"time": "10m"}, "notify": notify}
        submitted = server.submit("told", trials=4, batches=80, pause_s=0.1, **options)

        def are_told() -> bool:
            ids = {event: {each["id"] for each in records() if each["event"] == event} for event in ("alert", "told")}
            return len(ids["alert"]) == 2 and ids["alert"] == ids["told"]

        def records() -> list[dict[str, Any]]:
            return journal(server.path(submitted))

        server.wait_for(are_told, "the failed trial, and the budget")
        driver = server.driver_of(submitted)
        assert driver is not None
        os.kill(driver, signal.SIGKILL)
        server.wait_until(submitted, "COMPLETED")
        server.wait_for(lambda: {"idle", "completed"} <= {each["event"] for each in told(operators)}, "the operator")
        mine = {each["event"]: each["text"] for each in told(own)}
        assert len(told(own)) == len(mine) == 3
        assert "trial 1 failed for good: ArithmeticError: it always ends so (recorded.py:" in mine["trial_failed"]
        assert "of the budget is spent: " in mine["budget"]
        assert "told" in mine["completed"]
        assert "1 of 5 trials failed" in mine["completed"]
        of_server = [each["event"] for each in told(operators) if each["event"] != "idle"]
        assert sorted(of_server) == ["completed", "trial_failed"]
        alerts = server.client.read(submitted.name, now=1)["alerts"]
        assert {each["event"]: each["error"] for each in alerts} == dict.fromkeys(mine)
