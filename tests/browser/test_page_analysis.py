"""The Analysis tab: figures that are linked with the one selection, by dragging and by conditions."""

from __future__ import annotations

import re
import shutil
from typing import Any
from urllib.parse import parse_qs, quote

import pandas as pd
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from dray.records.result import Result
from tests.browser.page import MANY, Site

pytestmark = [pytest.mark.browser, pytest.mark.slow]

EVIL = "<img src=x onerror=window.hacked=1>"
ALL = Keys.CONTROL + "a" + Keys.NULL
CONDITIONS = "input[aria-label='Conditions that select trials']"


def opened(site: Site, query: str = "", name: str = "digits-1") -> None:
    """Go to an experiment's Analysis, as somebody new does."""
    site.browser.get("about:blank")
    site.open(f"#/e/{name}/analysis{query}")
    section = re.findall(r"section=(\w+)", query)
    site.one(f"#{section[0] if section else 'history'} canvas")


def parameter(site: Site, name: str) -> str:
    return parse_qs(site.browser.current_url.partition("?")[2]).get(name, [""])[0]


def selected(site: Site) -> set[int]:
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", parameter(site, "sel")):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def drag(site: Site, canvas: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Drag between two places of a drawing, as shares of its width and height."""
    place = site.one(canvas)
    site.js("arguments[0].scrollIntoView({block: 'center'})", place)
    wide, high = place.size["width"], place.size["height"]
    (x, y), (to_x, to_y) = [(int((x - 0.5) * wide), int((y - 0.5) * high)) for x, y in (start, end)]
    mouse = ActionChains(site.browser, duration=20).move_to_element_with_offset(place, x, y).click_and_hold()
    mouse.move_by_offset(to_x - x, to_y - y).release().perform()


def drawing(site: Site, canvas: str) -> str:
    return str(site.js("return document.querySelector(arguments[0]).toDataURL()", canvas))


def trials(site: Site, name: str = "digits-1") -> pd.DataFrame:
    return Result(site.results / name).trials


@pytest.mark.long
def test_figures_are_asked_for_and_drawn_when_they_come_on_the_screen(site: Site) -> None:
    asked = "return performance.getEntriesByType('resource').map(it => it.name.split('/figures/')[1]).filter(Boolean)"
    opened(site)
    assert "slots" not in site.js(asked)
    inks = """const found = document.querySelector(arguments[0]), { width, height } = found;
              const { data } = found.getContext("2d").getImageData(0, 0, width, height);
              return new Set(new Uint32Array(data.buffer)).size;"""
    for title, kind in (
        ("Parallel coordinates", "parallel"),
        ("Hyperparameters one by one", "slices"),
        ("Use of slot time", "slots"),
    ):
        site.click(title, ".jump")
        site.one(f"#{kind} canvas")
        site.until(lambda kind=kind: site.js(inks, f"#{kind} canvas") > 10, "colours of what is drawn")
        site.until(lambda kind=kind: parameter(site, "section") == kind)
    assert "slots" in site.js(asked)
    site.until(lambda: len(site.all("#slices canvas[role=img]")) == 3, "lr, hidden and optimizer")
    phases = "table[aria-label=Phases] tbody th"
    site.until(lambda: {"training", "validating", "starting"} <= set(site.texts(phases)))
    drag(site, "#slots canvas", (0.3, 0.5), (0.6, 0.5))
    site.until(lambda: parameter(site, "time"), "a part of the time")
    low, high = map(float, parameter(site, "time").split("-"))
    assert 0 < low < high
    site.click("Show all the time", "#slots")
    site.until(lambda: not parameter(site, "time"))
    site.browser.refresh()
    site.one("#slots canvas")
    top = "return document.getElementById('slots').getBoundingClientRect().top"
    site.until(lambda: 0 <= site.js(top) < 500, "the section of the address")


def test_dragging_along_an_axis_selects_in_all_figures_and_a_reload_keeps_it(site: Site) -> None:
    opened(site, "?section=parallel")
    site.one("#parallel canvas")
    site.one("#slices canvas")
    before = drawing(site, "#slices canvas")
    wide = site.one("#parallel canvas").size["width"]
    drag(site, "#parallel canvas", (1 - 64 / wide, 0.75), (1 - 64 / wide, 0.99))  # the lower part of the last axis
    site.until(lambda: selected(site), "a selection")
    label, limit = parameter(site, "where").split("<=")
    assert label == "validation_loss"
    table = trials(site)
    wanted = set(table.loc[table["best_metric"] <= float(limit), "trial_id"])
    assert selected(site) == wanted
    assert 0 < len(wanted) < len(table)
    site.until(lambda: drawing(site, "#slices canvas") != before, "others fade in the slices")
    assert f"{len(wanted)} of 64 trials, selected" in site.texts("#parallel [role=status]")
    drag(site, "#parallel canvas", (64 / wide, 0.14), (64 / wide, 0.6))  # larger learning rates, too
    site.until(lambda: "lr>=" in parameter(site, "where"), "both conditions")
    low = float(re.findall(r"lr>=(\S+)", parameter(site, "where"))[0])
    assert selected(site) == {trial for trial in wanted if table["hparams.lr"][trial] >= low}
    left = selected(site)
    site.browser.refresh()
    site.until(lambda: site.one(CONDITIONS).get_attribute("value") == parameter(site, "where"))
    assert selected(site) == left
    drag(site, "#parallel canvas", (64 / wide, 0.5), (64 / wide, 0.5))  # a click on the axis
    site.until(lambda: selected(site) == wanted, "without the second condition")
    drag(site, "#parallel canvas", (1 - 64 / wide, 0.09), (64 / wide, 0.09))  # the last label, to the first place
    site.until(lambda: parameter(site, "order") == "3,0,1,2")
    drag(site, "#parallel canvas", (64 / wide, 0.5), (64 / wide, 0.5))
    site.until(lambda: selected(site) == set(), "its axis has moved with it")


@pytest.mark.long
def test_a_box_in_a_slice_selects_and_a_click_takes_away(site: Site) -> None:
    opened(site, "?section=slices")
    drag(site, "#slices canvas", (0.2, 0.02), (0.98, 0.8))
    site.until(lambda: selected(site), "a selection")
    few = selected(site)
    site.click("Best value over time", ".jump")
    drag(site, "#history canvas", (0.02, 0.01), (0.99, 0.95))
    site.until(lambda: selected(site) == set(range(64)), "all of them")
    assert few < set(range(64))
    assert parameter(site, "where") == ""
    opened(site, "?sel=5")
    site.until(lambda: site.texts(".jump .legend a") == ["trial 5"])
    point = """const canvas = document.querySelector("#history canvas");
               const legend = document.querySelector(".jump .legend i");
               const pen = canvas.getContext("2d"), { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
               const square = getComputedStyle(legend).backgroundColor.match(/\\d+/g).map(Number);
               let [x, y, found] = [0, 0, 0];
               for (let at = 0; at < data.length; at += 4)
                 if (square.every((part, of) => data[at + of] === part)) {
                   [x, y, found] = [x + (at / 4) % canvas.width, y + Math.floor(at / 4 / canvas.width), found + 1];
                 }
               return found > 20 ? [x / found / canvas.width, y / found / canvas.height] : null;"""
    spot = tuple(site.until(lambda: site.js(point), "the point in the trial's own colour"))
    drag(site, "#history canvas", spot, spot)
    site.until(lambda: selected(site) == set(), "not selected any more")


@pytest.mark.long
def test_conditions_select_by_keyboard_alone(site: Site) -> None:
    opened(site, "?section=parallel")
    table = trials(site)
    site.one(CONDITIONS).send_keys("lr<0.01 'optimizer'='ADAM'", Keys.ENTER)
    wanted = set(table.loc[(table["hparams.lr"] < 0.01) & (table["hparams.optimizer"] == "adam"), "trial_id"])
    site.until(lambda: selected(site) == wanted, "the trials that meet both")
    for wrong, told in (
        ("depth>3", "There is no axis depth; there are "),
        ("optimizer<3", "optimizer has no order: write optimizer=adam|sgd."),
        ("lr=fast", "lr is a number: write lr<0.01."),
        ("adam", "Can't read adam: write lr<0.01, or optimizer=adam."),
    ):
        box = site.one(CONDITIONS)
        box.send_keys(ALL, wrong)
        site.until(lambda told=told: told in site.texts("#parallel [role=status]")[0], told)
    site.one(CONDITIONS).send_keys(ALL, "optimizer=adam|sgd hidden>=0", Keys.ENTER)
    site.until(lambda: selected(site) == set(range(64)), "all")


@pytest.mark.long
def test_selected_trials_are_shown_although_others_of_their_rank_are_left_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dray.figures.data.MAX_TRIALS", 40)
    opened(site, "?section=parallel", "many")
    lines = "canvas[aria-label^='Parallel coordinates of {} trials']".format
    site.one(lines(40))
    told = f"40 of {MANY:,} trials are shown: the 20 best, and others evenly by rank. "
    site.until(lambda: told in site.texts("#parallel > p"))
    ranked = trials(site, "many").sort_values("best_metric", kind="stable")["trial_id"].tolist()
    opened(site, f"?section=parallel&sel={ranked[21]},{ranked[0]}", "many")
    site.one(lines(41))
    site.until(lambda: any("The selected ones are shown, too." in text for text in site.texts("#parallel > p")))
    opened(site, f"?section=parallel&sel={MANY + 5}", "many")
    site.until(lambda: any("1 selected trial is not shown." in text for text in site.texts("#parallel > p")))


@pytest.mark.long
def test_figures_of_a_running_experiment_are_made_anew_on_demand_and_conditions_stay(site: Site) -> None:
    opened(site, f"?section=parallel&where={quote('error<0.07')}", "experiment")
    told = "#parallel .conditions [role=status]"
    site.until(lambda: any(text.startswith("0 of ") for text in site.texts(told)), "none yet")
    site.story.validate(3, 20, 0.0625)

    def found() -> bool:
        site.click("Refresh", "#parallel")
        return any(text.startswith("1 of ") for text in site.texts(told))

    site.until(found, "the new value")
    assert site.one(CONDITIONS).get_attribute("value") == "error<0.07"
    site.click("Select", "#parallel")
    site.until(lambda: selected(site) == {3})


@pytest.mark.long
def test_names_of_others_are_text_and_long_ones_stay_in_their_place(site: Site) -> None:
    evil, long = site.results / "evil", "w" * 120
    shutil.copytree(site.results / "digits-1", evil)
    try:
        for path in (evil / "journal.jsonl", evil / "experiment.yaml"):
            path.write_text(path.read_text().replace("sgd", EVIL).replace("hidden", long))
        opened(site, "?section=slices&sel=1,2", "evil")
        site.one("#slices canvas")
        site.until(lambda: long in site.texts("table[aria-label='Importance of hyperparameters'] th"))
        place = site.one("#slices canvas")
        ActionChains(site.browser, duration=20).move_to_element_with_offset(place, 0, 20).perform()
        site.click("Parallel coordinates", ".jump")
        site.one(CONDITIONS).send_keys(f'optimizer="{EVIL}"', Keys.ENTER)
        table = trials(site)
        wanted = set(table.loc[table["hparams.optimizer"] == "sgd", "trial_id"])
        site.until(lambda: selected(site) == wanted, "a name with spaces, in quotes")
        for width, theme in ((1400, "light"), (390, "dark")):
            fits(site, width, theme)
        assert site.js("return window.hacked === undefined && document.querySelectorAll('#main img').length === 0")
    finally:
        site.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        site.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        shutil.rmtree(evil)


def fits(site: Site, width: int, theme: str) -> None:
    command: Any = site.browser.execute_cdp_cmd
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
    command("Emulation.setDeviceMetricsOverride", size)
    command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    site.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert site.js("return document.documentElement.scrollWidth") <= width
