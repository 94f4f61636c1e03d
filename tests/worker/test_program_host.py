"""How a worker's host treats the reports of a program with its own training loop; the desk is a fake here."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray.leases.messages import DeskReport
from dray.storage import CheckpointStore
from dray.training.errors import SearcherMetricError, TrialEnded
from dray.training.host import Report
from dray.training.units import Batch, Epoch, Records, TrainUnit
from dray.worker.host import RayProgramHost
from dray.worker.lease import SharedSettings
from tests.worker.test_host import host_in
from tests.workers import SETTINGS, lease_in, links

BY_BATCHES = replace(SETTINGS, max_length=Batch(16), rungs=(Batch(4), Batch(8), Batch(16)))
BY_EPOCHS = replace(BY_BATCHES, max_length=Epoch(4), rungs=(Epoch(1), Epoch(2), Epoch(4)))
BY_TIME = replace(BY_BATCHES, max_length=None, rungs=(), time_metric="seconds", time_rungs=(10, 20, 40))


class Desk:
    """Answers a decided report at once, by its step; keeps all messages."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.reports: list[DeskReport] = []
        self.decided: list[tuple[float | None, float | None]] = []
        self.saves: list[tuple[int, float | None]] = []
        self.save_s: list[float | None] = []
        self.score: float | None = None

    def report(self, lease: int, report: DeskReport, decides: bool) -> str:
        self.reports.append(report)
        if decides:
            self.decided.append((report.step, report.value))
            return self.answers.get(f"at_{report.step}", "continue")
        return "continue"

    def may_commit(self, lease: int) -> bool:
        return True

    def saved(self, trial: int, checkpoint: str, batches: int, value: float | None, seconds: float | None) -> None:
        self.saves.append((batches, value))
        self.save_s.append(seconds)

    def improves(self, lease: int, score: float) -> bool:
        self.score = score if self.score is None else min(self.score, score)
        return self.score == score

    def best(self) -> float | None:
        return self.score

    def damaged(self, trial: int, checkpoint: str, why: str) -> None:
        self.saves.remove(next(saved for saved in self.saves if f"checkpoint_{saved[0]}" in checkpoint))

    def stop_wanted(self, lease: int) -> bool:
        return False


def host_of(
    desk: Desk,
    directory: Path,
    settings: SharedSettings = BY_BATCHES,
    *,
    last_step: float | None = None,
    **hparams: Any,
) -> RayProgramHost:
    lease = lease_in(directory, hparams=hparams, last_step=last_step)
    return RayProgramHost(**links(desk), lease=lease, settings=settings, code_dir=None)


def validation(batches: int, /, loss: float = 0.5, **more: float) -> Report:
    return Report(batches=batches, validation={"loss": loss, **more})


def commit(host: RayProgramHost, batches: int) -> str:
    return host.commit(host.new_checkpoint(batches), Report(batches=batches), {})


def test_a_search_decides_only_where_a_report_reaches_one_of_its_lengths(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path)
    stops = [host.report(validation(batches)) for batches in (1, 3, 5, 6, 7, 9, 15)]
    assert desk.decided == [(5, 0.5), (9, 0.5)]
    assert stops == [False] * 7
    assert host.report(validation(16)), "it has reached the last length"
    assert host.end() == "completed"
    assert desk.reports[-1].final
    assert (desk.reports[-1].step, desk.reports[-1].rows) == (16, [])


@pytest.mark.parametrize(
    ("settings", "reports", "steps"),
    [
        (BY_EPOCHS, [validation(10, epochs=0.5), validation(20, epochs=1), validation(40, epochs=2.0)], [1, 2]),
        (BY_TIME, [validation(1, seconds=9.5), validation(2, seconds=11), validation(3, seconds=25)], [11, 25]),
        (BY_BATCHES, [validation(99, batches=3), validation(100, batches=4), validation(8)], [4, 8]),
        (replace(BY_BATCHES, max_length=Records(64), rungs=(Records(16), Records(64))), [validation(3), validation(4)],
         [16]),
        (replace(BY_BATCHES, max_length=Records(64), rungs=(Records(16), Records(64))), [validation(3, records=17)],
         [17]),
    ],
)  # fmt: skip
def test_length_is_measured_in_the_unit_of_the_search(
    settings: SharedSettings, reports: list[Report], steps: list[float], tmp_path: Path
) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path, settings, global_batch_size=4)
    for report in reports:
        host.report(report)
    assert [step for step, _ in desk.decided] == steps


def test_a_report_without_epochs_is_an_error_with_a_cure_if_the_search_counts_them(tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path, BY_EPOCHS)
    host.report(validation(0))
    error = r"searcher.max_length: .*reported no 'epochs' with steps_completed=7, only \['loss'\]; add.*{batches: N}$"
    with pytest.raises(SearcherMetricError, match=error):
        host.report(validation(7))

    config = {"searcher": {"max_time": 4, "time_metric": "epochs"}}
    host = host_of(Desk(), tmp_path, replace(BY_EPOCHS, config=config))
    with pytest.raises(SearcherMetricError, match=r"^searcher.time_metric: .*set searcher.time_metric: batches$"):
        host.report(validation(7))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(("name", "settings"), [("batches", BY_BATCHES), ("epochs", BY_EPOCHS)])
def test_a_length_must_be_a_finite_number(name: str, settings: SharedSettings, value: float, tmp_path: Path) -> None:
    desk = Desk()
    with pytest.raises(SearcherMetricError, match=r"must be a finite number >= 0, .*(nan|inf|-1.0)"):
        host_of(desk, tmp_path, settings).report(validation(7, **{name: value}))
    assert desk.reports == []


@pytest.mark.parametrize("loss", ["0.5", [0.5, 0.25], {"train": 0.5}])
def test_the_compared_metric_must_be_a_number(loss: object, tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path)
    with pytest.raises(SearcherMetricError, match=r"searcher.metric: 'loss' must be a number, but .* reported .*0.5"):
        host.report(Report(batches=7, validation={"loss": loss}))


@pytest.mark.parametrize("unit", [None, Batch(1), Epoch(1)])
def test_without_rungs_the_program_decides_its_length(unit: TrainUnit | None, tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path, replace(BY_BATCHES, max_length=unit, rungs=() if unit is None else (unit,)))
    assert not any(host.report(validation(batches, loss=1 / batches)) for batches in (10, 20, 30))
    assert host.end() == "completed"
    assert desk.decided[-1] == (30, 1 / 30)


@pytest.mark.parametrize(("verdict", "outcome"), [("stop", "stopped"), ("pause", "paused")])
def test_a_decision_is_returned_and_what_follows_is_still_recorded(verdict: str, outcome: str, tmp_path: Path) -> None:
    desk = Desk(at_4=verdict)
    host = host_of(desk, tmp_path)
    assert host.report(validation(4))
    assert host.report(Report(batches=4, training={"loss": 0.1})), "it is still asked to stop"
    checkpoint = commit(host, 4)
    assert desk.saves[-1] == (4, 0.5)
    assert Path(checkpoint, "manifest.json").exists()
    host.interrupted()
    assert host.end() == outcome
    assert not any(report.final for report in desk.reports)


def test_a_program_that_ignores_a_decision_is_ended_with_its_outcome(tmp_path: Path) -> None:
    host = host_of(Desk(at_4="stop"), tmp_path)
    host.report(validation(4))
    host.report(validation(5))
    for batches in range(5, 50):
        host.report(Report(batches=batches, training={"loss": 0.1}))
    host.report(validation(6))
    with pytest.raises(TrialEnded, match="trial 1 was asked to stop, but reported 3 more validations"):
        host.report(validation(7))
    assert host.end() == "stopped"


def test_a_program_that_trains_past_the_last_length_is_ended_and_has_completed(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path)
    for batches in (16, 17, 18):
        assert host.report(validation(batches))
    with pytest.raises(TrialEnded):
        host.report(validation(19))
    assert host.end() == "completed"


def test_operations_are_decided_on_and_reports_between_them_are_not(tmp_path: Path) -> None:
    desk = Desk(at_2="stop")
    host = host_of(desk, tmp_path, BY_EPOCHS)
    assert host.lengths == [1, 2, 4]
    assert not host.report(Report(batches=7, validation={"loss": 0.7}, compared=False))
    assert not host.report(Report(batches=7, validation={"loss": 0.7}, length=1))
    assert not host.report(Report(batches=99, validation={"accuracy": 1.0}, compared=False))
    assert host.report(Report(batches=99, validation={"loss": 0.6}, length=2))
    assert desk.decided == [(1, 0.7), (2, 0.6)]


def test_lengths_that_the_search_has_a_report_of_are_not_decided_again(tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path, BY_TIME, last_step=20)
    assert host.lengths == [40]
    desk = Desk()
    host = host_of(desk, tmp_path, BY_TIME, last_step=20)
    for seconds in (12, 20, 30):
        host.report(validation(seconds, seconds=seconds))
    assert desk.decided == [], "it repeats what no checkpoint has"


@pytest.mark.parametrize("is_single", [False, True])
def test_a_first_validation_without_the_metric_is_an_error(is_single: bool, tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path, replace(BY_BATCHES, is_single=is_single))
    host.opened()
    host.report(Report(batches=1, training={"loss": 1.0}))
    with pytest.raises(SearcherMetricError, match=r"compares 'loss', but the program reported \['accuracy'\]"):
        host.report(Report(batches=1, validation={"accuracy": 0.5}))
    with pytest.raises(SearcherMetricError, match=r"'loss' must be a number, but the program reported 'low'"):
        host.report(Report(batches=1, validation={"loss": "low"}))
    with pytest.raises(SearcherMetricError, match=r"reported \['losss'\]; .* one of these; did you mean losss\?$"):
        host.report(Report(batches=1, validation={"losss": 0.5}))


@pytest.mark.parametrize("known", ["reported", "before a restart"])
def test_later_validations_may_lack_the_metric(known: str, tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path, last_step=None if known == "reported" else 1)
    if known == "reported":
        host.report(validation(1))
    host.report(Report(batches=2, validation={"accuracy": 0.5}))
    assert [row["name"] for row in desk.reports[-1].rows] == ["accuracy"]


def test_a_metric_that_was_never_reported_is_an_error_at_the_end(tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path)
    host.report(Report(batches=1, training={"loss": 1.0}))
    with pytest.raises(SearcherMetricError, match=r"compares 'loss', but the program reported no validation metrics"):
        host.end()
    stopped = host_of(Desk(), tmp_path)
    stopped.report(Report(batches=1, training={"loss": 1.0}))
    stopped.interrupted()
    assert stopped.end() == "interrupted", "it will be resumed, and may report it then"


@pytest.mark.parametrize("reported", [None, Report(batches=1, groups={"inference": {"bleu": 31}})])
def test_if_nothing_is_compared_a_program_need_not_report_the_metric(reported: Report | None, tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path, replace(BY_BATCHES, rungs=(), is_single=True))
    assert not host.has_reported, "its entrypoint may be wrong"
    host.opened()
    if reported is not None:
        host.report(reported)
    assert host.has_reported
    assert host.end() == "completed"
    assert (desk.reports[-1].final, desk.reports[-1].step) == (True, None)


STOPPING = replace(BY_BATCHES, stops_on_nan=True)


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ({"training": {"train_loss": math.inf, "grad_norm": math.nan}}, "the training metric train_loss is inf"),
        ({"validation": {"loss": math.nan}}, "the validation metric loss is nan"),
        ({"groups": {"inference": {"loss": math.nan}}, "training": {"grad_norm": math.inf}}, ""),
    ],
)
@pytest.mark.parametrize("stops", [True, False])
def test_a_nan_loss_ends_the_trial_with_stop_on_nan(
    losses: dict[str, Any], why: str, stops: bool, tmp_path: Path
) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path, STOPPING if stops else BY_BATCHES)
    assert not host.report(validation(1))
    assert host.report(Report(batches=2, **losses)) is (stops and why != "")
    diverges = stops and why != ""
    assert host.reports.why_diverged == (why if diverges else "")
    assert host.end() == ("diverged" if diverges else "completed")
    assert any(report.final for report in desk.reports) is not diverges, "leave() reports a trial that has diverged"


def test_a_trial_that_died_after_a_nan_loss_ends_when_it_resumes(tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path, STOPPING)
    host.report(validation(2, loss=math.nan))
    host.commit(host.new_checkpoint(3), Report(batches=3), {})
    again = host_of(Desk(), tmp_path, STOPPING)
    assert again.resume() == "diverged"
    assert again.reports.why_diverged == "the validation metric loss is nan"
    assert host_of(Desk(), tmp_path, BY_BATCHES).resume() is None


def test_a_trial_that_the_search_stops_has_not_diverged(tmp_path: Path) -> None:
    stopped = host_of(Desk(at_4="stop"), tmp_path, STOPPING)
    assert stopped.report(validation(4, loss=math.nan))
    assert stopped.end() == "stopped"
    at_its_end = host_of(Desk(), tmp_path, STOPPING)
    assert at_its_end.report(validation(16, loss=math.nan))
    assert at_its_end.end() == "completed"


def test_a_program_that_trains_on_after_it_diverged_is_ended(tmp_path: Path) -> None:
    host = host_of(Desk(), tmp_path, STOPPING)
    host.report(validation(1, loss=math.nan))
    for batches in (2, 3):
        assert host.report(validation(batches, loss=math.nan))
    with pytest.raises(TrialEnded):
        host.report(validation(5))
    assert host.end() == "diverged"


def test_a_trial_that_is_a_class_diverges_in_the_same_way(tmp_path: Path) -> None:
    desk = Desk()
    host = host_in(tmp_path, desk, STOPPING)
    assert not host.publish(Report(batches=1, training={"loss": 0.5}))
    assert host.publish(Report(batches=2, training={"loss": math.nan}))
    # What the loop saves at its end.
    host.publish(Report(batches=2, checkpoint="checkpoint_2", final=True))
    assert host.end() == "diverged"
    assert not any(report.final for report in desk.reports)


def test_a_checkpoint_is_timed_from_its_staging_to_its_commit_and_not_when_it_is_resumed_from(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path)
    begun = time.monotonic()
    commit(host, 4)
    took = time.monotonic() - begun
    host_of(desk, tmp_path).resume()
    first, again = desk.save_s
    assert first is not None
    assert 0 < first <= took
    assert again is None


def test_a_checkpoint_has_the_metric_whether_saved_before_or_after_the_report(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path)
    commit(host, 2)
    host.report(validation(2, loss=0.25))
    host.report(validation(3, loss=0.125))
    commit(host, 3)
    assert desk.saves == [(2, None), (2, 0.25), (3, 0.125)]


@pytest.mark.parametrize("reports", [True, False])
def test_a_program_resumed_at_its_end_completes_with_the_value_in_its_checkpoint(reports: bool, tmp_path: Path) -> None:
    settings = replace(BY_BATCHES, max_length=None, rungs=())
    host = host_of(Desk(), tmp_path, settings)
    host.report(validation(30, loss=0.5))
    commit(host, 30)  # then it is killed
    desk = Desk()
    again = host_of(desk, tmp_path, settings)
    assert again.resume() is None
    assert again.latest_checkpoint == again.checkpoint_id(30)
    if reports:
        again.report(Report(batches=30, training={"loss": 0.1}))
    assert again.end() == "completed"
    assert desk.decided == [(30, 0.5)]


def test_the_best_validation_is_in_the_metrics_own_sign(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path, replace(BY_BATCHES, smaller_is_better=False))
    assert host.best_validation() is None
    for batches, value in ((1, 0.25), (2, 0.75), (3, math.nan)):
        host.report(validation(batches, loss=value))
    assert host.best_validation() == 0.75


def test_groups_become_rows_of_that_kind(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path)
    host.report(Report(batches=3, groups={"inference": {"bleu": 31.5, "text": "no number"}}))
    host.close()
    rows = [row for report in desk.reports for row in report.rows]
    assert [(row["kind"], row["name"], row["value"], row["batches"]) for row in rows] == [
        ("inference", "bleu", 31.5, 3)
    ]


def test_a_program_can_delete_only_its_own_checkpoints(tmp_path: Path) -> None:
    desk = Desk()
    host = host_of(desk, tmp_path / "trial_1")
    checkpoint = commit(host, 2)
    other = CheckpointStore(tmp_path / "trial_2")
    others = other.commit(other.stage(2), 2)
    host.delete_checkpoint(checkpoint)
    assert desk.saves == []
    assert not Path(checkpoint).exists()
    with pytest.raises(ValueError, match="a trial can delete only its own"):
        host.delete_checkpoint(others)
    assert json.loads((Path(others) / "manifest.json").read_text())["files"] == {}
