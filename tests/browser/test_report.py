"""The report as a browser draws it, from its file alone: what is on the screen is in the experiment's tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from selenium.webdriver.support.wait import WebDriverWait

import dray
from dray.report import write_report
from tests.browser.page import PATIENCE_S, POLL_S, SCREENS, axe, on_screen
from tests.records.test_result import config, told

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror=hacked=1>"


@pytest.fixture
def page(browser: Any, result: dray.Result, tmp_path: Path) -> Iterator[Any]:
    """The report, drawn to its end."""
    browser.get(write_report(result.path, tmp_path / "report.html").as_uri())
    until(browser, lambda: drawn(browser))
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    browser.get("about:blank")


def until(browser: Any, holds: Any) -> None:
    WebDriverWait(browser, PATIENCE_S, POLL_S).until(lambda _: holds())


def drawn(page: Any) -> dict[int, list[tuple[float, float]]]:
    """The lines of trials in the plot of curves."""
    lines = page.execute_script("return document.querySelector('.lines')?.drawn?.lines ?? []")
    return {
        line["trial"]: list(zip(line["x"], line["y"], strict=True)) for line in lines if line.get("trial") is not None
    }


def table(result: dray.Result, name: str) -> dict[int, list[tuple[float, float]]]:
    rows: pd.DataFrame = result.metrics.query(f"kind == 'validation' and name == '{name}'")
    return {
        int(trial): [(x, pytest.approx(y, rel=1e-6)) for x, y in zip(mine["epochs"], mine["value"], strict=True)]
        for trial, mine in rows.groupby("trial_id")
    }


def click(page: Any, selector: str) -> None:
    page.execute_script("document.querySelector(arguments[0]).click()", selector)


@pytest.mark.long
def test_lines_are_the_metrics_that_one_chooses(page: Any, result: dray.Result) -> None:
    click(page, "input[name=show]:not(:checked)")
    until(page, lambda: drawn(page) == table(result, "validation_loss"))
    for label in ("validation accuracy", "validation_loss"):  # the one more, the other away
        click(page, f".several label[title='{label}'] input")
    until(page, lambda: drawn(page) == table(result, "accuracy"))


def test_a_click_on_a_line_selects_its_trial_in_all_figures(page: Any, result: dray.Result) -> None:
    best = result.overview.best_trial
    page.execute_script(
        """const plot = document.querySelector(".lines");
           plot.focus();
           for (const key of ["ArrowUp", "Enter"])
             plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));"""
    )
    until(page, lambda: page.execute_script("return document.querySelector('.jump .legend')?.textContent.trim()"))
    assert page.execute_script("return document.querySelector('.jump .legend').textContent.trim()") == f"trial {best}"


def test_text_of_others_stays_text(browser: Any, tmp_path: Path) -> None:
    story = told(tmp_path, config().model_copy(update={"name": HOSTILE}))
    story.write({"event": "restarted", "trial": 3, "error": f"ValueError: {HOSTILE}"})
    story.journal.close()
    browser.get(write_report(story.directory.path).as_uri())
    assert browser.title == f"{HOSTILE}: error"
    assert browser.find_element("css selector", "h1").text == HOSTILE
    assert HOSTILE in browser.find_element("css selector", "main").text
    assert browser.execute_script("return window.hacked") is None
    assert browser.get_log("browser") == []


LOOK = """
const canvas = document.querySelector("#history canvas"), { width, height } = canvas;
const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
let ink = [255, 255, 255];  // the last pixels of the axis's title have its colour
for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] === 255) ink = [...pixels.slice(at, at + 3)];
const wide = Math.max(...[...document.querySelectorAll("canvas")].map(each => each.getBoundingClientRect().width));
return [getComputedStyle(document.body).backgroundColor, ink.join(), wide];
"""


@pytest.mark.long
def test_report_is_dark_where_that_is_preferred_and_light_on_paper(page: Any) -> None:
    def is_dark() -> tuple[bool, bool]:
        background, ink, _ = page.execute_script(LOOK)
        return _brightness(background.partition("(")[2].rstrip(")")) < 90, _brightness(ink) > 140

    media = "Emulation.setEmulatedMedia"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    try:
        until(page, lambda: is_dark() == (False, False))
        page.execute_cdp_cmd(media, {"features": dark})
        until(page, lambda: is_dark() == (True, True))
        page.execute_cdp_cmd(media, {"media": "print", "features": dark})
        page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        assert is_dark() == (False, False), "at once: the browser does not wait"
        assert page.execute_script(LOOK)[2] <= 700, "pixels of a page"
        page.execute_script("window.dispatchEvent(new Event('afterprint'))")
    finally:
        page.execute_cdp_cmd(media, {"media": "", "features": []})
    until(page, lambda: page.execute_script(LOOK)[2] > 700)


def _brightness(colour: str) -> float:
    return sum(float(part) for part in colour.split(",")[:3]) / 3


@pytest.mark.parametrize(("width", "theme"), [SCREENS[0], pytest.param(*SCREENS[1], marks=pytest.mark.long)])
def test_report_fits_its_screen_and_axe_finds_nothing(page: Any, width: int, theme: str) -> None:
    with on_screen(page, width, theme):
        page.refresh()
        until(page, lambda: drawn(page))
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        assert axe(page, {}) == []
