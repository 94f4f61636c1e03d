"""The disk of a server's results is really full, a tmpfs of some MB: it is told, nothing is lost, and all goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dray
from dray.serve.client import Refused
from tests.ray.harness import saved_batches
from tests.ray.serving import Served, served
from tests.ray.test_server import check_training

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_is_up"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a disk"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "results"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", directory], check=False).returncode:
        pytest.skip("no mounts here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def dray_command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dray.cli", *arguments]
    environment = {**os.environ, "DRAY_HOME": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def fill(disk: Path) -> None:
    """Leave no byte, except for what is free in the last pages of other files."""
    with contextlib.suppress(OSError), (disk / ".ballast").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def test_a_server_says_that_its_disk_is_full_before_anything_starts(disk: Path) -> None:
    fill(disk)
    said = dray_command(disk, "serve")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == f"dray: the disk is full: 0 MiB are free in {disk}; free 64 MiB\n"


@pytest.mark.long
def test_a_full_disk_is_told_and_all_goes_on_when_there_is_room(disk: Path) -> None:
    with served(disk) as server:
        check_full_disk(server)


def check_full_disk(server: Served) -> None:
    running = server.submit("running", trials=2, batches=60, pause_s=0.1, resources={"slot": "cpu", "priority": 1})
    waiting = server.submit("waiting", batches=20)
    paused = server.submit("paused", batches=20)
    server.client.pause(paused.name)
    server.wait_until(paused, "PAUSED")
    server.wait_for(lambda: saved_batches(server.path(running), 0) >= 10, "a checkpoint")
    noted = server.path(running).joinpath("journal.jsonl")
    before = noted.read_bytes()

    fill(server.home)
    server.wait_for(lambda: server.driver_of(running) is None, "its process to end")
    for each in (running, waiting):
        now = server.wait_until(each, "QUEUED")
        assert "0 MiB are free" in now.error
        assert "free 64 MiB" in now.error
    assert f"{running.name}: the disk is full" in dray_command(server.home, "experiment", "list").stderr
    with pytest.raises(Refused, match="free 64 MiB"):
        server.submit("refused")
    with contextlib.suppress(Refused):  # a record may fit in what is left of a page
        while True:
            server.client.change(paused.name, tags=[], notes="long " * 1000)
    with pytest.raises(Refused, match="free some space, and try again"):
        server.client.change(paused.name, tags=[], notes="long " * 1000)
    assert server.client.experiment(paused.name).state == "PAUSED"
    assert noted.read_bytes().startswith(before)

    (server.home / ".ballast").unlink()
    for each in (running, waiting):
        ended = server.wait_until(each, "COMPLETED")
        assert (ended.error, ended.restarts) == ("", 0)
    check_training(server.record("running"), trials=2, batches=60)
    check_training(server.record("waiting"), trials=1, batches=20)
    found = dray.Result(server.path(running)).metrics.query("kind == 'validation' and name == 'error'")
    assert found.groupby("trial_id")["batches"].apply(list).tolist() == [list(range(10, 61, 10))] * 2
    server.client.activate(paused.name)
    server.wait_until(paused, "COMPLETED")
    assert [path.name for path in server.home.glob("refused*")] == []
    assert server.process.poll() is None
