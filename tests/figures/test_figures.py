"""The figures of an experiment show its tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dray.config.load import load_config
from dray.figures import front, plots, slot_time
from dray.figures.data import FigureData, importance
from dray.figures.scale import LOG, scaled
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.metrics import read_metrics
from dray.records.rungs import rung_estimates
from dray.serve.figures import HEAD, rungs
from searchers.domains import Categorical
from searchers.journal import Journal
from tests.report.simulated import START_S, simulated

WORKERS = 3
TRIALS = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("report") / "experiment", TRIALS, workers=WORKERS).path


def data_of(path: Path) -> FigureData:
    return FigureData(StoredExperiment.here(ExperimentDirectory(path)).read())


@pytest.fixture
def looked(path: Path) -> FigureData:
    return data_of(path)


# ------------------------------------------------------------------ figures


def test_choices_are_in_the_order_of_the_config(path: Path) -> None:
    report = data_of(path)
    report.domains["optimizer"] = Categorical(vals=(128, "sgd", 32, "adam"))
    changed = {0: 32, 1: None, 2: float("nan"), 3: 128, 4: "another"}
    for table in (report.trials, report.ranked):
        table["hparams.optimizer"] = [changed.get(trial, row) for trial, row in table["hparams.optimizer"].items()]
    [lines] = plots.parallel(report)["data"]
    [dimension] = [each for each in lines["dimensions"] if each["label"] == "optimizer"]
    assert dimension["names"] == ["128", "sgd", "32", "adam", "-", "another"]
    shown = dict(zip(lines["customdata"], dimension["values"], strict=True))
    assert [shown[trial] for trial in changed] == [2, 4, 4, 0, 5]
    figure = plots.slices(report)["optimizer"]
    assert figure["layout"]["xaxis"]["categoryarray"] == dimension["names"]
    assert {value for trace in figure["data"] for value in trace["x"]} == set(dimension["names"])


def test_slices_have_a_point_for_each_trial(looked: FigureData) -> None:
    found = plots.slices(looked)
    assert list(found) == ["lr", "hidden", "optimizer"]
    trials = looked.trials
    for name, figure in found.items():
        points = {
            trial: (x, y)
            for trace in figure["data"]
            for trial, x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True)
        }
        assert points == {trial: (row[f"hparams.{name}"], row["best_metric"]) for trial, row in trials.iterrows()}
    assert [figure["layout"]["xaxis"]["type"] for figure in found.values()] == ["log", "linear", "category"]


def test_parallel_coordinates_have_all_trials_the_best_on_top(looked: FigureData) -> None:
    [trace] = plots.parallel(looked)["data"]
    ranked = looked.trials.sort_values("best_metric", ascending=False)
    by_label = {dimension["label"]: dimension for dimension in trace["dimensions"]}
    assert by_label["hidden"]["values"] == ranked["hparams.hidden"].tolist()
    assert trace["customdata"] == ranked["trial_id"].tolist()
    assert [label for label, dimension in by_label.items() if dimension.get("log")] == ["lr"]
    assert by_label["lr"]["values"] == pytest.approx(np.log10(ranked["hparams.lr"]).tolist())
    names = by_label["optimizer"]
    assert [names["names"][code] for code in names["values"]] == ranked["hparams.optimizer"].tolist()
    assert trace["line"]["color"] == pytest.approx(np.linspace(1, 0, TRIALS))  # from the worst to the best
    assert 10.0 ** np.array(by_label["lr"]["tickvals"]) == pytest.approx([float(t) for t in by_label["lr"]["ticktext"]])


def test_each_trial_is_in_its_group_of_the_front(tmp_path: Path) -> None:
    report = data_of(simulated(tmp_path / "objectives", 64, several=True).path)
    objectives = report.config.searcher.objectives
    assert objectives is not None
    trials, front_of = report.trials, report.trials["front"].eq(1).fillna(False)
    exceed = trials["metrics.size"] > 200
    traces = front.scatter(report, objectives)["data"]
    colours = (front.GREY, plots.RUNG_COLOURS[1], plots.BEST_COLOUR)
    for trace, group, colour in zip(traces, (exceed, ~exceed & ~front_of, front_of), colours, strict=True):
        assert group.any()
        mine = trials.loc[trace["customdata"]]
        assert sorted(trace["customdata"]) == sorted(trials.index[group])
        assert (trace["x"], trace["y"]) == (mine["metrics.size"].tolist(), mine["metrics.validation_loss"].tolist())
        assert (trace["marker"]["color"], trace["mode"]) == (
            colour,
            "lines+markers" if group is front_of else "markers",
        )
    [lines] = plots.parallel(report)["data"]
    sizes = trials.loc[lines["customdata"], "metrics.size"].tolist()
    assert [(each["label"], each["values"]) for each in lines["dimensions"]][-1] == ("size", sizes)
    heads, *rows = front.front(report, objectives)["table"]
    assert heads == ["trial", "state", "validation_loss", "size", *report.varying]
    assert [int(row[0]) for row in rows] == trials[front_of].sort_values("best_metric").index.tolist()


def test_best_so_far_never_gets_worse_and_ends_with_the_best(looked: FigureData) -> None:
    points, line = plots.history(looked)["data"]
    assert sorted(points["customdata"]) == list(range(TRIALS))
    assert line["y"] == sorted(line["y"], reverse=True)
    assert line["y"][-1] == looked.trials["best_metric"].min()
    assert line["x"] == sorted(line["x"])


def test_time_of_slots_is_the_same_in_all_figures(looked: FigureData) -> None:
    epochs = read_metrics(looked.directory.metrics).query("name == 'loss'").groupby("trial_id").size()
    expected = {
        "starting": START_S * TRIALS,
        "training": 0.75 * epochs.sum(),
        "validating": 0.25 * epochs.sum(),
    }
    stretches, shares = slot_time.stretches(looked), slot_time.shares(looked)
    assert stretches is not None
    unit_s = {"seconds": 1, "minutes": 60}[stretches["layout"]["xaxis"]["title"]["text"].split()[0]]
    bars = {trace["name"]: unit_s * sum(trace["x"]) for trace in stretches["data"]}
    width = np.diff(shares["data"][0]["x"])[0] * unit_s
    areas = {trace["name"]: width * sum(trace["y"]) for trace in shares["data"]}
    for phase, seconds in expected.items():
        assert bars[phase] == pytest.approx(seconds)
        assert areas[phase] == pytest.approx(seconds)
    assert np.sum([trace["y"] for trace in shares["data"]], axis=0) == pytest.approx(WORKERS)


def test_too_many_stretches_are_not_shown_one_by_one(looked: FigureData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_time, "MAX_STRETCHES", 20)
    assert slot_time.stretches(looked) is None


@pytest.mark.parametrize(
    ("values", "sign", "expected"),
    [
        ([0.1, 0.2, 0.3], 1, {}),
        ([0.5], 1, {}),
        ([0.1, 3.0, math.inf], 1, "log"),
        ([0.1, 3.0], None, "log"),
        ([0.02, 0.9, 0.95, 1.0], 1, {}),
        ([2.0, 90.0, 95.0, 100.0], -1, {}),
        ([-0.5, *np.linspace(0, 1, 99), 1e9], 1, (-0.6, 1.2)),
        ([0.5, *np.linspace(0, -1, 99), -1e9], -1, (-1.2, 0.6)),
        ([0.02, *np.linspace(0.9, 0.98, 15)], -1, (0.8, 1)),
    ],
    ids=[
        "as it is",
        "one",
        "a loss, by logarithm",
        "so is what may be one",
        "an error rate, bounded by 1",
        "larger is better",
        "without an outlier",
        "or a low one, where more is better",
        "15 good trials and a bad one",
    ],
)
def test_scale_of_a_metrics_axis(values: list[float], sign: int | None, expected: Any) -> None:
    figure = scaled({"layout": {"hovermode": "x"}}, "f1", values, sign)
    axis = figure["layout"].pop("yaxis")
    assert figure["layout"] == {"hovermode": "x"}
    assert axis.pop("title") == {"text": "f1"}
    assert axis == figure["scales"][figure["scale"]]
    if expected == "log":
        assert axis["type"] == "log"
        assert "linear" in figure["scales"]
    elif isinstance(expected, tuple):
        low, high = axis["range"]
        assert expected[0] < low < high < expected[1]
        shown = sum(low <= value <= high for value in values)
        assert figure["scale"] == f"linear, worst {len(values) - shown} of {len(values)} hidden"
        assert figure["scales"]["linear, all values"] == {}
    else:
        assert axis == expected
    finite = [value for value in values if math.isfinite(value)]
    assert (LOG in figure["scales"]) == (len(finite) > 1 and min(finite) > 0)


def test_a_logarithmic_scale_shows_all_but_what_diverged() -> None:
    def high(values: list[float]) -> float:
        return float(10 ** scaled({"layout": {}}, "loss", values, 1)["scales"][LOG]["range"][1])

    losses = [0.05 * 1.05**number for number in range(99)]
    assert high([*losses, 70.0]) > 70
    assert losses[-1] < high([*losses, 1e9]) < 100


def test_trials_are_compared_at_a_length_that_most_have_reached(looked: FigureData) -> None:
    assert looked.compared_at == 1
    assert looked.length(1, "epochs") == "1 epoch"
    assert looked.length(4) == "4 epochs"


def test_rungs_are_as_the_journal_says(looked: FigureData) -> None:
    heads, first, second = rungs(looked)
    estimate, _ = rung_estimates(looked.config, Journal.read(looked.directory.journal))
    assert heads == HEAD
    assert first == ["1 epoch", str(TRIALS), str(estimate.compared), f"{estimate.correlation:.2f}", "25%"]
    assert second[0] == "4 epochs"


# ------------------------------------------------------------------ importance


@pytest.mark.slow
def test_important_hyperparameters_are_found(looked: FigureData) -> None:
    found = looked.importance
    assert found is not None
    assert list(found.shares) == ["lr", "optimizer", "hidden"], "as the simulated trials learn"
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.explained > 0.5
    assert found.trials == TRIALS


@pytest.mark.slow
def test_categories_booleans_and_missing_values_can_be_important() -> None:
    n = 60
    table = pd.DataFrame(
        {
            "net": ["deep", "wide", "narrow"] * (n // 3),
            "noise": np.random.default_rng(0).random(n),
            "skip": pd.Series([True, None, False, None] * (n // 4), dtype=object),
        }
    )
    scores = table["net"].map({"deep": 1.0, "wide": math.inf, "narrow": 2.0}) + (table["skip"].isna() * 0.1)
    found = importance(table, scores)
    assert found is not None
    assert list(found.shares) == ["net", "skip", "noise"]


@pytest.mark.parametrize("name", ["custom", "my_module:MyMethod"])
def test_report_of_a_custom_method_has_no_rungs(tmp_path: Path, name: str) -> None:
    searcher = {"name": name, "metric": "error", "max_length": {"batches": 20}}
    own = load_config({"entrypoint": "m:T", "hyperparameters": {"lr": 0.1}, "searcher": searcher})
    directory = ExperimentDirectory.create(tmp_path / "experiment", own, None)
    Journal(directory.journal).close()
    looked = data_of(directory.path)
    assert looked.rungs == ()
    assert looked.rung_name(0) == "all trials"
