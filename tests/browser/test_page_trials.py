"""The table of an experiment's trials: search, filters, columns, selection, on screens of any width."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from dray.records.result import Result
from searchers.events import Exited, Started
from tests.browser.page import MANY, Site
from tests.records.repeated import repeated
from tests.records.test_repeats import VALUES, runs
from tests.report.simulated import simulated

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TABLE = "table[aria-label=Trials]"
HOSTILE = "<img src=x onerror=window.hacked=1>" + "longer" * 30


@pytest.fixture(autouse=True)
def nothing_selected(site: Site) -> Iterator[None]:
    """Selections are kept by the browser's session."""
    yield
    site.js("sessionStorage.clear()")


def rows(site: Site) -> list[int]:
    """The trials in the document, in order."""
    return [
        int(text)
        for text in site.js(f"return [...document.querySelectorAll('{TABLE} tr[data-key]')].map(it => it.dataset.key)")
    ]


def opened(site: Site, place: str) -> list[int]:
    site.open(place)
    site.one(f"{TABLE} tr[data-key]")
    return rows(site)


def heading(site: Site, label: str) -> None:
    site.click(label, f"{TABLE} thead")


def cell(site: Site, trial: int, label: str) -> str:
    return site.texts(f"{TABLE} tr[data-key='{trial}'] td[data-label='{label}']")[0]


def sel(site: Site) -> str:
    return str(site.js("return new URLSearchParams(location.hash.split('?')[1]).get('sel') ?? ''"))


@pytest.mark.long
def test_only_rows_on_the_screen_are_drawn_and_the_last_ones_are_reached(site: Site) -> None:
    ranked = Result(site.results / "many").trials.sort_values("best_metric", kind="stable")["trial_id"].tolist()
    first = opened(site, "#/e/many/trials")
    assert first == ranked[: len(first)]
    assert len(first) < 80
    site.until(lambda: site.texts("[role=status]").count(f"{MANY:,} trials") == 1)
    site.js("const it = document.querySelector('.table'); it.scrollTop = it.scrollHeight")
    site.until(lambda: rows(site)[-1:] == ranked[-1:], "the last row")
    assert len(rows(site)) < 80
    site.until(lambda: "row=" in site.browser.current_url)
    site.browser.refresh()
    site.until(lambda: rows(site)[-1:] == ranked[-1:], "the last row after a reload")
    site.press("k")
    focused = str(site.js("return document.activeElement.closest('tr').dataset.key"))
    site.press(Keys.ENTER)
    site.until(lambda: f"/t/{focused}" in site.browser.current_url)
    site.browser.back()
    now = "return document.activeElement.closest('tr')?.dataset.key"
    site.until(lambda: site.js(now) == focused, "Back to the same row")
    assert int(focused) not in first
    heading(site, "best")
    site.until(lambda: rows(site)[:1] == ranked[-1:], "the worst first, from the top")
    assert "sort=-best_metric" in site.browser.current_url


def test_trials_are_searched_and_filtered_and_the_address_has_it_all(site: Site) -> None:
    table = Result(site.results / "digits-1").trials
    adams = table[table["hparams.optimizer"] == "adam"]
    pruned = adams[adams["state"] == "PRUNED"]
    opened(site, "#/e/digits-1/trials")
    site.press("/", "optimizer=adam", Keys.TAB)
    site.until(lambda: f"{len(adams)} of 64 trials" in site.texts("[role=status]"))
    chip = f"pruned {len(pruned)}"
    site.until(lambda: chip in site.texts(".chip"), "the numbers of the filter follow the search")
    site.click(f"pruned {len(pruned)}", ".chips")
    wanted = pruned.sort_values("best_metric", kind="stable")["trial_id"].tolist()

    def shown() -> bool:
        there = f"{len(wanted)} of 64 trials" in site.texts("[role=status]")
        return there and len(rows(site)) > 8 and rows(site) == wanted[: len(rows(site))]

    site.until(shown)
    site.browser.refresh()
    site.until(shown, "a reload keeps them")
    site.open("#/e/digits-1")
    site.browser.back()
    site.until(shown, "Back restores them")
    site.click("Show all")
    site.until(lambda: "64 trials" in site.texts("[role=status]"))
    site.press("/", "optimizer=none", Keys.TAB)
    site.until(lambda: "0 of 64 trials" in site.texts("[role=status]"))
    site.open("#/e/digits-1/trials?search=foo > 3")
    site.until(
        lambda: any("no field foo; the fields are best, last, trial," in text for text in site.texts(".trouble"))
    )
    site.open("#/e/digits-1/trials?sort=nonsense")
    site.until(lambda: any("there is no such column" in text for text in site.texts(".trouble")))


def test_columns_are_chosen_and_sorted_by_also_other_metrics(site: Site) -> None:
    rows_of = Result(site.results / "digits-1").metrics.query("kind == 'training' and name == 'accuracy'")
    last = rows_of.sort_values("batches").groupby("trial_id")["value"].last().sort_values()
    opened(site, "#/e/digits-1/trials")
    assert "training accuracy" not in site.texts(f"{TABLE} th")
    site.one(".menu summary").click()
    choose = "[...document.querySelectorAll('.menu label')].find(it => it.textContent.trim() === arguments[0]).click()"
    site.js(choose, "training accuracy")
    site.js(choose, "lr")
    site.press(Keys.ESCAPE)
    site.until(lambda: not site.all(".menu[open]"))
    assert "#/e/digits-1/trials" in site.browser.current_url, "Escape has closed the menu only"
    heading(site, "training accuracy")
    site.until(lambda: rows(site)[:5] == last.index[:5].tolist())
    site.until(lambda: cell(site, last.index[0], "training accuracy") == f"{last.iloc[0]:.5g}")
    site.browser.refresh()
    site.until(lambda: rows(site)[:5] == last.index[:5].tolist())
    assert "lr" not in site.texts(f"{TABLE} th")


@pytest.mark.long
def test_trials_are_selected_one_by_one_in_ranges_and_all_that_are_found(site: Site) -> None:
    order = opened(site, "#/e/many/trials?sort=trial")
    assert order[:4] == [0, 1, 2, 3]
    boxes = site.all(f"{TABLE} td.pick input")
    boxes[1].click()
    ActionChains(site.browser).key_down(Keys.SHIFT).click(boxes[4]).key_up(Keys.SHIFT).perform()
    site.until(lambda: sel(site) == "1-4")
    site.press("j", "x")
    site.until(lambda: sel(site) == "1-5")
    site.press("j", "j", "j", "X")
    site.until(lambda: sel(site) == "1-8")
    site.until(lambda: "8 trials selected" in site.one("#picked").text)
    looks = """return [...document.querySelectorAll('.swatch line')].map(
               it => `${it.getAttribute('stroke')} ${it.getAttribute('stroke-dasharray')}`)"""
    site.until(lambda: len(site.js(looks)) == 8)
    drawn = site.js(looks)
    assert len(set(drawn)) == 8
    site.browser.refresh()
    site.until(lambda: site.js(looks) == drawn, "a reload keeps the selection and its colours")
    site.js(f"document.querySelector('{TABLE} tr[data-key=\"1\"] input').click()")
    site.until(lambda: sel(site) == "2-8")
    site.until(lambda: site.js(looks) == drawn[1:], "the others keep theirs")

    found = Result(site.results / "many").trials.query("`hparams.optimizer` == 'adam'")["trial_id"].tolist()
    site.press("/", "optimizer=adam", Keys.TAB)
    site.until(lambda: f"{len(found)} of {MANY:,} trials" in site.texts("[role=status]"))
    site.click("Clear", "#picked")
    site.until(lambda: not site.all("#picked"))
    site.one(f"{TABLE} th input").click()
    site.until(lambda: f"{len(found)} trials selected" in site.texts("#picked")[0])
    assert len(site.browser.current_url) < 3000, "so many are not in the address"
    checked = f"return [...document.querySelectorAll('{TABLE} td.pick input')].map(it => it.checked)"
    site.until(lambda: all(site.js(checked)))
    site.browser.refresh()
    site.until(lambda: f"{len(found)} trials selected" in site.texts("#picked")[0])
    site.one(f"{TABLE} th input").click()
    site.until(lambda: not site.all("#picked"), "all were selected, now none")


@pytest.mark.usefixtures("quick")
def test_rows_follow_a_running_experiment_and_keep_focus_and_selection(site: Site) -> None:
    opened(site, "#/e/experiment/trials?sel=3&sort=best_metric")
    site.js(f"document.querySelector('{TABLE} tr[data-key=\"3\"] a').focus()")
    site.until(lambda: rows(site).index(3) > rows(site).index(0))
    site.story.validate(3, 20, 0.0625)
    site.until(lambda: cell(site, 3, "best") == "0.062500", "with as many digits as the others")
    site.until(lambda: rows(site).index(3) < rows(site).index(0), "it has moved")
    assert site.js("return document.activeElement.closest('tr')?.dataset.key") == "3"
    assert sel(site) == "3"
    site.story.happen(Exited(trial=3, reason="completed"), Started(trial=4))
    site.until(lambda: "completed" in cell(site, 3, "state"))
    site.until(lambda: "running" in cell(site, 4, "state"))
    site.until(lambda: site.texts("tr.leader[data-key='3'] .mark") == site.texts("tr.leader .mark") == ["★ best"])


def test_repeats_and_the_front_are_marked(site: Site) -> None:
    repeated(site.results / "again", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01))
    opened(site, "#/e/again/trials")
    site.until(lambda: site.texts("tr[data-key='3'] .mark") == ["★ best"], "by its repeats, not by its luck")
    site.until(lambda: site.texts("tr[data-key='5'] .mark") == ["repeat of 1"])
    directory = simulated(site.results / "several", 16, several=True)
    opened(site, "#/e/several/trials")
    front = Result(directory.path).overview.front
    assert len(front) > 1
    site.until(lambda: {trial for trial in rows(site) if site.texts(f"tr[data-key='{trial}'] .mark")} == set(front))
    assert "validation size" in site.texts(f"{TABLE} th"), "the other objective"


def test_hyperparameters_are_text_and_a_phone_shows_cards(site: Site) -> None:
    directory = simulated(site.results / "hostile", 12)
    directory.journal.write_text(directory.journal.read_text().replace('"adam"', json.dumps(HOSTILE)))
    command = site.browser.execute_cdp_cmd
    try:
        for width in (1400, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
            command("Emulation.setDeviceMetricsOverride", size)
            opened(site, "#/e/hostile/trials?columns=hparams.optimizer,best_metric")
            site.until(lambda: HOSTILE in site.texts("td[data-label=optimizer]"))
            titles = "return [...document.querySelectorAll('td span[title]')].map(it => it.title)"
            site.until(lambda titles=titles: HOSTILE in site.js(titles))
            assert site.js("return document.documentElement.scrollWidth") <= width
            heights = set(
                site.js(f"return [...document.querySelectorAll('{TABLE} tr[data-key]')].map(it => it.offsetHeight)")
            )
            assert len(heights) == 1, "a long value makes no row higher"
        display = f"return getComputedStyle(document.querySelector('{TABLE} tr[data-key]')).display"
        assert site.js(display) == "grid", "a card"
        label = "return getComputedStyle(document.querySelector('td[data-label=best]'), '::before').content"
        assert site.js(label) == '"best "'
    finally:
        command("Emulation.clearDeviceMetricsOverride", {})
    assert site.js("return window.hacked === undefined")
