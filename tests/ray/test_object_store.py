"""A search whose checkpoints are in S3: away for a while, its driver killed, a checkpoint damaged, and resumed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dray
from dray.errors import ConfigError
from dray.experiment.retention import Policy, saved_in
from dray.records.directory import ExperimentDirectory
from dray.storage import RemoteDirectory
from tests.ray.harness import (
    OWN_CLUSTER,
    TRIALS,
    Attempt,
    Driver,
    attempts,
    ends,
    journal,
    recorded,
    write_config,
)
from tests.storage.s3 import LocalS3

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

TRIAL_COUNT, BATCHES = 3, 90
PERIOD = 30
"""Batches between checkpoints: three seconds, so that one is missed, and that is told, before the next is due."""

AWAY_S = 30.0  # longer than training can go on without it: a second checkpoint waits for the first


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    server = LocalS3()
    yield server
    server.stop()


def storage(s3: LocalS3, **fields: Any) -> dict[str, Any]:
    endpoint = {"endpoint_url": f"http://127.0.0.1:{s3.port}", "access_key": "test", "secret_key": "S3CR3T"}
    return {"type": "s3", "bucket": s3.bucket, "prefix": "results", **endpoint, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    path: Path
    record: Path
    damaged: str
    before: int  # the batch of the checkpoint before the damaged one
    victim: Attempt
    number: int  # how many attempts its trial had had
    output: str


@pytest.fixture(scope="module")
def story(s3: LocalS3, drive: Callable[..., Driver], tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("s3")
    record, path = directory / "record", directory / "digits-1"
    config = recorded(record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.1)
    config["min_validation_period"] = {"batches": PERIOD}
    file = write_config(directory, {**config, "checkpoint_storage": storage(s3)})

    def trained() -> int:
        return sum(len(each.batches) for mine in attempts(record).values() for each in mine)

    def interrupted() -> int:
        """A trial that runs and has two checkpoints, plus 1; or 0."""
        for trial, mine in attempts(record).items():
            names = s3.files("results", path.name, f"trial_{trial}")
            if (
                trial not in ends(path)
                and mine[-1].batches
                and sum(name.endswith("manifest.json") for name in names) > 1
            ):
                return trial + 1
        return 0

    driver = drive("create", file, TRIALS, "--path", path)
    driver.wait_for(lambda: trained() > PERIOD // 2, "a trial trains")
    s3.stop()
    gone = time.monotonic()
    try:
        driver.wait_for(lambda: "; retrying for" in log_of(path), "a trial misses the store")
        away = trained()
        driver.wait_for(lambda: trained() >= away + 3, "training goes on")
        driver.wait_for(lambda: time.monotonic() - gone > AWAY_S, "the store to come back")
    finally:
        s3.start()
    trial = driver.wait_for(interrupted, "a trial has two checkpoints") - 1
    driver.kill()
    store = ExperimentDirectory.open(path).store(trial)
    (_, damaged), (before, _) = store.listed()[:2]
    filesystem, place = store.filesystem_of(damaged)
    with filesystem.open_output_stream(f"{place}/state-dict.pth") as target:
        target.write(b"does not match its checksum")
    number = len(attempts(record)[trial])
    driver = drive("resume", path)
    assert driver.wait() == 0, driver.log.read_text()
    return Story(
        path=path, record=record, damaged=damaged, before=before, victim=attempts(record)[trial][number - 1],
        number=number, output=driver.log.read_text(),
    )  # fmt: skip


def log_of(path: Path) -> str:
    return "".join(log.read_text() for log in path.glob("trial_*/logs/rank_0.log"))


def test_all_trials_complete_and_no_batch_is_left_out(story: Story) -> None:
    result = dray.Result(story.path)
    assert result.trials["state"].tolist() == ["COMPLETED"] * TRIAL_COUNT
    assert ends(story.path) == dict.fromkeys(range(TRIAL_COUNT), 1)
    assert result.trials["restarts"].eq(0).all(), "the store's absence fails no trial"
    for mine in attempts(story.record).values():
        assert {batch for each in mine for batch in each.batches} == set(range(BATCHES))


def test_the_trial_of_the_damaged_checkpoint_goes_on_from_the_one_before(story: Story) -> None:
    after = attempts(story.record)[story.victim.trial][story.number]
    assert after.batches[0] == story.before
    [damaged] = [record for record in journal(story.path) if record["event"] == "damaged"]
    assert (damaged["trial"], damaged["checkpoint"]) == (story.victim.trial, story.damaged)
    assert "state-dict.pth has 20 bytes" in damaged["error"]
    assert story.output.count(f"trial {story.victim.trial} skipped a checkpoint: ") == 1


def test_the_bucket_holds_what_the_policy_keeps_and_nothing_else(story: Story, s3: LocalS3) -> None:
    kept = {each.checkpoint for each in saved_in(journal(story.path))}
    there = {name.rpartition("/")[0] for name in s3.files("results", story.path.name) if name.endswith("manifest.json")}
    assert there == {checkpoint.partition("?")[0].partition(f"{story.path.name}/")[2] for checkpoint in kept}
    errors = dray.Result(story.path).metrics.query("kind == 'validation' and name == 'error'")
    for trial, mine in errors.groupby("trial_id"):
        best = mine.loc[mine["value"].idxmin(), "batches"]
        assert {f"trial_{trial}/checkpoint_{batches}" for batches in (best, BATCHES)} <= there
    assert len(there) <= TRIAL_COUNT * (Policy().trial_best + Policy().trial_latest)
    assert not list(story.path.glob("trial_*/checkpoint_*")), "none of them is on the local disk"
    assert not list(story.path.glob("trial_*/.*")), "nor what they were staged and opened in"


def test_rays_checkpoint_of_the_best_trial_is_in_the_bucket(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    result = dray.Result(story.path)
    best = result.best_trial
    assert best.checkpoint.path.startswith("bucket/results/digits-1/trial_")
    with best.checkpoint.as_directory() as directory:
        state = torch.load(Path(directory) / "state-dict.pth", weights_only=True)
    info = SimpleNamespace(trial=SimpleNamespace(trial_id=best.trial_id))
    monkeypatch.setattr(dray, "get_cluster_info", lambda: info)  # this trial asks for it when it is made
    trial: Any = result.load_best_trial()
    assert torch.equal(trial.model.weight, state["models_state_dict"][0]["weight"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bucket": "elsewhere"}, r"checkpoint_storage: can't write to s3://elsewhere/results.*NO_SUCH_BUCKET"),
        ({"access_key": "WRONG"}, r"checkpoint_storage: .*INVALID_ACCESS_KEY_ID.*check its name, and the credentials"),
        ({"endpoint_url": "http://127.0.0.1:9"}, r"checkpoint_storage: .*NETWORK_CONNECTION"),
    ],
)
def test_a_store_that_cant_be_used_is_told_before_anything_starts(
    s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("dray.records.directory.PROBE_S", 0)
    config = recorded(tmp_path / "record", trials=1, batches=10)
    config["checkpoint_storage"] = storage(s3, **fields)
    s3.demand_keys("access_key" in fields)
    try:
        with pytest.raises(ConfigError, match=says) as told:
            dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment").run()
    finally:
        s3.demand_keys(False)
    assert "S3CR3T" not in str(told.value)
    assert not (tmp_path / "experiment").exists()


def test_another_machine_goes_on_with_what_is_in_the_bucket(
    story: Story, s3: LocalS3, tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    """By one more trial, with the credentials of the environment, which the workers of its cluster have too."""
    environment = {"DRAY_HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    uri = s3.uri("results", story.path.name)
    driver = drive("extend", uri, "--max-trials", TRIAL_COUNT + 1, **OWN_CLUSTER, **environment)
    assert driver.wait() == 0, driver.log.read_text()
    result = dray.Result(tmp_path / story.path.name)
    assert result.trials["state"].tolist() == ["COMPLETED"] * (TRIAL_COUNT + 1)
    assert ends(result.path) == dict.fromkeys(range(TRIAL_COUNT + 1), 1)
    assert set(result.metrics["trial_id"]) == set(range(TRIAL_COUNT + 1))
    assert f"trial_{TRIAL_COUNT}/checkpoint_{BATCHES}/manifest.json" in s3.files("results", story.path.name)


def test_a_driver_that_was_taken_for_dead_ends_when_it_is_back(
    s3: LocalS3, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    """Its machine froze, say; another has continued the search meanwhile. A third is refused while that one runs."""
    record, path = tmp_path / "record", tmp_path / "one" / "frozen"
    config = recorded(record, trials=2, batches=BATCHES, pause_s=0.1)
    config["min_validation_period"] = {"batches": PERIOD}
    file = write_config(tmp_path, {**config, "checkpoint_storage": storage(s3)})
    first = drive("create", file, TRIALS, "--path", path, **OWN_CLUSTER)
    first.wait_for(lambda: f"{path.name}/journal.jsonl" in s3.files("results"), "a copy is in the bucket")
    first.wait_for(lambda: any(mine[-1].batches for mine in attempts(record).values()), "a trial trains")
    first.process.send_signal(signal.SIGSTOP)
    there = tmp_path / "two" / "frozen"
    second = drive("create", file, TRIALS, "--path", there, **OWN_CLUSTER)
    try:
        second.wait_for(lambda: (there / "journal.jsonl").exists() and len(attempts(record)) > 0, "it goes on there")
        third = drive("create", file, TRIALS, "--path", tmp_path / "three" / "frozen", **OWN_CLUSTER)
        assert third.wait() == 1
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 1
    assert second.wait() == 0, second.log.read_text()
    output = second.log.read_text()
    assert f"({path}) did not exit cleanly, or is still running the experiment in s3://" in output
    assert f"({there}) is running this experiment, in s3://" in output
    assert f"({there}) has taken over the experiment; this driver has exited" in output
    assert ends(there) == {0: 1, 1: 1}
    remote = RemoteDirectory(s3.place("results", "frozen"))
    assert remote.read("journal.jsonl") == (there / "journal.jsonl").read_bytes()
    assert ends(path) != ends(there)
