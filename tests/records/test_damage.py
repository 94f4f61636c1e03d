"""Damaged files: one line that names the file and the line, never a traceback, and no other experiment is affected."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dray.cli import main
from dray.records.directory import ExperimentDirectory
from dray.records.journal import read_journal
from dray.records.listing import StoredExperiment, list_experiments, local_overview
from dray.records.local_runs import LocalRun
from dray.records.logs import event_lines, failure_fields
from dray.records.metrics import TAIL, MetricsLog, read_metrics
from dray.records.reader import ExperimentReader
from dray.records.spending import FILE, Spending, check
from dray.records.timeline import Timeline, gpu_types, leases
from dray.report import write_report
from dray.serve.experiments import Experiments
from searchers import rows
from searchers.errors import DamagedFile
from tests.records import damage
from tests.records.story import happened

OTHER = ({}, "x", -1, 10**30, 10**400, float("inf"), "\ud800", None)
ROWS = ("journal.jsonl", "metrics/_tail.jsonl", "metrics/_timeline.jsonl")


def wrong(said: list[tuple[str, str, str, str, damage.Said]]) -> list[tuple[str, ...]]:
    return [(*where, mark, str(each.trouble or each.said)) for *where, mark, each in said if mark in "✗?2"]


@pytest.mark.slow
@pytest.mark.long
def test_no_damaged_file_is_a_traceback_or_takes_others_down(tmp_path: Path) -> None:
    assert not wrong(list(damage.cells(tmp_path)))


@pytest.mark.slow
def test_a_garbled_line_is_one_line_of_each_command(tmp_path: Path) -> None:
    files = {name: damage.FILES[name] for name in ROWS}
    found = list(damage.cells(tmp_path, files, ("garbage",), ("list", "describe", "logs", "Result")))
    assert not wrong(found)
    assert {mark for file, _, _, mark, _ in found if file == "journal.jsonl"} == {"1"}


def _mutations(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record without each of its fields, and with each of them of other types; also in its actions."""
    found = [{name: each for name, each in record.items() if name != without} for without in record]
    found += [{**record, name: value} for name in record for value in OTHER]
    for place, action in enumerate(record.get("actions", ())):
        for changed in _mutations(action):
            found.append({**record, "actions": [*record["actions"][:place], changed, *record["actions"][place + 1 :]]})
    return found


@pytest.mark.long
@pytest.mark.slow
def test_changed_journal_record_is_an_error_of_its_line(tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    records = read_journal(directory.journal)
    more = {
        "limits": {"budget": {"time": "1h"}, "until": {"validation_loss": 0.1}, "patience": 3, "prices": {"CPU": 0.1}},
        "requested": {"actions": [{"action": "create", "trial": 9, "source": {"trial": 0, "step": 10, "batches": 10}}]},
        "extended": {"max_trials": 20, "max_length": None, "actions": []},
        "alert": {"id": 0, "kind": "trial_failed", "level": None, "key": "", "text": "x"},
        "told": {"id": 0},
        "rejected": {"id": "x", "error": "why"},
        "failed": {"error": "why"},
        "withheld": {"trial": 0, "where": "x", "error": "why", "batches": 1, "furthest": 2},
        "new_processes": {"trial": 0, "code": None, "text": "why"},
        "ended": {"reason": "budget"},
    }
    records += [{"event": event, "time": 1_700_000_100.0, **fields} for event, fields in more.items()]
    config, seen, said = directory.config(), set[str](), list[str]()
    for place, record in enumerate(records):
        if record["event"] in seen:
            continue
        seen.add(record["event"])
        for changed in _mutations(record):
            text = [json.dumps(each) + "\n" for each in [*records[:place], changed, *records[place + 1 :]]]
            directory.journal.write_text("".join(text))
            try:
                list(event_lines(config, read_journal(directory.journal)))
                reader = StoredExperiment.here(directory).read()
                reader.overview()
                "".join(reader.new_processes)
                json.dumps([failure_fields(each) for each in reader.failures], allow_nan=False)
            except DamagedFile as error:
                said.append(str(error))
    assert said
    assert not [each for each in said if not each.startswith(f"{directory.journal}: line ") or "\n" in each]


def test_changed_row_of_metrics_is_left_out(tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    kinds = ("training", "loss"), ("validation", "validation_loss")
    for kind, name in kinds:
        row = {"trial_id": 0, "batches": 40, "epochs": None, "kind": kind, "name": name, "value": 0.5, "time": 1.7e9}
        for changed in _mutations(row):
            (directory.metrics / TAIL).write_text(json.dumps(changed) + "\n")
            StoredExperiment.here(directory).read().overview()
            read_metrics(directory.metrics)


def test_changed_report_of_a_local_run_is_left_out(tmp_path: Path) -> None:
    for value in OTHER:
        report = {"batches": 1, "time": 1.0, "training": {"loss": value}}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(report) + "\n")
        local_overview(LocalRun(tmp_path))
        LocalRun(tmp_path).metrics()


@pytest.mark.parametrize("file", [*ROWS, "experiment.yaml", "trial_0/logs/rank_0.log"])
def test_pipe_in_place_of_a_file_keeps_nobody_waiting(file: str, tmp_path: Path) -> None:
    damage.make(tmp_path)
    path = tmp_path / damage.NAME / file
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        path.unlink()
        make()
        with damage.results(tmp_path):
            assert damage.NAME in (seen := {each.name: each for each in list_experiments()})
        assert not (why := seen[damage.NAME].why) or f"{path} can't be read: it is a pipe or a device; " in why
        assert seen["other-2"].why is None


def test_whatever_is_wrong_with_one_experiment_others_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage.make(tmp_path)
    overview = ExperimentReader.overview

    def fails(self: ExperimentReader) -> Any:
        return overview(self) if self.name == "other-2" else {}["value"]

    monkeypatch.setattr(ExperimentReader, "overview", fails)
    with damage.results(tmp_path):
        assert {each.name: each.why for each in list_experiments()}[damage.NAME] == "KeyError: 'value'"
    there, _ = Experiments(tmp_path).overviews()
    assert there[damage.NAME].why == "KeyError: 'value'"
    assert there["other-2"].why is None


def test_changed_row_of_a_timeline_is_left_out(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.starts("g", 1, 1.0)
    timeline.arrived("g", 2.0)
    timeline.ready("g", 2.0)
    timeline.granted("g", 0, 3.0, gpu_type="L4", slot_type="L4")
    timeline.left("g", 0, 5.0)
    timeline.close()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    for place, record in enumerate(lines):
        for changed in _mutations(record):
            text = [json.dumps(each) + "\n" for each in [*lines[:place], changed, *lines[place + 1 :]]]
            (tmp_path / FILE).write_text("".join(text))
            leases(tmp_path, [4.0])
            gpu_types(tmp_path)
            Spending({"L4": 1.0}).read(tmp_path)
    assert check({"event": "starts", "time": 0.0, "group": "g"}) == "it has no slots"


def test_rows_after_a_damaged_one_are_kept_and_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def row(batches: int) -> dict[str, Any]:
        return {"batches": batches, "epochs": None, "kind": "training", "name": "loss", "value": 0.5, "time": 1.0}

    MetricsLog(tmp_path).append(0, [row(1), row(2), row(3)])
    lines = (tmp_path / TAIL).read_bytes().splitlines(keepends=True)
    (tmp_path / TAIL).write_bytes(lines[0] + b"%$\n[]\n" + lines[2] + lines[1][:9])
    rows.SAID.clear()
    log = MetricsLog(tmp_path)
    log.append(0, [row(4)])
    log.close()
    assert read_metrics(tmp_path)["batches"].tolist() == [1, 3, 4]
    assert caplog.messages == [
        f"{tmp_path / TAIL}: line 2 is damaged: expected a JSON object, got b'%$'; this line is left out; so is 1 more"
    ]


@pytest.mark.parametrize("how", ["empty", "[]", "null", "not UTF-8", "a directory", "unreadable"])
def test_a_damaged_config_is_one_line_that_names_it(how: str, tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    damage.damage(directory.config_file, how)
    for reading in (lambda: ExperimentReader(directory), directory.config):
        with pytest.raises(DamagedFile, match=rf"^{directory.config_file} can't be read: ") as raised:
            reading()
        assert "\n" not in str(raised.value)


def test_error_that_no_terminal_can_write_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage.make(tmp_path)
    directory = ExperimentDirectory(tmp_path / damage.NAME)
    failure = {"event": "gave_up", "trial": 1, "error": "OSError: no b\udcff/\ud83d→", "batches": 3, "time": 1.7e9 + 99}
    with directory.journal.open("a") as file:
        file.write(json.dumps(failure) + "\n")
    assert "\\udcff" in write_report(directory.path).read_text(encoding="utf-8")
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    for command in ("logs", "describe"):
        terminal = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii", write_through=True))
        with pytest.raises(SystemExit) as ended:
            main(["experiment", command, damage.NAME])
        assert not ended.value.code
        assert b"no b\\udcff/\\ud83d" in terminal.getvalue()
