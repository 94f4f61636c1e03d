"""A worker's host, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dray.storage import CheckpointStore, checkpoints
from dray.training.host import Report
from dray.training.units import Batch
from dray.worker import desk_link
from dray.worker.host import RayHost
from dray.worker.lease import SharedSettings, TrialLease
from searchers import Metric, Objectives

SETTINGS = SharedSettings(
    config={},
    metric="loss",
    smaller_is_better=True,
    max_length=Batch(100),
    rungs=(),
    validation_period=None,
    checkpoint_period=None,
)


def lease_in(directory: Path, **fields: Any) -> TrialLease:
    where = {"trial_dir": directory, "store": CheckpointStore(directory)}
    return TrialLease(number=1, client="run", trial_id=1, trial_seed=0, hparams={}, last_step=None, **where, **fields)


class Desk:
    """Keeps the batches of each report's rows, and never answers."""

    def __init__(self) -> None:
        self.reports: list[list[int]] = []
        self.report = self

    def remote(self, lease: int, report: dict[str, Any], decides: bool) -> object:
        self.reports.append([row["batches"] for row in report["rows"]])
        return object()


@pytest.mark.parametrize(("send_every_s", "expected"), [(0.0, [[1], [2], [3]]), (1000.0, [[1], [2, 3]])])
def test_metrics_within_an_interval_are_sent_together(
    send_every_s: float, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_link, "ray", SimpleNamespace(wait=lambda refs, timeout: ([], refs)))
    desk = Desk()
    host = RayHost(desk=desk, lease=lease_in(tmp_path, send_every_s=send_every_s), settings=SETTINGS, code_dir=None)
    for batches in (1, 2, 3):
        assert not host.publish(Report(batches=batches, training={"loss": 0.5}))
    host.close()
    assert desk.reports == expected


def test_a_request_to_stop_is_heard_after_the_desk_was_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception | bool] = [ray.exceptions.ActorUnavailableError("no connection", None), True]

    def get(answer: Exception | bool) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = SimpleNamespace(get=get, wait=lambda refs, timeout: (refs, []), exceptions=ray.exceptions)
    monkeypatch.setattr(desk_link, "ray", fake)
    desk = SimpleNamespace(stop_wanted=SimpleNamespace(remote=lambda lease: answers.pop(0)))
    host = RayHost(desk=desk, lease=lease_in(tmp_path), settings=SETTINGS, code_dir=None)
    assert [host.stop_requested() for _ in range(3)] == [False, True, True]


class Judge:
    """A desk that keeps the best score, and answers at once; `ray` of the module is then this object too."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.improves = SimpleNamespace(remote=self._improves)
        self.report = SimpleNamespace(remote=lambda *_: "continue")

    def _improves(self, lease: int, score: float) -> bool:
        better, self.best = score < self.best, min(score, self.best)
        return better

    def get(self, answer: Any) -> Any:
        return answer

    def wait(self, refs: list[Any], timeout: float) -> Any:
        return refs, []


def test_a_validation_that_was_saved_anyway_is_the_one_to_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Judge()
    monkeypatch.setattr(desk_link, "ray", desk)
    host = RayHost(desk=desk, lease=lease_in(tmp_path), settings=SETTINGS, code_dir=None)
    host.publish(Report(batches=1, training=None, validation={"loss": 0.5}, decides=True))
    assert not host.is_best({"loss": 0.6})
    assert host.is_best({"loss": 0.4})
    assert not host.is_best({"loss": float("nan")})


SEVERAL = replace(SETTINGS, objectives=Objectives((Metric(name="mb", at_most=100), Metric(name="loss"))))


def test_best_validation_of_several_metrics_keeps_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_link, "ray", desk := Judge())
    host = RayHost(desk=desk, lease=lease_in(tmp_path), settings=SEVERAL, code_dir=None)
    assert list(host.metrics) == ["loss", "mb"]
    assert not host.is_best({"loss": 0.1, "mb": 101.0})
    assert host.is_best({"loss": 0.5, "mb": 100.0})
    assert not host.is_best({"loss": 0.6, "mb": 1.0})


def test_report_has_all_metrics_in_the_searches_order_and_so_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    desk = Judge()

    def take(lease: int, report: dict[str, Any], decides: bool) -> str:
        sent.append(report)
        return "continue"

    desk.report = SimpleNamespace(remote=take)
    monkeypatch.setattr(desk_link, "ray", desk)
    host = RayHost(desk=desk, lease=lease_in(tmp_path), settings=SEVERAL, code_dir=None)
    for mb in (50.0, 150.0):
        host.publish(Report(batches=1, validation={"loss": 0.5, "mb": mb}, decides=True))
    assert [(report["value"], report["metrics"]) for report in sent] == [(0.5, (50.0, 0.5)), (None, (150.0, 0.5))]
    carried = host.reports.carried(Report(batches=1, validation={"loss": 0.5, "mb": 50.0}))
    assert carried.metrics == (50.0, 0.5)


def test_pulse_changes_with_every_batch_and_while_waiting_for_the_store(tmp_path: Path) -> None:
    lease = lease_in(tmp_path)
    store = lease.store
    host = RayHost(desk=None, lease=lease, settings=SETTINGS, code_dir=None)
    progress = (0, 0)
    host.watch(lambda: progress)
    first = host.pulse()
    assert host.pulse() == first
    progress = (1, 0)
    assert host.pulse() != first
    store.transfers.progressed()
    assert host.pulse() != host.pulse()
    store.transfers.ended()
    assert host.pulse() == host.pulse()


def test_a_trial_can_not_change_the_next_ones_config() -> None:
    config = {"hyperparameters": {"lr": 0.1}, "searcher": {"metric": "loss"}}
    settings = replace(SETTINGS, config=config, data={"path": {"train": "/data"}})
    given = settings.config_for_code()
    given["hyperparameters"].pop("lr")
    given["data"]["path"]["train"] = "/elsewhere"
    assert settings.config_for_code() == {**config, "data": {"path": {"train": "/data"}}}
    assert config["hyperparameters"] == {"lr": 0.1}


def test_the_checkpoint_that_a_trial_resumes_from_is_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = lease_in(tmp_path)
    host = RayHost(desk=None, lease=lease, settings=SETTINGS, code_dir=None)
    staging = lease.store.stage(3)
    (staging / "state").write_text("x")
    checkpoint = lease.store.commit(staging, 3)
    verified: list[Path] = []
    monkeypatch.setattr(checkpoints, "verify", lambda path, **_: verified.append(path) or path)
    assert host.resume() is None
    assert host.latest_checkpoint == checkpoint
    assert host.open_checkpoint(checkpoint, only=["metadata.json"]) == Path(checkpoint)
    assert host.open_checkpoint(checkpoint) == Path(checkpoint)
    assert len(verified) == 1
    # Later there may be another of this name, or a damaged one.
    assert host.open_checkpoint(checkpoint) == Path(checkpoint)
    assert len(verified) == 2
