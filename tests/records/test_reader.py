"""The reader of an experiment: what it reads while a driver writes, and what represents a trial."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dray.display.best_trials import best_trials
from dray.errors import ExperimentError
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.metrics import MetricsLog
from dray.records.reader import ExperimentReader
from dray.records.result import Result
from dray.records.trial_record import TrialRecord
from searchers import Metric, Objectives
from searchers.errors import DamagedFile
from searchers.journal import Journal
from tests.records.story import happened
from tests.report.simulated import simulated

OBJECTIVES = Objectives((Metric(name="loss"), Metric(name="size"), Metric(name="size", at_most=10)))


def numbers(reader: ExperimentReader) -> object:
    """All that views show."""
    last = {metric: sorted(reader.last.of(metric).items()) for metric in sorted(reader.metrics)}
    return reader.overview(), [trial.to_json() for trial in reader.ranked()], reader.states, reader.varying, last


@pytest.mark.parametrize("several", [False, True])
def test_what_is_read_piece_by_piece_is_what_is_read_at_once(tmp_path: Path, several: bool) -> None:
    whole = happened(tmp_path / "whole", several=several)
    lines, rows = whole.journal.read_bytes(), (whole.metrics / ".packed.jsonl").read_bytes().splitlines()
    growing = ExperimentDirectory(tmp_path / "growing")
    growing.path.mkdir()
    growing.config_file.write_bytes(whole.config_file.read_bytes())
    now = [0.0]
    reader, log = ExperimentReader(growing), MetricsLog(growing.metrics, clock=lambda: now[0])
    for place in range(40):
        begin, end = (len(lines) * each // 40 for each in (place, place + 1))  # in the middle of lines
        with growing.journal.open("ab") as file:
            file.write(lines[begin:end])
        for row in rows[len(rows) * place // 40 : len(rows) * (place + 1) // 40]:
            fields = json.loads(row)
            log.append(fields.pop("trial_id"), [fields])
        if place in (10, 11, 25):
            now[0] += 10
            log.pack()  # the rows move to Parquet meanwhile
        reader.refresh()
        reader.overview()  # which keeps some values for the next
    expected = ExperimentReader(whole)
    expected.refresh()
    one, other = numbers(reader), numbers(expected)
    assert repr(one).replace("growing", "whole") == repr(other)
    assert reader.records == expected.records == len(Journal.read(whole.journal))


@pytest.mark.parametrize("packed", [False, True])
def test_system_metrics_count_as_trained_batches(tmp_path: Path, packed: bool) -> None:
    directory = happened(tmp_path / "one")
    reader = StoredExperiment.here(directory).read()
    trial = next(each for each in reader.ranked() if each.batches)
    known, metrics = trial.batches, set(reader.metrics)
    log = MetricsLog(directory.metrics)
    row = {"batches": known + 40, "kind": "system", "name": "batches_per_second", "value": 0.5}
    log.append(trial.id, [{**row, "epochs": None, "time": 2e9}])
    if packed:
        log.close()
    reader = StoredExperiment.here(directory).read()
    assert next(each.batches for each in reader.ranked() if each.id == trial.id) == known + 40
    assert set(reader.metrics) == metrics


def slowest_rank(trial: int, *percents: float, node: str = "gpu-7", rank: int = 3) -> list[dict[str, object]]:
    """Rows of the machine's figures, one after another."""
    name = f"slowest_rank_percent/{node}/{rank}"
    common = {"trial_id": trial, "epochs": None, "kind": "system", "name": name}
    return [common | {"batches": 100 + at, "value": value, "time": 2e9 + at} for at, value in enumerate(percents)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_slow_rank_is_named_while_it_is_slow(tmp_path: Path, packed: bool) -> None:
    directory = happened(tmp_path / "one")
    log = MetricsLog(directory.metrics)
    for row in [*slowest_rank(0, 50.0, 19.9), *slowest_rank(2, 3.0, 38.4), *slowest_rank(5, 19.0)]:
        log.append(int(str(row.pop("trial_id"))), [row])
    if packed:
        log.close()
    reader = StoredExperiment.here(directory).read()
    assert reader.trials[0].straggler == reader.trials[5].straggler == ""
    told = "rank 3 on gpu-7 takes 38% longer per step than the median of the others"
    assert (reader.trials[2].straggler, reader.straggler_summary()) == (told, f"trial 2: {told}")


def test_incomplete_last_line_is_read_once_it_is_rewritten(tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    lines = directory.journal.read_bytes().splitlines(keepends=True)
    directory.journal.write_bytes(b"".join(lines[:-1]) + b'{"event": "exi\n')
    reader = StoredExperiment.here(directory).read()
    assert reader.trials[6].state == "RUNNING"
    directory.journal.write_bytes(b"".join(lines))
    reader.refresh()
    assert reader.trials[6].state == "INVALID_HP"


@pytest.mark.parametrize("damage", ["{}}", "[" * 100_000], ids=["a bracket", "deep nesting"])
def test_a_damaged_journal_is_an_error_that_names_the_line(damage: str, tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    reader = StoredExperiment.here(directory).read()
    with directory.journal.open("a") as journal:
        journal.write(f"{damage}\n{{}}\n")
    line = directory.journal.read_text().count("\n") - 1
    for _ in range(2):
        with pytest.raises(DamagedFile, match=f"line {line} is damaged"):
            reader.refresh()


@pytest.mark.parametrize("deep", ["[", "- ", "{a: "])
def test_a_config_that_is_nested_too_deeply_is_an_error(deep: str, tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    directory.config_file.write_text(deep * 10_000)
    with pytest.raises(ValueError, match=r"experiment\.yaml can't be read: "):
        StoredExperiment.here(directory).read()


@pytest.mark.parametrize("trial", [-1, 10**15])
def test_a_part_with_a_trial_that_can_not_be_is_an_error(trial: int, tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    part = sorted(directory.metrics.glob("part-*.parquet"))[0]
    table = pq.read_table(part)
    numbers = pa.array([trial] * table.num_rows, pa.int64())
    pq.write_table(table.set_column(table.schema.get_field_index("trial_id"), "trial_id", numbers), part)
    with pytest.raises(ValueError, match="can't be read: "):
        StoredExperiment.here(directory).read()


@pytest.mark.parametrize(
    ("validations", "batches", "violation"),
    [
        ([(1, 0.1, 12.0), (2, 0.5, 9.0), (3, 0.4, 9.5), (4, 0.4, 9.0)], 3, 0),  # the limit, the loss, the earliest
        ([(1, 0.3, 20.0), (2, 0.9, 15.0)], 2, 0.5),  # the least violation
        ([(1, 0.1, math.nan), (2, math.inf, 1.0)], None, None),  # never all finite
        ([(1, 0.1, 9.0), (2, 0.2, 9.0), (1, 0.3, 9.0)], 2, 0),  # measured again, after a restart
    ],
)
def test_validation_that_represents_a_trial(
    validations: Sequence[tuple[int, float, float]], batches: int | None, violation: float | None
) -> None:
    trial = TrialRecord(0, OBJECTIVES)
    for at, loss, size in validations:
        trial.validated("loss", at, None, loss, 0.0)
        trial.validated("size", at, None, size, 0.0)
    assert trial.best_batches == batches
    assert (trial.losses and trial.losses.violation) == violation


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([(5, 0.3), (10, math.inf), (12, 0.2)], None),  # it recovered
        ([(5, 0.3), (10, math.inf), (12, 0.2), (15, math.nan), (20, math.nan)], 15),
        ([(15, math.nan), (10, math.nan), (20, 0.2), (15, 0.1)], None),  # restarted from a checkpoint
    ],
)
def test_a_trial_has_diverged_while_a_loss_is_not_finite(losses: list[tuple[int, float]], since: int | None) -> None:
    trial = TrialRecord(0, OBJECTIVES)
    for batches, value in losses:
        trial.loss(("training", "loss"), batches, value)
    assert trial.nan_since == since


def test_hyperparameters_that_only_some_trials_have_vary(tmp_path: Path) -> None:
    directory = happened(tmp_path / "one")
    directory.journal.unlink()
    opts = [{"name": "adam"}, {"name": "sgd", "momentum": 0.5}, {"name": "adam"}]
    with Journal(directory.journal) as journal:
        journal.append({"event": "start", "actions": [{"action": "create", "trial": trial} for trial in range(3)]})
        for trial, opt in enumerate(opts):
            journal.append({"event": "started", "trial": trial, "hparams": {"opt": opt, "lr": 0.1}, "actions": []})
    assert StoredExperiment.here(directory).read().varying == ["opt.momentum", "opt.name"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Result(simulated(tmp_path_factory.mktemp("fronts") / "objectives", 24, several=True).path)


def test_table_has_the_front_by_the_definition(result: Result) -> None:
    trials = result.trials
    assert (trials["metrics.validation_loss"] == trials["best_metric"]).all()
    assert (trials["metrics.size"] == trials["hparams.hidden"]).all()
    assert trials["violation"].tolist() == pytest.approx(((trials["hparams.hidden"] - 200) / 200).clip(0).tolist())
    kept = trials[trials["metrics.size"] <= 200]
    points = list(zip(kept["best_metric"], kept["metrics.size"], strict=True))
    front = {
        trial
        for trial, (loss, size) in zip(kept["trial_id"], points, strict=True)
        if not any(a <= loss and b <= size and (a, b) != (loss, size) for a, b in points)
    }
    assert set(trials[trials["front"] == 1]["trial_id"]) == front == set(result.reader.front())
    assert trials[trials["violation"] > 0]["front"].isna().all()


def test_table_of_the_best_shows_every_metric_and_the_front(result: Result) -> None:
    heading, columns, first, *_ = best_trials(result.reader, width=200)
    assert heading == f"best trials (front 1 is the Pareto front, {len(result.reader.front())} trials):"
    assert columns.split()[:8] == ["trial", "state", "batches", "best", "at", "front", "validation_loss", "size"]
    assert first.split()[4] == "1"


def test_no_best_trial_if_none_keeps_the_limits(tmp_path: Path) -> None:
    path = simulated(tmp_path / "objectives", 6, several=True).path
    stored = path / "experiment.yaml"
    stored.write_text(stored.read_text().replace("at_most: 200", "at_most: 1"))
    result = Result(path)
    closest = int(result.trials.sort_values("hparams.hidden")["trial_id"].iloc[0])
    with pytest.raises(
        ExperimentError, match=f"none that validated keeps every constraint; the closest is trial {closest} "
    ):
        _ = result.best_trial
    assert best_trials(result.reader, width=100) == []
    assert result.overview.front is None


EMPTY = """
import sys
from pathlib import Path
from dray.records.growing import GrowingMetrics
from dray.records.metrics import MetricsLog

MetricsLog(Path(sys.argv[1]))
GrowingMetrics(Path(sys.argv[1])).new_rows()
assert "pandas" not in sys.modules
"""


def test_an_experiment_without_metrics_is_opened_without_pandas(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EMPTY, str(tmp_path)], check=True)
