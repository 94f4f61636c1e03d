"""optuna-dashboard as a browser draws it: what is on the screen is in the experiment's tables."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from selenium.webdriver.support.wait import WebDriverWait

import dray
from dray.observers.observer import replay_to
from dray.observers.optuna_study import OptunaStudy
from dray.records.directory import ExperimentDirectory
from dray.report.ui import free_port, serve_study

# Not imported to see whether it is there: that brings scikit-learn, in runs too in which no test of these is chosen.
is_missing = importlib.util.find_spec("optuna_dashboard") is None
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.skipif(is_missing, reason="needs optuna-dashboard")]

DRAWN = """
const plot = document.getElementById(arguments[0]);
return plot === null || plot.data === undefined ? null : plot.data.map(trace => [trace.name, trace.x, trace.y]);
"""
"""What a plot draws: of each trace its name, and its points."""


@pytest.fixture(scope="module")
def page(browser: Any, result: dray.Result) -> Any:
    directory = ExperimentDirectory(result.path)
    if not directory.study.exists():  # no run has made it, as it was simulated
        replay_to(directory, lambda: OptunaStudy(directory.study, directory.config()))
    port = free_port(19006)
    serve_study(directory.study, port)
    browser.set_window_size(1200, 2400)
    browser.get(f"http://localhost:{port}/dashboard/studies/1")
    WebDriverWait(browser, 120).until(lambda _: len(drawn(browser, "graph-intermediate-values")) == 64)
    for name in ("plot-history", "graph-timeline"):  # each is drawn by itself
        WebDriverWait(browser, 120).until(lambda _, name=name: drawn(browser, name))  # type: ignore[misc]
    yield browser
    browser.set_window_size(1200, 900)


def drawn(page: Any, name: str) -> list[tuple[str, list[float], list[float]]]:
    return page.execute_script(DRAWN, name) or []


def test_curves_are_the_validations_of_each_trial(page: Any, result: dray.Result) -> None:
    rows = result.metrics.query("kind == 'validation' and name == 'validation_loss'")
    shown = {
        int(name.split("#")[1].split()[0]): (x, pytest.approx(y))
        for name, x, y in drawn(page, "graph-intermediate-values")
    }
    assert {
        trial: (mine["batches"].tolist(), mine["value"].tolist()) for trial, mine in rows.groupby("trial_id")
    } == shown


def test_points_of_the_history_are_the_best_of_each_trial(page: Any, result: dray.Result) -> None:
    best = result.trials.set_index("trial_id")["best_metric"]
    # The last trace is the line of the best so far.
    points = [(int(x), y) for _, xs, ys in drawn(page, "plot-history")[:-1] for x, y in zip(xs, ys, strict=True)]
    assert dict(points) == pytest.approx(best.to_dict())
    assert len(points) == 64


def test_states_are_those_of_the_trials(page: Any, result: dray.Result) -> None:
    counts = result.trials["state"].value_counts()
    shown = {name: len(x) for name, x, _ in drawn(page, "graph-timeline")}
    assert shown == {"Complete": counts["COMPLETED"], "Pruned": counts["PRUNED"]}
    assert not [each for each in page.get_log("browser") if each["level"] == "SEVERE"]
