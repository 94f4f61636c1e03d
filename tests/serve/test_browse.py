"""``dray ui`` where no server is up: the page and the API show experiments, and change nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dray.serve.address import FILE
from tests.report.simulated import simulated

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def ask(url: str, token: str, method: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request(method, f"/api/v1{path}", headers={"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_it_shows_all_experiments_and_changes_none(tmp_path: Path) -> None:
    simulated(tmp_path / "digits-1", 4)
    command = [sys.executable, "-m", "dray.cli", "ui"]
    environment = {**os.environ, "DRAY_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            token = parse_qs(urlsplit(url).query)["token"][0]
            status, listed = ask(url, token, "GET", "/experiments")
            assert (status, [each["name"] for each in listed["experiments"]]) == (200, ["digits-1"])
            for path in ("/experiments/digits-1/pause", "/experiments/digits-1/stop"):
                status, refused = ask(url, token, "POST", path)
                assert (status, refused["error"].partition(";")[0]) == (409, "no server is up")
            assert ask(url, token, "GET", "/status")[1]["cluster"] == "no server is up"
            assert not (tmp_path / FILE).exists(), "commands must not take it for a server"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait() == 0
