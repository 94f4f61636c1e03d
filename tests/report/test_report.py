"""The report on an experiment: its figures are the experiment's tables, and the file needs nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dray.config.load import load_config
from dray.errors import NoExperiment
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.result import Result
from dray.records.rungs import rung_estimates
from dray.report import data as report_data
from dray.report import figures, front, html, slot_time, write_report
from dray.report.data import ReportData
from dray.report.importance import importance
from dray.report.scale import LOG, scaled
from searchers.domains import Categorical
from searchers.events import Exited, Started
from searchers.journal import Journal
from tests.records.test_result import Story, config, told
from tests.report.simulated import START_S, simulated

WORKERS = 3
TRIALS = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("report") / "experiment", TRIALS, workers=WORKERS).path


def data_of(path: Path, include: Collection[int] = ()) -> ReportData:
    return ReportData(StoredExperiment.here(ExperimentDirectory(path)).read(), include)


@pytest.fixture
def looked(path: Path) -> ReportData:
    return data_of(path)


def curves_of(figure: figures.Figure) -> dict[int, list[tuple[float, float]]]:
    """The curve of each trial, out of traces in which curves follow one another after a gap."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for trace in figure["data"]:
        for x, y, trial in zip(trace["x"], trace["y"], trace["customdata"], strict=True):
            if trial is not None:
                curves.setdefault(trial, []).append((x, y))
            else:
                assert x is None
                assert y is None
    return curves


def validations(looked: ReportData) -> dict[int, list[tuple[float, float]]]:
    rows = looked.metrics.query("kind == 'validation' and name == 'validation_loss'")
    return {trial: list(zip(mine["epochs"], mine["value"], strict=True)) for trial, mine in rows.groupby("trial_id")}


# ------------------------------------------------------------------ figures


def test_curves_are_the_validations_of_all_trials(looked: ReportData) -> None:
    assert curves_of(figures.curves(looked)) == validations(looked)


def test_curves_have_a_trace_for_each_rung_and_one_for_the_best(looked: ReportData) -> None:
    data = figures.curves(looked)["data"]
    lengths = {trial: curve[-1][0] for trial, curve in validations(looked).items()}
    best = looked.trials["best_metric"].idxmin()
    for trace, length in zip(data, (1, 4, 16), strict=False):
        trials = {trial for trial in trace["customdata"] if trial is not None}
        assert trials == {trial for trial, last in lengths.items() if last == length and trial != best}
        assert trace["name"] == f"reached {length} epoch{'s' if length > 1 else ''} ({len(trials)})"
    assert set(data[3]["customdata"]) == {best, None}
    assert data[3]["name"] == f"trial {best}, the best"


def test_of_many_trials_the_best_are_shown_and_others_evenly_by_rank(
    looked: ReportData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_data, "MAX_CURVES", 12)
    shown = list(curves_of(figures.curves(looked)))
    ranked = looked.trials.sort_values("best_metric", kind="stable")["trial_id"].tolist()
    assert len(shown) == 12
    assert set(ranked[:6]) < set(shown), "the best six"
    places = sorted(ranked.index(trial) for trial in shown)[6:]
    gaps = np.diff(places)
    assert places[-1] == TRIALS - 1, "down to the worst"
    assert gaps.max() - gaps.min() <= 1


def test_trials_that_were_asked_for_are_shown_in_their_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_data, "MAX_TRIALS", 8)
    usual = data_of(path)
    ranked = usual.ranked["trial_id"].tolist()
    asked = [trial for trial in ranked if trial not in usual.shown.index][:2]
    report = data_of(path, include=[asked[1], ranked[0], asked[0], 10**6])
    assert report.shown.index.tolist() == [trial for trial in ranked if trial in usual.shown.index or trial in asked], (
        "by rank"
    )
    assert (set(report.included), usual.included) == (set(asked), [])


def test_a_long_curve_keeps_its_spike_and_marks_nan(looked: ReportData) -> None:
    length, best = 30_000, looked.best
    values = 1 / np.arange(1, length + 1)
    values[[12_344, 20_000]] = 100.0, math.nan
    looked.validations = pd.DataFrame(
        {"trial_id": best, "batches": range(length), "epochs": np.arange(length) / 100, "value": values, "time": 0.0}
    )
    figure = figures.curves(looked)
    *_, curve, marks = figure["data"]
    assert len(curve["x"]) == report_data.MAX_POINTS + 1
    assert (123.44, 100.0) in zip(curve["x"], curve["y"], strict=True)
    assert (marks["x"], marks["text"], marks["customdata"]) == ([200.0], ["NaN"], [best])
    assert marks["yaxis"] == "y2"
    assert figure["layout"]["yaxis2"]["range"] == [0, 1], "the mark is at the bottom on every scale"


def test_choices_are_in_the_order_of_the_config_and_missing_ones_are_told(path: Path) -> None:
    report = data_of(path)
    report.domains["optimizer"] = Categorical(vals=(128, "sgd", 32, "adam"))
    changed = {0: 32, 1: None, 2: float("nan"), 3: 128, 4: "another"}
    for table in (report.trials, report.ranked):
        table["hparams.optimizer"] = [changed.get(trial, row) for trial, row in table["hparams.optimizer"].items()]
    [lines] = figures.parallel(report)["data"]
    [dimension] = [each for each in lines["dimensions"] if each["label"] == "optimizer"]
    assert dimension["names"] == ["128", "sgd", "32", "adam", "-", "another"]
    shown = dict(zip(lines["customdata"], dimension["values"], strict=True))
    assert [shown[trial] for trial in changed] == [2, 4, 4, 0, 5]
    figure = figures.slices(report)["optimizer"]
    assert figure["layout"]["xaxis"]["categoryarray"] == dimension["names"]
    assert {value for trace in figure["data"] for value in trace["x"]} == set(dimension["names"])


def test_slices_have_a_point_for_each_trial(looked: ReportData) -> None:
    found = figures.slices(looked)
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


def test_parallel_coordinates_have_all_trials_the_best_on_top(looked: ReportData) -> None:
    [trace] = figures.parallel(looked)["data"]
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
    colours = (front.GREY, figures.RUNG_COLOURS[1], figures.BEST_COLOUR)
    for trace, group, colour in zip(traces, (exceed, ~exceed & ~front_of, front_of), colours, strict=True):
        assert group.any()
        mine = trials.loc[trace["customdata"]]
        assert sorted(trace["customdata"]) == sorted(trials.index[group])
        assert (trace["x"], trace["y"]) == (mine["metrics.size"].tolist(), mine["metrics.validation_loss"].tolist())
        assert (trace["marker"]["color"], trace["mode"]) == (
            colour,
            "lines+markers" if group is front_of else "markers",
        )
    [lines] = figures.parallel(report)["data"]
    sizes = trials.loc[lines["customdata"], "metrics.size"].tolist()
    assert [(each["label"], each["values"]) for each in lines["dimensions"]][-1] == ("size", sizes)
    table = front.section(report, lambda *_, **__: "")
    shown = re.findall(r"<tr><td>(\d+)</td>", table)
    assert list(map(int, shown)) == trials[front_of].sort_values("best_metric").index.tolist()


def test_best_so_far_never_gets_worse_and_ends_with_the_best(looked: ReportData) -> None:
    points, line = figures.history(looked)["data"]
    assert sorted(points["customdata"]) == list(range(TRIALS))
    assert line["y"] == sorted(line["y"], reverse=True)
    assert line["y"][-1] == looked.trials["best_metric"].min()
    assert line["x"] == sorted(line["x"])


def test_time_of_slots_is_the_same_in_all_figures(looked: ReportData) -> None:
    epochs = looked.metrics.query("name == 'loss'").groupby("trial_id").size()
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


def test_too_many_stretches_are_not_shown_one_by_one(looked: ReportData, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_metric_has_its_curves(looked: ReportData) -> None:
    labels = [metric.label for metric in looked.other_metrics]
    assert labels == ["validation accuracy", "training accuracy", "training loss"]
    rows = looked.metrics
    for metric in looked.other_metrics:
        figure = figures.curves(looked, metric)
        mine = rows[(rows["kind"] == metric.kind) & (rows["name"] == metric.name)]
        assert curves_of(figure) == {
            trial: list(zip(part["epochs"], part["value"], strict=True)) for trial, part in mine.groupby("trial_id")
        }
        assert figure["layout"]["yaxis"]["title"]["text"] == metric.label


def test_curves_of_other_metrics_are_limited(looked: ReportData, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(looked.validations)
    monkeypatch.setattr(report_data, "MAX_OTHER_POINTS", 2 * size)
    assert [metric.label for metric in looked.other_metrics] == ["validation accuracy", "training accuracy"]


def test_trials_are_compared_at_a_length_that_most_have_reached(looked: ReportData) -> None:
    assert looked.compared_at == 1
    assert looked.length(1, "epochs") == "1 epoch"
    assert looked.length(4) == "4 epochs"


# ------------------------------------------------------------------ importance


@pytest.mark.slow
def test_important_hyperparameters_are_found(looked: ReportData) -> None:
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


# ------------------------------------------------------------------ the file


def figures_of(html: str) -> dict[str, Any]:
    match = re.search(r"^const figures = (.*);$", html, re.MULTILINE)
    assert match is not None
    found: dict[str, Any] = json.loads(match.group(1))
    return found


def text_of(html: str) -> str:
    """What is to be read of it."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.partition("<script>")[0]))


@pytest.mark.slow
def test_report_is_one_file_with_everything_in_it(path: Path, tmp_path: Path) -> None:
    file = write_report(path, tmp_path / "r.html")
    html = file.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"]
    assert not re.findall(r"<(?:link|img|iframe)|<script[^>]+src|@import|url\(", html.partition("<script>")[0])
    assert re.search(r"plotly.js v.*\n\* Copyright .*, Plotly, Inc.\n(?:.*\n)*?\* Licensed under the MIT license", html)
    assert {"curves", "history", "importances", "parallel", "slice-0", "shares", "stretches"} <= set(figures_of(html))
    for name in figures_of(html):
        assert f'id="{name}"' in html
    text = text_of(html)
    result = Result(path)
    best = result.trials.loc[result.trials["best_metric"].idxmin()]
    assert f"Trial {best['trial_id']} (completed) had validation_loss {best['best_metric']:.5g}" in text
    assert f"dray checkpoint export {path} -o model" in text
    assert "lr 0.0001 to 0.1, log" in text
    assert "global_batch_size 64" in text
    assert "Failures None." in text
    first = next(iter(rung_estimates(data_of(path).config, Journal.read(path / "journal.jsonl"))))
    assert f"1 epoch {first.trials} {first.compared} {first.correlation:.2f} 25%" in text


@pytest.mark.slow
def test_report_of_a_running_experiment_says_so_and_of_its_failures(tmp_path: Path) -> None:
    story = told(tmp_path, config(slots=0.25))
    story.write(
        {
            "event": "restarted",
            "trial": 3,
            "error": 'Traceback (most recent call last):\n  File "model.py"\nValueError: <b>17</b> & more\n',
        }
    )
    file = write_report(story.directory.path)
    assert file == story.directory.path / "report.html"
    text, html = text_of(file.read_text()), file.read_text()
    assert text.count("running") >= 1
    assert '<p class="state running">' in html
    assert "ValueError: &lt;b&gt;17&lt;/b&gt; &amp; more" in html
    assert "<b>17</b>" not in html
    assert "1 trial had invalid hyperparameters" in text
    assert "slots per trial 1/4 slot" in text
    # "layers" is [1, 2] in all that have validated, and nothing yet in one that has not started.
    assert "trial state batches best at error lr net.depth 0 completed 20 10 0.25 0.1726" in text
    assert "3 failures; after 1 of them a trial was not restarted" in text
    story.happen(Exited(trial=3, reason="out_of_memory"))
    assert "1 trial ran out of GPU memory" in text_of(write_report(story.directory.path).read_text())
    story.journal.close()
    assert '<p class="state stopped">' in write_report(story.directory.path).read_text()


@pytest.mark.slow
def test_report_counts_failures_and_nan_first_and_failed_trials_are_never_the_best(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    story.validate(1, 10, 0.125)  # better than all others, but it failed
    story.validate(3, 20, math.nan)
    story.happen(Exited(trial=3, reason="completed"), Started(trial=4), Exited(trial=4, reason="completed"))
    story.journal.close()
    html = write_report(story.directory.path).read_text()
    head = html.partition("</header>")[0]
    assert '<p class="state partly_failed">partly failed</p>' in head, "it is not green"
    assert '<p class="trouble">1 of 5 trials failed.</p>' in head
    assert '<p class="trouble">1 trial diverged: NaN since batch 20 (trial 3).</p>' in head
    assert "<b>0.25</b><span>best error</span>" in head
    text = text_of(html)
    assert "Trial 0 (completed) had error 0.25 after 10 batches" in text
    assert data_of(story.directory.path).ranked["trial_id"].tolist() == [0, 3, 1]
    assert figures.history(data_of(story.directory.path))["data"][1]["y"][-1] == 0.25


def test_failures_of_one_line_are_grouped_whatever_their_message(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    where = "KeyError at model_def.py:14 in train_batch"
    for trial in (3, 4):
        story.write({"event": "restarted", "trial": trial, "error": f"KeyError: lr{trial} is missing", "where": where})
    text = text_of(write_report(story.directory.path).read_text())
    assert "lr4 is missing model_def.py:14 in train_batch · trial 3, 4" in text
    assert "lr3" not in text


@pytest.mark.parametrize("name", ["custom", "my_module:MyMethod"])
def test_report_of_a_custom_method_has_no_rungs(tmp_path: Path, name: str) -> None:
    searcher = {"name": name, "metric": "error", "max_length": {"batches": 20}}
    own = load_config({"entrypoint": "m:T", "hyperparameters": {"lr": 0.1}, "searcher": searcher})
    directory = ExperimentDirectory.create(tmp_path / "experiment", own, None)
    Journal(directory.journal).close()
    looked = data_of(directory.path)
    assert looked.rungs == ()
    assert looked.rung_name(0) == "all trials"


@pytest.mark.slow
def test_report_before_anything_was_measured(tmp_path: Path) -> None:
    text = text_of(write_report(Story(tmp_path / "experiment", config()).directory.path).read_text())
    assert "best error" in text
    assert "none yet" in text
    assert " Search method " in text


def test_numbers_and_names_cannot_break_the_page() -> None:
    told = html.script({"y": [1.0, math.nan, -math.inf], "name": "</script><b>", 3: (True, None)})
    assert "<" not in told
    assert json.loads(told) == {"y": [1.0, None, None], "name": "</script><b>", "3": [True, None]}


def test_a_missing_experiment_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoExperiment, match="no experiment in"):
        write_report(tmp_path)
