"""The server's page as a browser draws it, in front of a fake control and real experiments."""

from __future__ import annotations

import shutil

import pytest

from tests.browser.page import SCREENS, Site, on_screen
from tests.records.repeated import repeated
from tests.records.test_repeats import VALUES, runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.long
def test_trials_that_were_trained_again_are_shown_with_intervals(site: Site) -> None:
    directory = repeated(site.results / "again", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01))
    try:
        site.open("#/e/again")
        rows = "table[aria-label='Trained again with other seeds'] tbody tr"
        site.until(lambda: [text[0] for text in site.texts(rows)] == ["3", "2", "1"], "the finalists")
        site.until(lambda: "0.350 (0.275 .. 0.425)" in site.texts(rows)[2], "all of what was written")
        assert "Trial 3 is the best of 3 over 3 seeds, but not distinguishable from trial 2." in site.texts("section p")
        widths = "return [...document.querySelectorAll('.interval i')].map(it => it.getBoundingClientRect().width)"
        third, second, first = site.js(widths)  # noise adds to the luck of the seeds, by a different amount each
        assert all(0 < width <= 160 for width in (first, second, third))
    finally:
        shutil.rmtree(directory.path)


@pytest.mark.long
def test_the_page_fits_its_screens_light_and_dark_and_leaves_the_machine_alone(site: Site) -> None:
    for width, theme in SCREENS:
        with on_screen(site.browser, width, theme):
            for name, place in (("list", "#/"), ("many", "#/e/many"), ("trial", "#/e/digits-1/t/3")):
                site.open(place)
                site.browser.refresh()
                site.one("tbody tr")
                site.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
                assert site.js("return document.documentElement.scrollWidth") <= width, (name, width)
                loaded = site.js("return performance.getEntriesByType('resource').map(it => it.name)")
                assert {each for each in loaded if not each.startswith(site.url)} == set()
            if width == 390:
                background = site.js("return getComputedStyle(document.body).backgroundColor")
                assert background == "rgb(18, 23, 29)"
    # A refused fork is a 400 that Chromium writes down.
    severe = [
        each for each in site.browser.get_log("browser") if each["level"] == "SEVERE" and "/fork" not in each["message"]
    ]
    assert severe == []
