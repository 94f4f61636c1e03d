"""A worker's host, without a cluster."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray import core
from dray.leases.messages import DeskReport, Reply
from dray.rpc.calls import PeerUnreachable
from dray.storage import checkpoints
from dray.training import cluster_info
from dray.training.cluster_info import note_hparams_read, use_cluster_info
from dray.training.host import Report
from dray.worker.host import RayHost
from dray.worker.lease import SharedSettings
from searchers import Metric, Objectives
from tests.workers import SETTINGS, lease_in, links


def host_in(directory: Path, desk: Any, settings: SharedSettings = SETTINGS, **fields: Any) -> RayHost:
    return RayHost(**links(desk), lease=lease_in(directory, **fields), settings=settings, code_dir=None)


class Desk:
    """Keeps the batches of each report's rows, and never answers."""

    def __init__(self) -> None:
        self.reports: list[list[int]] = []

    def report(self, lease: int, report: DeskReport, decides: bool) -> Future[Reply]:
        self.reports.append([row["batches"] for row in report.rows])
        return Future()


@pytest.mark.parametrize(("send_every_s", "expected"), [(0.0, [[1], [2], [3]]), (1000.0, [[1], [2, 3]])])
def test_metrics_within_an_interval_are_sent_together(
    send_every_s: float, expected: list[list[int]], tmp_path: Path
) -> None:
    desk: Any = Desk()
    host = RayHost(
        driver=desk, desk=desk, lease=lease_in(tmp_path, send_every_s=send_every_s), settings=SETTINGS, code_dir=None
    )
    for batches in (1, 2, 3):
        assert not host.publish(Report(batches=batches, training={"loss": 0.5}))
    host.close()
    assert desk.reports == expected


def test_the_log_of_a_trial_that_prints_nothing_says_how_far_it_came(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = host_in(tmp_path, Judge())
    report = Report(batches=4, training={"loss": 0.5}, validation={"loss": 0.25})
    with caplog.at_level("INFO"):
        saved = host.commit(host.new_checkpoint(4), report, {})
        host.publish(report)
    assert caplog.messages == [f"saved {saved}", "trained to batch 4: loss=0.5", "validated at batch 4: loss=0.25"]


def test_a_trial_that_has_left_prints_nothing_to_the_next_ones_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = host_in(tmp_path, Judge())
    with caplog.at_level("INFO"):
        host.late = []
        saved = host.commit(host.new_checkpoint(4), report := Report(batches=4, validation={"loss": 0.25}), {})
        host.publish(report)
        host.lease.store.warn("retrying")
    assert caplog.messages == []
    assert host.late == [f"saved {saved}", "validated at batch 4: loss=0.25", "retrying"]


@pytest.mark.parametrize("answer", [True, PeerUnreachable("lost")], ids=["a request", "the desk is lost"])
def test_a_request_to_stop_is_heard_for_good_and_a_lost_desk_is_none(tmp_path: Path, answer: Any) -> None:
    """The next report fails of a trial that has lost its desk, with a better error."""
    asked: Future[bool] = Future()
    desk: Any = SimpleNamespace(stop_wanted=lambda lease: asked)
    host = RayHost(driver=desk, desk=desk, lease=lease_in(tmp_path), settings=SETTINGS, code_dir=None)
    assert not host.stop_requested()
    if answer is True:
        asked.set_result(True)
    else:
        asked.set_exception(answer)
    assert [host.stop_requested() for _ in range(2)] == [answer is True] * 2


class Judge:
    """A desk that keeps the best score and the reports, and answers at once."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.reports: list[DeskReport] = []

    def improves(self, lease: int, score: float) -> bool:
        better, self.best = score < self.best, min(score, self.best)
        return better

    def report(self, lease: int, report: DeskReport, decides: bool) -> Reply:
        self.reports.append(report)
        return "continue"

    def may_commit(self, lease: int) -> bool:
        return True

    def saved(self, *about: object) -> None: ...


def test_a_restart_sends_the_rows_that_only_its_checkpoint_has(tmp_path: Path) -> None:
    lost, desk = host_in(tmp_path, Judge()), Judge()
    lost.publish(Report(batches=2, training={"loss": 0.5}))
    lost.commit(lost.new_checkpoint(4), Report(batches=4, training={"loss": 0.25}), {})
    unfinished = lost.new_checkpoint(5)
    host_in(tmp_path, desk).resume()
    assert [[row["batches"] for row in report.rows] for report in desk.reports] == [[2, 4]]
    assert not unfinished.exists()


def test_a_trial_with_long_steps_says_each_minute_how_far_it_is_but_not_past_a_pending_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, batches, desk = 0.0, 5, Judge()
    monkeypatch.setattr("dray.worker.host.time.monotonic", lambda: now)
    host = host_in(tmp_path, desk)
    host.watch(lambda: (batches, 0))

    def after(seconds: float, trained: int) -> list[tuple[int, str, float]]:
        nonlocal now, batches
        now, batches = now + seconds, trained
        desk.reports.clear()
        host.beat()
        return [(row["batches"], row["kind"], row["value"]) for report in desk.reports for row in report.rows]

    assert after(59, 7) == []
    assert after(1, 8) == [(8, "system", (8 - 5) / 60)]
    assert after(70, 8) == [], "no batch was trained"
    host.publish(Report(batches=9, training={"loss": 0.5}))
    assert after(59, 12) == [], "it has just reported"
    staging = host.new_checkpoint(12)
    assert after(70, 20) == [], "the search may stop it at batch 12"
    report = Report(batches=12, validation={"loss": 0.25}, decides=True)
    host.commit(staging, report, {})
    host.publish(report)
    assert after(59, 21) == []
    assert after(1, 22) == [(22, "system", (22 - 20) / 60)]


def test_a_validation_that_was_saved_anyway_is_the_one_to_beat(tmp_path: Path) -> None:
    host = host_in(tmp_path, Judge())
    host.publish(Report(batches=1, training=None, validation={"loss": 0.5}, decides=True))
    assert not host.is_best({"loss": 0.6})
    assert host.is_best({"loss": 0.4})
    assert not host.is_best({"loss": float("nan")})


def test_a_trial_that_may_have_read_all_hyperparameters_has_read_them(tmp_path: Path) -> None:
    hparams = {"lr": 0.1, "dropout": 0.5}
    info = core.ClusterInfo(trial=core.TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams=hparams))
    for name, read in (("lr", ("lr",)), (None, ("lr", "dropout"))):
        desk = Judge()
        host = host_in(tmp_path, desk, hparams=hparams)
        with use_cluster_info(info):
            note_hparams_read(name)
            host.publish(Report(batches=1, validation={"loss": 0.5}, decides=True, read=cluster_info.hparams_read))
        assert desk.reports[0].read == read


SEVERAL = replace(SETTINGS, objectives=Objectives((Metric(name="mb", at_most=100), Metric(name="loss"))))


def test_best_validation_of_several_metrics_keeps_the_limits(tmp_path: Path) -> None:
    host = host_in(tmp_path, Judge(), SEVERAL)
    assert list(host.metrics) == ["loss", "mb"]
    assert not host.is_best({"loss": 0.1, "mb": 101.0})
    assert host.is_best({"loss": 0.5, "mb": 100.0})
    assert not host.is_best({"loss": 0.6, "mb": 1.0})


def test_report_has_all_metrics_in_the_searches_order_and_so_has_a_checkpoint(tmp_path: Path) -> None:
    desk = Judge()
    host = host_in(tmp_path, desk, SEVERAL)
    for mb in (50.0, 150.0):
        host.publish(Report(batches=1, validation={"loss": 0.5, "mb": mb}, decides=True))
    assert [(report.value, report.metrics) for report in desk.reports] == [(0.5, (50.0, 0.5)), (None, (150.0, 0.5))]
    carried = host.reports.carried(Report(batches=1, validation={"loss": 0.5, "mb": 50.0}))
    assert carried.metrics == (50.0, 0.5)


def test_pulse_changes_with_every_batch_and_every_step_of_a_transfer(tmp_path: Path) -> None:
    host = host_in(tmp_path, None)
    progress = (0, 0)
    host.watch(lambda: progress)
    first = host.pulse()
    assert host.pulse() == first
    progress = (1, 0)
    assert host.pulse() != first
    second = host.pulse()
    checkpoints.CheckpointStore.transferred += 1
    assert host.pulse() != second


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
    host = host_in(tmp_path, None)
    staging = host.lease.store.stage(3)
    (staging / "state").write_text("x")
    checkpoint = host.lease.store.commit(staging, 3)
    verified: list[Path] = []
    monkeypatch.setattr(checkpoints, "verify", lambda path, **_: verified.append(path) or path)
    assert host.resume() is None
    assert host.latest_checkpoint == host.last_checkpoint() == checkpoint
    assert host.open_checkpoint(checkpoint, only=["metadata.json"]) == Path(checkpoint)
    assert host.open_checkpoint(checkpoint) == Path(checkpoint)
    assert len(verified) == 1
    # Later there may be another of this name, or a damaged one.
    assert host.open_checkpoint(checkpoint) == Path(checkpoint)
    assert len(verified) == 2
