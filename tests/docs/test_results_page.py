"""docs/results.md names every column, docs/machine.md every figure and phase; numbers are the code's, and code runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pandas as pd
import pytest

import dray
from dray.figures import data as figure_data
from dray.figures import slot_time
from dray.records import metrics as metrics_log
from dray.records.timeline import PHASES
from dray.serve import curves
from dray.training import usage
from dray.training.step_timer import over_ranks
from tests.docs.pages import PAGES, blocks
from tests.report.simulated import simulated

PAGE = PAGES["results.md"] + PAGES["machine.md"]


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_columns_are_those_of_the_tables(tmp_path: Path) -> None:
    result = dray.Result(simulated(tmp_path / "experiment", 4).path)
    for line in section("Tables").splitlines():
        if line.startswith("| `result."):
            _, name, _, columns, _ = (cell.strip() for cell in line.split("|"))
            table: pd.DataFrame = getattr(result, name.strip("`").removeprefix("result."))
            found = [re.sub(r"^hparams\..*", "hparams.<name>", column) for column in table.columns]
            assert re.findall(r"`([^`]+)`", columns) == list(dict.fromkeys(found))


def test_machine_figures_and_phases_are_complete() -> None:
    documented = set(re.findall(r"^\| `([\w/]+)` \|", section("The machine"), re.MULTILINE)) - {"name"}
    written = set(re.findall(r'"(\w+_s|\w+_second|\w+_slot|mfu_percent)"', inspect.getsource(usage.Usage)))
    written.update(re.findall(r"\w+_s\b", str(usage.Usage.flush.__doc__)))
    rank = {"step_ms": 1.0, "step_p99_ms": 1.0, "rank_wait_ms": 0.0}
    written.update(name.replace("/0", "/RANK") for name in over_ranks([rank, rank], ["NODE", "NODE"]))
    assert documented == written | usage.OVER_RANKS.keys() | {"starting_s"}
    assert set(re.findall(r"`([a-z]+)`", section("The timeline"))) == set(PHASES)


def test_limits_of_the_report_are_those_of_the_code() -> None:
    report = " ".join(section("The report").split())
    for number in (curves.MAX_CURVES, curves.MOST_POINTS, figure_data.MAX_TRIALS, slot_time.MAX_STRETCHES):
        assert f"{number:,}" in report
    assert usage.REPORT_EVERY_S == metrics_log.PACK_EVERY_S == 5


@pytest.mark.slow
def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "earlier", 16)
    path = simulated(tmp_path / "experiment", 16).path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    names = {"path": path, "result": dray.Result(path), "dray": dray}
    for code in (*blocks("python", page="results.md"), *blocks("python", page="machine.md")):
        exec(code.text, names)
    best: pd.DataFrame = names["best"]  # type: ignore[assignment]
    trials = dray.Result(path).trials.sort_values("best_metric")
    assert best["trial_id"].tolist() == trials["trial_id"].head(5).tolist()
    assert (tmp_path / "report.html").exists()
