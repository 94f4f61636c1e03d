"""The Pareto front as a browser draws it, in the report: each trial where it belongs."""

from __future__ import annotations

from typing import Any

import pytest

import dray
from dray.report import write_report
from dray.report.figures import BEST_COLOUR
from dray.report.front import GREY
from tests.browser.test_report import CHOOSE, DRAWN, same
from tests.report.simulated import simulated

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LOOKS = """
const plot = document.getElementById("front");
return [...plot.querySelectorAll(".scatterlayer .trace")].map(trace => [
  getComputedStyle(trace.querySelector(".points path")).fill, trace.querySelectorAll(".lines path").length]);
"""
"""The colour of each trace's points, and its lines."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    return dray.Result(simulated(tmp_path_factory.mktemp("browser") / "objectives", 64, several=True).path)


@pytest.fixture(scope="module")
def page(browser: Any, result: dray.Result) -> Any:
    browser.get(write_report(result.path).as_uri())
    return browser


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))})"


def test_each_trial_is_drawn_in_its_group(page: Any, result: dray.Result) -> None:
    trials = result.trials
    exceed = trials["metrics.size"] > 200
    front = trials["front"].eq(1).fillna(False)
    assert exceed.any()
    assert front.sum() > 2
    groups = (exceed, ~exceed & ~front, front)
    for scale in page.execute_script("return Object.keys(figures.front.scales)"):
        if "hidden" in scale:
            continue
        page.execute_script(CHOOSE, "scale", "front", scale)
        for drawn, group in zip(page.execute_script(DRAWN, "front"), groups, strict=True):
            same([tuple(point) for point in drawn], trials[group][["metrics.size", "metrics.validation_loss"]])


def test_front_is_a_line_and_what_exceeds_a_limit_is_grey(page: Any) -> None:
    looks = page.execute_script(LOOKS)
    assert looks[0] == [rgb(GREY), 0]
    assert looks[2] == [rgb(BEST_COLOUR), 1]
    assert looks[1][0] not in (looks[0][0], looks[2][0])


def test_table_has_the_front_the_best_in_the_first_objective_first(page: Any, result: dray.Result) -> None:
    first = page.execute_script("""
        const heading = [...document.querySelectorAll("h2")].find(each => each.textContent === "Pareto front");
        return [...heading.parentElement.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent);
    """)
    front = result.trials[result.trials["front"] == 1].sort_values("best_metric")
    assert list(map(int, first)) == front["trial_id"].tolist()
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
