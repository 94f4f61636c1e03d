"""An experiment's curves as a browser draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from dray.figures.data import rungs_reached
from dray.records.result import Result
from tests.browser.page import MANY, Site

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DRAWN = """const place = document.querySelectorAll(".lines")[arguments[0]];
const fields = ({ x, y, trial, label, band, behind, raw }) => ({ x, y, trial, label, band, behind, raw });
return place?.drawn?.lines.map(fields) ?? [];"""
PLACE = """const place = document.querySelectorAll(".lines")[arguments[0]], { lines, scales, log } = place.drawn;
const box = place.querySelector(".u-over").getBoundingClientRect(), on = log ? Math.log10 : each => each;
const share = (scale, at) => (at - scale.min) / (scale.max - scale.min);
const line = lines.find(it => it.trial === arguments[1] && !it.behind), i = Math.min(arguments[2], line.x.length - 1);
const y = { min: on(scales.y.min), max: on(scales.y.max) };
const [left, up] = [box.width * share(scales.x, line.x[i]), box.height * share(y, on(line.y[i]))];
return [Math.round(box.left + left), Math.round(box.bottom - up)];"""
"""Where a trial's point is on the screen."""


def drawn(site: Site, plot: int = 0) -> list[dict[str, Any]]:
    return list(site.js(DRAWN, plot))


def trials_of(lines: list[dict[str, Any]]) -> set[int]:
    return {line["trial"] for line in lines if line["trial"] is not None}


def pointer(site: Site, trial: int, point: int = 99, plot: int = 0) -> tuple[int, int]:
    x, y = site.js(PLACE, plot, trial, point)
    return x, y


def move(chain: ActionChains, x: int, y: int) -> ActionChains:
    chain.w3c_actions.pointer_action.move_to_location(x, y)  # type: ignore[no-untyped-call]
    return chain


def go(site: Site, x: int, y: int) -> ActionChains:
    return move(ActionChains(site.browser, duration=0), x, y)


def best_of(site: Site, name: str) -> int:
    best = Result(site.results / name).reader.best()
    assert best is not None
    return best.id


def test_bands_have_the_quartiles_of_all_trials_by_rung(site: Site) -> None:
    site.open("#/e/many/curves")
    site.until(lambda: drawn(site), "curves")
    reader = Result(site.results / "many").reader
    rows = Result(site.results / "many").metrics.query("kind == 'validation' and name == 'validation_loss'")
    bands = [line for line in drawn(site) if line["band"]]
    assert [band["label"] for band in bands] == ["up to 1 epoch", "up to 4 epochs", "up to 16 epochs"]
    for rung, line in enumerate(bands, start=1):
        mine = [each.id for each in reader.ranked() if rungs_reached(reader.rungs, each.last_step) == rung]
        assert line["band"]["of"] == len(mine)
        values = rows[rows["trial_id"].isin(mine) & (rows["epochs"] == line["x"][-1])]["value"]
        quartiles = [line["band"]["low"][-1], line["y"][-1], line["band"]["high"][-1]]
        assert quartiles == pytest.approx(np.quantile(values, [0.25, 0.5, 0.75]), rel=1e-5)
    best = best_of(site, "many")
    assert trials_of(drawn(site)) == {best}, "the others are in the bands"
    site.until(lambda: f"All {MANY:,} trials that have validated" in site.texts("section.curves [role=status]")[0])
    told = f"in 3 bands; the best is trial {best}"
    site.until(lambda: told in site.one(".lines").get_attribute("aria-label"))
    assert site.one(".lines").get_attribute("role") == "img"


def test_single_trials_are_drawn_on_demand_and_the_note_says_which(site: Site) -> None:
    site.open("#/e/digits-1/curves?show=individual")
    site.until(lambda: len(trials_of(drawn(site))) == 64, "curves")
    rows = Result(site.results / "digits-1").metrics.query("kind == 'validation' and name == 'validation_loss'")
    found = {line["trial"]: line["y"] for line in drawn(site)}
    assert found.keys() == set(rows["trial_id"])
    for trial, mine in rows.groupby("trial_id"):
        assert found[trial] == pytest.approx(mine["value"].tolist(), rel=1e-6)
    site.until(lambda: "All 64 trials that have validated." in site.texts("section.curves [role=status]")[0])
    site.open("#/e/many/curves")
    site.until(lambda: len(drawn(site)) == 4, "three bands and the best")
    site.js("document.querySelectorAll('input[name=show]')[1].click()")
    site.until(lambda: len(trials_of(drawn(site))) == 200)
    assert "show=individual" in site.browser.current_url
    told = "200 of 1,000 trials: the best 100 and 100 evenly by rank."
    site.until(lambda: told in site.texts("section.curves [role=status]")[0])


@pytest.mark.long
def test_several_metrics_are_a_grid_and_all_choices_are_in_the_address(site: Site) -> None:
    site.open("#/e/digits-1/curves")
    site.until(lambda: drawn(site), "curves")
    site.js("document.querySelector('.several').open = true")
    pick = """const labels = [...document.querySelectorAll('.several label')];
              labels.find(it => it.innerText.trim() === arguments[0]).querySelector('input').click()"""
    site.js(pick, "training loss")
    site.js(pick, "validation accuracy")
    site.until(lambda: len([plot for plot in range(3) if drawn(site, plot)]) == 3, "three plots")
    choose = """const label = [...document.querySelectorAll('label')].find(it => it.innerText.startsWith(arguments[0]));
                const it = label.querySelector('select');
                it.value = arguments[1];
                it.dispatchEvent(new Event('change', { bubbles: true }));"""
    site.js(choose, "along", "slot-time")
    site.js(choose, "scale", "log")
    site.js(choose, "smoothing", "0.6")
    titles = "return [...document.querySelectorAll('section.curves')].map(it => it.dataset.metric)"
    wanted = ["validation_loss", "training loss", "validation accuracy"]
    site.until(lambda: site.js(titles) == wanted)

    axes = "return [...document.querySelectorAll('.lines')].map(it => [it.drawn?.x, it.drawn?.log])"

    def settled() -> bool:
        smooth = [any(line["raw"] for line in drawn(site, plot)) for plot in range(3)]
        return smooth == [True] * 3 and site.js(axes) == [["slot-seconds", True]] * 3

    site.until(settled, "smoothed lines on a logarithmic scale along slot time")
    before = [drawn(site, plot) for plot in range(3)]
    site.browser.refresh()
    site.until(lambda: [drawn(site, plot) for plot in range(3)] == before, "the same after a reload")
    assert site.js(titles) == wanted
    smoothed = next(line for line in before[0] if line["raw"])
    behind = next(line for line in before[0] if line["behind"])
    assert behind["y"] == smoothed["raw"]
    last, expected = 0.0, []
    for number, value in enumerate(smoothed["raw"], start=1):
        last = 0.6 * last + 0.4 * value
        expected.append(last / (1 - 0.6**number))
    assert smoothed["y"] == pytest.approx(expected), "an exponential moving average without its bias to 0"
    spent = Result(site.results / "digits-1").timeline.query(f"trial_id == {best_of(site, 'digits-1')}")
    assert 0 < behind["x"][-1] <= ((spent["end"] - spent["start"]) * spent["slots"]).sum()


def test_a_line_is_pointed_at_and_selected_and_a_box_selects_those_in_it(site: Site) -> None:
    best = best_of(site, "digits-1")
    site.open("#/e/digits-1/curves?show=individual&sel=")
    site.until(lambda: len(drawn(site)) == 64, "curves")
    x, y = pointer(site, best)
    go(site, x, y).perform()
    site.until(lambda: site.texts(".tip"), "the tip")
    [text] = site.texts(".tip")
    value = (
        Result(site.results / "digits-1")
        .metrics.query(f"trial_id == {best} and name == 'validation_loss'")["value"]
        .iloc[-1]
    )
    assert text.startswith(f"trial {best}, the best at 16 epochs: ")
    assert float(text.rpartition(": ")[2]) == pytest.approx(value, rel=1e-4)
    go(site, x, y).click().perform()
    site.until(lambda: f"sel={best}" in site.browser.current_url, "selected")
    site.until(lambda: "1 trial selected" in site.one("#picked").text)
    site.until(lambda: [line["trial"] for line in drawn(site)][-1] == best, "drawn above the others, in its colour")
    go(site, x, y).click().perform()
    site.until(lambda: "sel=" not in site.browser.current_url, "not any more")
    # A box around the ends of the curves that got to the last rung.
    longest = {line["trial"] for line in drawn(site) if line["x"][-1] == 16}
    ends = [pointer(site, trial) for trial in longest]
    left, top, bottom = x - 60, min(end[1] for end in ends) - 20, max(end[1] for end in ends) + 12
    chain = go(site, left, top).key_down(Keys.SHIFT).click_and_hold()
    move(chain, x - 2, bottom)
    chain.release().key_up(Keys.SHIFT).perform()
    site.until(lambda: f"{len(longest)} trials selected" in site.one("#picked").text)
    chosen = "return import('/static/selection.js').then(it => it.all().map(([, trial]) => trial))"
    assert set(site.js(chosen)) == longest
    site.js("document.querySelector('#picked button').click()")


def test_a_stretch_is_zoomed_into_and_all_is_seen_again(site: Site) -> None:
    best = best_of(site, "digits-1")
    site.open("#/e/digits-1/curves")
    site.until(lambda: drawn(site), "curves")
    range_of = "const it = document.querySelector('.lines').drawn.scales.x; return [it.min, it.max]"
    whole = site.js(range_of)
    (x0, y), (x1, _) = pointer(site, best, 5), pointer(site, best, 9)
    chain = go(site, x0, y).click_and_hold()
    move(chain, x1, y)
    chain.release().perform()
    site.until(lambda: site.js(range_of) == pytest.approx([6, 10], abs=0.1), "the stretch")
    seen = site.js(range_of)
    site.browser.refresh()
    site.until(lambda: drawn(site) and site.js(range_of) == pytest.approx(seen), "also after a reload")
    site.browser.back()
    site.until(lambda: site.js(range_of) == whole, "Back")
    site.browser.forward()
    site.until(lambda: site.js(range_of) == pytest.approx(seen))
    ActionChains(site.browser).double_click(site.one(".u-over")).perform()
    site.until(lambda: site.js(range_of) == whole, "all of it")


def test_a_pointer_may_rest_while_the_lines_below_it_become_fewer(site: Site) -> None:
    best = best_of(site, "many")
    site.open("#/e/many/curves?show=individual&sel=")
    site.until(lambda: len(drawn(site)) == 200, "curves")
    go(site, *pointer(site, best, 7)).perform()
    site.until(lambda: site.texts(".tip"), "the tip")
    site.js("document.querySelectorAll('input[name=show]')[0].click()")
    site.until(lambda: len(drawn(site)) == 4, "bands and the best")
    site.js("document.querySelectorAll('input[name=show]')[1].click()")
    site.until(lambda: len(drawn(site)) == 200)
    assert [each for each in site.browser.get_log("browser") if each["level"] == "SEVERE"] == []


def test_lines_are_reached_by_keys_and_said(site: Site) -> None:
    site.open("#/e/digits-1/curves?sel=")
    site.until(lambda: drawn(site), "curves")
    best = best_of(site, "digits-1")
    site.js("document.querySelector('.lines').focus()")
    site.press(Keys.ARROW_RIGHT)
    site.until(lambda: site.texts(".tip[aria-live=polite]")[0].startswith(f"trial {best}, the best at 1 epochs"))
    site.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    site.until(lambda: f"trial {best}, the best at 3 epochs" in site.texts(".tip")[0])
    site.press(Keys.ARROW_UP)
    site.until(lambda: site.texts(".tip")[0].startswith("up to 16 epochs; at 3 epochs: median "))
    site.press(Keys.ARROW_DOWN, Keys.ENTER)
    site.until(lambda: f"sel={best}" in site.browser.current_url)
    site.js("document.querySelector('#picked button').click()")


def test_plots_of_a_grid_share_their_cursor(site: Site) -> None:
    best = best_of(site, "digits-1")
    site.open("#/e/digits-1/curves?metric=validation%2520validation_loss,training%2520loss")
    site.until(lambda: drawn(site, 0) and drawn(site, 1), "two plots")
    go(site, *pointer(site, best, 7)).perform()
    site.until(lambda: [" at 8 epochs: " in text for text in site.texts(".tip")] == [True] * 2, "a tip in each")
    ranges = "return [...document.querySelectorAll('.lines')].map(it => it.drawn.scales.x).map(it => [it.min, it.max])"
    whole = site.js(ranges)
    (x0, y), (x1, _) = pointer(site, best, 5), pointer(site, best, 9)
    move(go(site, x0, y).click_and_hold(), x1, y).release().perform()
    site.until(lambda: all(each == pytest.approx([6, 10], abs=0.1) for each in site.js(ranges)), "and a zoom")
    ActionChains(site.browser).double_click(site.one(".u-over")).perform()
    site.until(lambda: site.js(ranges) == whole, "all of it")


def test_the_choice_of_metrics_closes_by_escape_which_does_not_leave_the_page(site: Site) -> None:
    site.open("#/e/digits-1/curves")
    site.until(lambda: drawn(site), "curves")
    site.js("document.querySelector('.several summary').focus()")
    site.press(Keys.ENTER)
    site.until(lambda: site.all(".several[open]"))
    site.press(Keys.TAB, Keys.TAB, Keys.SPACE)
    site.until(lambda: len(site.all("section.curves")) == 2, "a second metric")
    site.press(Keys.ESCAPE)
    site.until(lambda: not site.all(".several[open]"))
    assert "#/e/digits-1/curves" in site.browser.current_url
    assert site.js("return document.activeElement.localName") == "summary"


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_curves_are_followed_drawn_dark_and_cleaned_up(site: Site) -> None:
    site.open("#/e/experiment/curves?show=individual")
    site.until(lambda: 3 in trials_of(drawn(site)), "curves")
    site.story.validate(3, 19, 0.0703125)
    site.until(lambda: any(0.0703125 in line["y"] for line in drawn(site)), "the new value")
    tick = """const letters = document.querySelector('.lines canvas').getContext('2d').getImageData(0, 0, 90, 420).data;
              return letters.reduce((most, it, i) => i % 4 < 3 ? Math.max(most, it) : most, 0)"""
    light = site.js(tick)
    try:
        site.browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        site.until(lambda: site.js(tick) > light, "lighter letters")
        site.until(lambda: 3 in trials_of(drawn(site)), "and the curves")
    finally:
        site.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    site.until(lambda: len(site.all(".lines .uplot")) == 1, "the former one is gone")
    site.open("#/e/experiment")
    site.until(lambda: not site.all(".uplot"))


def test_smoothing_leaves_gaps_and_a_constant_as_they_are(site: Site) -> None:
    site.open("#/")
    smooth = "return import('/static/plot.js').then(it => it.smooth(arguments[0], arguments[1]))"
    call = f"return (function () {{ {smooth} }}).apply(null, arguments)"
    assert site.js(call, [3, 3, None, 3], 0.9) == pytest.approx([3, 3, None, 3])
    assert site.js(call, [1, None, 2], 0.5) == [1, None, pytest.approx((0.25 * 1 + 0.5 * 2) / 0.75)]
    assert site.js(call, [1, 5, 2], 0) == [1, 5, 2]
