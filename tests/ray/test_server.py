"""``dray serve`` on a real Ray: experiments share its worker groups, and nothing is lost when any process dies."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import dray
from dray.serve import client
from dray.serve.client import Unreachable
from dray.serve.control import Submitted
from dray.serve.verbs.on_server import OnServer
from tests.ray.harness import STARTS_IN_S, TRIALS, attempts, descendants, journal, lines, saved_batches
from tests.ray.scraping import scraped, values
from tests.ray.serving import Served, copy_of, served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ray_is_up: None) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("server") / "results") as found:
        yield found


def losses(record: Path) -> dict[tuple[int, int], set[float]]:
    """All losses that were noted of each batch of each trial."""
    found: dict[tuple[int, int], set[float]] = {}
    for line in lines(record):
        if "batch" in line:
            found.setdefault((line["trial"], line["batch"]), set()).add(line["loss"])
    return found


def check_training(record: Path, *, trials: int, batches: int) -> None:
    """Each batch was trained, one process at a time, and when it was trained again it had the same weights."""
    attempts(record)
    found = losses(record)
    assert sorted(found) == [(trial, batch) for trial in range(trials) for batch in range(batches)]
    assert all(len(values) == 1 for values in found.values())


def has_saved(server: Served, submitted: Submitted, batches: int = 10) -> bool:
    return saved_batches(server.path(submitted), 0) >= batches


# -------------------------------------------------------------------------------------------------------- one design
def test_a_second_experiment_trains_in_the_firsts_processes(server: Served, tmp_path: Path) -> None:
    new = ('return {"loss": loss}', 'return {"loss": loss, "new": 1.0}')
    changed = copy_of(TRIALS, tmp_path / "changed", recorded=new)
    first = server.submit("first")
    server.wait_until(first, "COMPLETED")
    second = server.submit("second", code=changed)
    server.wait_until(second, "COMPLETED")
    [one], [other] = ({line["pid"] for line in lines(server.record(name))} for name in ("first", "second"))
    assert one == other
    bars = {bar["experiment"]: bar for bar in server.client.queue()["lanes"]["bars"]}
    before, after = bars[first.name], bars[second.name]
    assert (before["outcome"], before["lanes"]) == ("completed", after["lanes"])
    assert before["began"] < before["ended"] <= after["began"] < after["ended"]
    assert "new" not in dray.Result(server.path(first)).metrics["name"].to_numpy()
    assert "new" in dray.Result(server.path(second)).metrics["name"].to_numpy()

    def exported() -> bool:
        samples = scraped()
        decisions = values(samples, "dray_decisions_total", first.name)
        saved = values(samples, "dray_checkpoint_seconds_count", first.name)
        return (decisions, saved) == ({"stop": 1}, {"": 2})

    server.wait_for(exported, "the first's end and two checkpoints at the metrics endpoint")


# ------------------------------------------------------------------------------------------------------------ faults


def test_a_server_that_is_killed_finds_its_experiments_again(server: Served) -> None:
    """One of them has continued by itself after the death of its process."""
    running = server.submit("running-on", batches=80, pause_s=0.1)
    server.wait_for(lambda: has_saved(server, running), "a checkpoint")
    driver = server.driver_of(running)
    assert driver is not None
    os.kill(driver, signal.SIGKILL)
    paused = server.submit("paused", batches=20)
    OnServer(server.client, paused.name).pause()
    server.wait_for(lambda: has_saved(server, running, 30), "a checkpoint by its next process")
    queue = server.client.queue()
    assert all(each["why"] for each in queue["entries"] if not each["slots"])
    ended = {bar["experiment"] for bar in queue["lanes"]["bars"] if bar["ended"] is not None}
    server.kill()
    lost = server.home / "lost"  # was being created as the server died: its client has got no answer
    lost.mkdir()
    shutil.copy(server.path(paused) / "experiment.yaml", lost)
    (server.home / ".server" / "creations" / "1").symlink_to(lost)
    server.restart()
    assert not lost.exists()
    assert ended <= {bar["experiment"] for bar in server.client.queue()["lanes"]["bars"]}
    server.wait_until(running, "COMPLETED")
    check_training(server.record("running-on"), trials=1, batches=80)
    assert server.client.experiment(running.name).restarts == 1
    assert server.client.experiment(paused.name).state == "PAUSED"
    assert [record["event"] for record in journal(server.path(running))].count("start") == 1


@pytest.mark.long
def test_a_server_whose_own_ray_dies_finds_its_experiment_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.setattr(client, "PATIENCE_S", STARTS_IN_S)
    with served(tmp_path / "results", RAY_ADDRESS="") as server:
        submitted = server.submit("raylet-lost", batches=60, pause_s=0.1)
        server.wait_for(lambda: has_saved(server, submitted), "a checkpoint")
        since = server.client.status().since
        [raylet] = [pid for pid, name in descendants(server.process.pid).items() if name == "raylet"]
        os.kill(raylet, signal.SIGKILL)
        try:
            assert "search done (completed)" in list(server.client.follow(submitted.name))[-1]
        except Unreachable:
            raise AssertionError(server.log.read_text()) from None
        check_training(server.record("raylet-lost"), trials=1, batches=60)
        assert server.client.status().since > since
        assert server.process.poll() is None, "in the same process"
