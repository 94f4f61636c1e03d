"""The report as a browser draws it: what is on the screen is in the experiment's tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from selenium.webdriver.support.wait import WebDriverWait

import dray
from dray.report import write_report
from tests.browser.page import PATIENCE_S, POLL_S

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NARROW = 390

DRAWN = """
const plot = document.getElementById(arguments[0]), { xaxis, yaxis } = plot._fullLayout;
const traces = [...plot.querySelectorAll(".scatterlayer .trace")];
return traces.map(trace => [...trace.querySelectorAll(".points path")].map(point => {
  const { e, f } = point.transform.baseVal.consolidate().matrix;
  return [xaxis.p2d(e), yaxis.p2d(f)];
}));
"""
"""The points of a plot, trace by trace: from where they are on the screen, by the scale of the axes."""


@pytest.fixture(scope="module")
def page(webgl: Any, result: dray.Result) -> Any:
    """The report on a screen, drawn to its end."""
    webgl.get(write_report(result.path).as_uri())
    return webgl


def points(page: Any, name: str) -> list[tuple[float, float]]:
    return sorted((x, y) for trace in page.execute_script(DRAWN, name) for x, y in trace)


def same(drawn: list[tuple[float, float]], table: pd.DataFrame) -> None:
    """That these are the same points: to a pixel's width, and as many."""
    rows = list(table.itertuples(index=False, name=None))
    assert len(drawn) == len(rows)
    left = list(drawn)
    for x, y in rows:
        nearest = min(left, key=lambda point: _distance(point, (x, y)))
        assert _distance(nearest, (x, y)) < 0.01, f"{(x, y)} is not drawn, the nearest is {nearest}"
        left.remove(nearest)


def _distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    return abs(one[0] - other[0]) / abs(other[0]) + abs(one[1] - other[1]) / abs(other[1])


def validations(result: dray.Result) -> pd.DataFrame:
    return result.metrics.query("kind == 'validation' and name == 'validation_loss'")


def test_nothing_went_wrong(page: Any) -> None:
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


CHOOSE = """
const choice = document.querySelector(`[data-${arguments[0]}="${arguments[1]}"]`);
choice.value = arguments[2];
choice.dispatchEvent(new Event("change"));
return choice.value;
"""


def test_points_of_the_curves_are_the_validations_or_another_metric_that_is_chosen(
    page: Any, result: dray.Result
) -> None:
    accuracy = result.metrics.query("kind == 'validation' and name == 'accuracy'")
    same(points(page, "curves"), validations(result)[["epochs", "value"]])
    assert page.execute_script(CHOOSE, "metric", "curves", "validation accuracy") == "validation accuracy"
    same(points(page, "curves"), accuracy[["epochs", "value"]])
    title = "return document.getElementById('curves').querySelector('.ytitle').textContent"
    assert page.execute_script(title) == "validation accuracy"
    assert page.execute_script(CHOOSE, "metric", "curves", "validation_loss") == "validation_loss"


def test_a_scale_is_chosen_and_the_points_stay(page: Any, result: dray.Result) -> None:
    """`points` takes values from where they are on the screen by the axis's scale."""
    types = "return document.getElementById('history')._fullLayout.yaxis.type"
    scales = page.execute_script(
        "return [...document.querySelector('[data-scale=history]').options].map(option => option.value)"
    )
    assert {"logarithmic"} < set(scales)
    before = [value for _, value in points(page, "history")]
    for scale in [*scales[1:], scales[0]]:
        assert page.execute_script(CHOOSE, "scale", "history", scale) == scale
        assert page.execute_script(types) == ("log" if scale == "logarithmic" else "linear")
        assert [value for _, value in points(page, "history")] == pytest.approx(before, rel=0.01)


COLOURS = """
const plot = document.getElementById("curves");
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(plot.querySelector(".xtick text")).fill];
"""


def test_page_is_dark_where_that_is_preferred_and_light_on_paper(page: Any) -> None:
    media = "Emulation.setEmulatedMedia"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    light, wait = page.execute_script(COLOURS), WebDriverWait(page, PATIENCE_S, POLL_S)
    try:
        page.execute_cdp_cmd(media, {"features": dark})
        wait.until(lambda page: [_brightness(colour) < 90 for colour in page.execute_script(COLOURS)] == [True, False])
        page.execute_cdp_cmd(media, {"media": "print", "features": dark})
        page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        wait.until(lambda page: page.execute_script(COLOURS) == light)
        right = page.execute_script("return document.getElementById('curves').querySelector('svg').width.baseVal.value")
        assert right <= 700, "pixels of a page"
        page.execute_script("window.dispatchEvent(new Event('afterprint'))")
    finally:
        page.execute_cdp_cmd(media, {"media": "", "features": []})
    wait.until(lambda page: page.execute_script(COLOURS) == light)


def _brightness(colour: str) -> float:
    numbers = [float(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    return sum(numbers) / 3


def test_page_fits_a_phone(page: Any) -> None:
    """The last one, as it leaves the page narrow."""
    phone = {"width": NARROW, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        page.refresh()
        assert page.execute_script("return document.documentElement.scrollWidth") == NARROW
        wide = page.execute_script(
            "return [...document.querySelectorAll('.plot svg, .phases td')].map(it => it.getBoundingClientRect().right)"
        )
        assert max(wide) <= NARROW
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
