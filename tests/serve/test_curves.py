"""Learning curves over the API: those of some trials, and bands of all."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dray.figures.data import rungs_reached
from dray.figures.plots import BEST_COLOUR, RUNG_COLOURS
from dray.records.metrics import MetricsLog
from dray.records.reader import ExperimentReader
from dray.records.result import Result
from dray.serve import experiments
from dray.serve.curves import MOST_POINTS
from dray.serve.given import MAX_CURVES, Wanted, trials_in
from tests.report.simulated import simulated
from tests.serve.conftest import Served

TRIALS = 32


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("curves") / "digits-1", TRIALS).path


@pytest.fixture
def result(once: Path, served: Served) -> Result:
    shutil.copytree(once, served.results / "digits-1")
    return Result(served.results / "digits-1")


def curves(served: Served, query: str = "") -> Any:
    reply = served.api("GET", f"/experiments/digits-1/curves{query}")
    assert reply.status == 200, reply.body
    return reply.json


def best_of(result: Result) -> int:
    best = result.reader.best()
    assert best is not None
    return best.id


def rows_of(result: Result, name: str = "validation_loss", kind: str = "validation") -> Any:
    return result.metrics.query(f"kind == '{kind}' and name == '{name}'")


def test_curves_say_how_many_of_how_many(served: Served, result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    found = curves(served)
    assert (found["shown"], found["of"], found["how"]) == (TRIALS, TRIALS, "all")
    rows = rows_of(result)
    for curve in found["curves"]:
        mine = rows[rows["trial_id"] == curve["trial"]]
        assert curve["x"] == mine["epochs"].tolist()
        assert curve["y"] == pytest.approx(mine["value"].tolist(), rel=1e-6)
    monkeypatch.setattr("dray.serve.curves.MAX_CURVES", 20)
    found = curves(served, "?along=epochs")  # not the answer that is kept
    assert (found["shown"], found["of"], len(found["curves"])) == (20, TRIALS, 20)
    assert found["how"] == "the best 10 and 10 evenly by rank"
    ranked = result.trials.sort_values("best_metric", kind="stable")["trial_id"].tolist()
    assert [curve["trial"] for curve in found["curves"]][:10] == ranked[:10]
    other = curves(served, "?metric=training%20loss")
    assert [curve["trial"] for curve in other["curves"]][:10] == ranked[:10]
    assert other["metric"] == "training loss"


@pytest.mark.parametrize("metric", ["", "&metric=validation%20accuracy", "&metric=training%20loss"])
def test_bands_have_all_trials_of_a_rung(served: Served, result: Result, metric: str) -> None:
    found = curves(served, f"?show=bands&along=batches{metric}")
    kind, name = metric.partition("=")[2].split("%20") if metric else ("validation", "validation_loss")
    reader, rows = result.reader, rows_of(result, name, kind)
    assert sum(group["trials"] for group in found["groups"]) == found["shown"] == found["of"] == TRIALS
    by_rung = {
        rung: [each.id for each in reader.ranked() if rungs_reached(reader.rungs, each.last_step) == rung]
        for rung in (1, 2, 3)
    }
    assert [len(mine) for mine in by_rung.values()] == [25, 3, 4] == [group["trials"] for group in found["groups"]]
    assert [band["group"] for band in found["bands"]] == [0, 2], "three trials are too few"
    for band, mine in zip(found["bands"], (by_rung[1], by_rung[3]), strict=True):
        assert band["of"] == len(mine)
        for place, batches in enumerate(band["x"]):
            values = rows[rows["trial_id"].isin(mine) & (rows["batches"] == batches)]["value"]
            assert len(values) == band["trials"][place]
            quartiles = np.quantile(values, [0.25, 0.5, 0.75])
            assert [band[name][place] for name in ("low", "middle", "high")] == pytest.approx(quartiles, rel=1e-6)
    best = best_of(result)
    assert [curve["trial"] for curve in found["curves"]] == [best, *(trial for trial in by_rung[2] if trial != best)]


def test_a_selection_has_its_curves_along_time_and_slot_time(served: Served, result: Result) -> None:
    found = curves(served, "?trials=3,17-19&along=time")
    assert sorted(curve["trial"] for curve in found["curves"]) == [3, 17, 18, 19]
    assert found["how"] == "those that were asked for"
    assert found["alongs"] == ["batches", "epochs", "time", "slot-time"]
    rows, trials = rows_of(result), result.trials.set_index("trial_id")
    for curve in found["curves"]:
        began = trials["started"][curve["trial"]].timestamp()
        times = rows[rows["trial_id"] == curve["trial"]]["time"]
        assert curve["x"] == pytest.approx((times - began).tolist(), abs=1e-3)
    spent = result.timeline
    for curve in curves(served, "?along=slot-time")["curves"]:
        mine, times = spent[spent["trial_id"] == curve["trial"]], rows[rows["trial_id"] == curve["trial"]]["time"]
        taken = [((mine["end"].clip(upper=at) - mine["start"]).clip(lower=0) * mine["slots"]).sum() for at in times]
        assert curve["x"] == pytest.approx(taken, abs=1e-3)
        assert curve["x"][0] == pytest.approx(1.5, abs=1e-3), "half a second to start, and an epoch a second"


def test_answers_stay_small_and_say_what_is_thinned(tmp_path: Path, served: Served) -> None:
    simulated(served.results / "digits-1", 500, workers=32)
    for query in ("", "?show=bands", "?metric=training%20loss&show=bands&along=slot-time"):
        reply = served.api("GET", f"/experiments/digits-1/curves{query}")
        assert len(reply.body) < 200_000
        assert len(reply.json["curves"]) <= MAX_CURVES
    [note] = served.api("GET", "/experiments/digits-1/curves?show=bands").json["notes"]
    assert "fewer than half of them, or fewer than 4" in note


def test_a_long_curve_is_thinned_and_says_so(served: Served, result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dray.serve.curves.MOST_POINTS", 5)
    best = best_of(result)
    found = curves(served, f"?trials={best}")
    [curve] = found["curves"]
    assert (curve["of"], len(curve["x"]), curve["x"][0], curve["x"][-1]) == (16, 5, 1, 16)
    assert found["notes"] == ["Curves with more than 5 points are thinned; spikes and NaN are kept."]
    assert MOST_POINTS == 400


@pytest.mark.parametrize(
    "query", ["along=rank", "show=all", "trials=x", "trials=1-999", "trials=-1", "metric=no%20thing"]
)
def test_what_is_no_curve_is_refused(served: Served, result: Result, query: str) -> None:
    reply = served.api("GET", f"/experiments/digits-1/curves?{query}")
    assert reply.status == 400
    assert reply.json["error"].startswith(query.partition("=")[0])


def test_answers_that_nobody_looks_at_any_more_are_forgotten(
    served: Served, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[object]()

    def remembered(reader: ExperimentReader, what: Any, include: Any = ()) -> bytes:
        made.append(what)
        return b"{}"

    monkeypatch.setattr(experiments, "MOST_MADE", 3)
    monkeypatch.setattr(experiments, "curves", remembered)
    monkeypatch.setattr(experiments, "figures_of", remembered)
    found, one, two, three = experiments.Experiments(served.results), *(Wanted(trials=str(each)) for each in range(3))
    for wanted in (one, two, two, three, three, one):
        found.figures("digits-1", "history")
        found.curves("digits-1", wanted)
    assert made == ["history", one, two, three, one], "one was the oldest; the figure is looked at all the time"


def test_numbers_of_a_selection() -> None:
    assert trials_in("7") == (7,)
    assert trials_in("3-5,4,1") == (3, 4, 5, 1)
    with pytest.raises(ValueError, match="at most 200"):
        trials_in("0-99999999999")


def test_selected_trials_have_neither_the_colour_of_the_best_nor_of_a_rung() -> None:
    page = (Path(experiments.__file__).parent / "page" / "selection.js").read_text()
    colours = re.findall(r"#[0-9a-f]{6}", next(line for line in page.splitlines() if "COLOURS =" in line))
    assert len(set(colours)) == len(colours) >= 8
    assert not {BEST_COLOUR, *RUNG_COLOURS} & set(colours)


def test_a_spike_and_nan_of_a_long_series_are_in_every_answer(served: Served, result: Result) -> None:
    values = [1 / batches for batches in range(1, 30_001)]
    values[12_344], values[20_000] = 100.0, math.nan
    log = MetricsLog(result.path / "metrics")
    fields = {"epochs": None, "kind": "training", "name": "long", "time": 1.0}
    log.append(0, ({"batches": at, "value": value, **fields} for at, value in enumerate(values, start=1)))
    log.close()
    reply = served.api("GET", "/experiments/digits-1/trials/0/metrics?points=400")
    [series] = [each for each in reply.json["series"] if each["name"] == "long"]
    [curve] = curves(served, "?metric=training%20long&trials=0&along=batches")["curves"]
    for batches, shown in ((series["batches"], series["values"]), (curve["x"], curve["y"])):
        points = dict(zip(batches, shown, strict=True))
        assert len(points) == 400
        assert points == {at: "nan" if at == 20_001 else pytest.approx(values[at - 1], rel=1e-6) for at in points}
        assert {1, 12_345, 20_001, 30_000} <= set(points)
    assert (series["of"], curve["of"]) == (30_000, 30_000)
    assert len(reply.body) < 60_000
