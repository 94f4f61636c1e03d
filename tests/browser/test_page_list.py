"""The list of experiments as a browser draws it, what can be done with several of them, and signing in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium.webdriver.common.keys import Keys

from dray.records.result import Result
from dray.serve import tokens
from dray.serve.control import Submitted, Verb
from dray.serve.quota import Quota
from dray.serve.refusals import WrongState
from tests.browser.page import Site
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(autouse=True)
def wide(site: Site) -> None:
    """A window with room for all columns."""
    site.browser.set_window_size(1400, 900)


ROW = "return document.querySelector(`input[aria-label='select ${arguments[0]}']`).closest('tr')"
CHOOSE = f"{ROW}.querySelector('input').click()".replace("return ", "")


def names(site: Site) -> list[str]:
    """The directories of the experiments in the table, from the top."""
    labels = "return [...document.querySelectorAll('tbody input')].map(it => it.getAttribute('aria-label'))"
    return [label.removeprefix("select ") for label in site.js(labels)]


def row(site: Site, name: str) -> str:
    return str(site.js(f"{ROW}.innerText", name))


def asked_again(site: Site) -> None:
    """The page asks the server now, as when somebody comes back to its tab."""
    site.js("document.dispatchEvent(new Event('visibilitychange'))")


def listed(site: Site, place: str = "#/", among: str = "digits-1") -> None:
    site.open(place)
    site.browser.refresh()
    site.until(lambda: among in names(site), f"the list at {place}")


@contextmanager
def another(site: Site, name: str, title: str = "") -> Iterator[None]:
    """One more experiment, with four trials."""
    directory = simulated(site.results / name, 4)
    if title:
        config = directory.config_file.read_text()
        directory.config_file.write_text(config.replace("name: simulated\n", f"name: {title}\n", 1))
    try:
        yield
    finally:
        shutil.rmtree(directory.path, ignore_errors=True)


def test_all_experiments_are_listed_searched_and_opened_by_keys(site: Site) -> None:
    listed(site)
    site.until(lambda: {"digits-1", "many", "experiment"} <= set(names(site)))
    best = Result(site.results / "digits-1").overview.best_metric
    site.until(lambda: row(site, "digits-1").split("\n")[1:3] == ["simulated", "digits-1"], "its own name first")
    for part in ("completed", f"{best:.5g} ↓", "validation_loss", "asha", "baseline", "64 of 64"):
        site.until(lambda part=part: part in row(site, "digits-1"), part)
    site.until(lambda: "1 trial waiting" in row(site, "experiment"))
    spark = f"{ROW}.querySelector('.spark').getAttribute('aria-label')"
    site.until(lambda: site.js(spark, "many").endswith("smaller is better"))
    site.press("/", *"baseline")
    site.until(lambda: names(site) == ["digits-1"])
    site.press(Keys.ESCAPE)
    site.until(lambda: len(names(site)) >= 3)
    site.press("j", "j", "k")
    site.until(lambda: site.js("return document.activeElement === document.querySelectorAll('tbody .row a')[0]"))
    site.js(f"{ROW}.querySelector('a').focus()".replace("return ", ""), "digits-1")
    site.press(Keys.ENTER)
    site.until(lambda: "#/e/digits-1" in site.browser.current_url)
    site.js("document.activeElement.blur()")
    site.press(Keys.ESCAPE)
    site.until(lambda: site.texts("h1") == ["Experiments"])


def test_filters_columns_and_order_are_in_the_address(site: Site) -> None:
    listed(site)
    chips = "[aria-label='Filter by state'] button"
    site.until(lambda: {"completed 1", "paused 1", "running 1"} <= set(site.texts(chips)))
    site.click("paused 1")
    site.until(lambda: names(site) == ["many"])
    assert "completed 1" in site.texts(chips), "what another state would give"
    site.click("completed 1")
    site.until(lambda: sorted(names(site)) == ["digits-1", "many"])
    assert (
        "state=PAUSED%252CCOMPLETED" in site.browser.current_url
        or "state=PAUSED%2CCOMPLETED" in site.browser.current_url
    )
    site.js("document.querySelector('.menu').open = true")
    site.js("[...document.querySelectorAll('.menu label')].find(it => it.innerText.trim() === 'budget').click()")
    site.until(lambda: "budget" in site.texts("thead th"))
    site.click("trials ended", "thead")
    site.click("trials ended", "thead")
    heads, order = site.texts("thead th"), names(site)
    site.browser.refresh()
    site.until(lambda: names(site) == order)
    assert site.texts("thead th") == heads
    site.until(lambda: site.texts("[aria-pressed=true]") == ["completed 1", "paused 1"])
    site.click("Clear filters")
    site.until(lambda: "experiment" in names(site))
    assert "state=" not in site.browser.current_url


def test_a_verb_for_many_says_which_and_which_not_and_tells_refusals_one_by_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = site.control.act

    def refusing(name: str, verb: Verb) -> Submitted:
        if name == "many":
            raise WrongState("many is about to end; wait")
        return act(name, verb)

    monkeypatch.setattr(site.control, "act", refusing)
    site.control.put("many", "RUNNING")
    listed(site)
    site.until(lambda: "running" in row(site, "many"))
    for name in ("digits-1", "many", "experiment"):
        site.js(CHOOSE, name)
    site.until(lambda: "3 selected" in site.one(".bulk").text)
    site.browser.refresh()
    site.until(lambda: "3 selected" in site.one(".bulk").text, "the selection is in the address")
    site.click("Stop", ".bulk")
    asked = site.one("dialog[open]").text
    assert "Stop 2 experiments?" in asked
    assert "save a checkpoint first, so nothing is lost" in asked
    assert "it is completed" in asked.partition("Left out, 1 experiment:")[2]
    site.click("Cancel", "dialog")
    site.until(lambda: not site.all("dialog"))
    assert site.control.calls == []
    site.click("Stop", ".bulk")
    site.click("Stop", "dialog")
    site.until(lambda: "refused 1 other" in site.one("dialog").text)
    assert "simulated: many is about to end; wait" in site.one("dialog").text
    assert site.control.calls == [("stop", "experiment")]
    site.click("Close", "dialog")
    site.until(lambda: "stopped" in row(site, "experiment"))
    site.control.put("experiment", "RUNNING")
    site.control.put("many", "PAUSED")
    site.click("Clear", ".bulk")
    site.until(lambda: not site.all(".bulk"))


def test_several_are_tagged_and_tags_are_removed(site: Site) -> None:
    listed(site)
    site.js("document.querySelector(`input[aria-label='select many']`).closest('tr').querySelector('a').focus()")
    site.press("x")
    site.js(CHOOSE, "digits-1")
    site.click("Tag", ".bulk")
    site.one("dialog[open] input[name=add]").send_keys("for the paper, <b>x</b>")
    site.js("document.querySelector('dialog input[value=baseline]').click()")
    site.click("Tag", "dialog")
    site.until(lambda: site.control.experiment("many").tags == ("for the paper", "<b>x</b>"))
    site.until(lambda: site.control.experiment("digits-1").tags == ("for the paper", "<b>x</b>"))
    site.until(lambda: "<b>x</b>" in row(site, "many"), "tags are text")
    site.control.put("digits-1", "COMPLETED", tags=("baseline",))
    site.control.put("many", "PAUSED", tags=())


def test_deleting_says_what_is_lost(site: Site) -> None:
    with another(site, "old-1", "an old one"):
        listed(site, "#/?sel=old-1%2Cexperiment", "old-1")
        site.click("Delete", ".bulk")
        site.until(lambda: "0 checkpoints, 0 B." in site.one("dialog").text)
        asked = site.one("dialog").text
        assert "Delete 1 experiment?" in asked
        assert "This can't be undone." in asked
        assert "experiment: it is running; stop it first" in asked
        site.click("Delete", "dialog")
        site.until(lambda: names(site) and "old-1" not in names(site))
        assert not (site.results / "old-1").exists()
        assert (site.results / "experiment").exists()


@pytest.mark.long
def test_the_best_trials_of_the_selected_are_compared(site: Site) -> None:
    listed(site, "#/?sel=digits-1%2Cmany")
    best = {name: Result(site.results / name).overview.best_trial for name in ("digits-1", "many")}
    site.until(lambda: "2 selected" in site.one(".bulk").text)
    site.js("document.activeElement.blur()")
    site.press("c")
    site.until(lambda: "#/compare?" in site.browser.current_url)
    for name, trial in best.items():
        assert f"t={trial}%3A{name}" in site.browser.current_url


STATES = {
    "QUEUED": "queued",
    "PREEMPTED": "preempted",
    "RESTARTING": "restarting",
    "STOPPING": "stopping",
    "PAUSED": "paused",
    "STOPPED": "stopped",
    "ERROR": "failed",
    "RUNNING": "running",
}


@pytest.mark.long
def test_each_state_has_a_word_a_shape_and_a_sentence_of_its_own(site: Site) -> None:
    listed(site)
    found = {}
    state = f"const it = {ROW.removeprefix('return ')}.querySelector('.state');"
    look = f"{state} return [it.innerText, it.querySelector('svg').dataset.shape, it.title]"
    for name, word in STATES.items():
        site.control.put("many", name)  # type: ignore[arg-type]
        asked_again(site)
        site.until(lambda word=word: site.js(look, "many")[0] == word, word)
        found[word] = site.js(look, "many")[1:]
    found["completed"] = site.js(look, "digits-1")[1:]
    site.control.put("many", "PAUSED")
    shapes, titles = zip(*found.values(), strict=True)
    assert len(set(shapes)) == len(set(titles)) == len(STATES) + 1


@pytest.mark.long
def test_names_of_others_are_text_and_long_ones_wrap(site: Site) -> None:
    title = "'<img src=x onerror=window.hacked=1>" + "x" * 110 + "'"
    with another(site, "evil-1", title):
        for width in (1400, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
            site.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            try:
                listed(site, among="evil-1")
                assert site.js("return document.documentElement.scrollWidth") <= width
                link = f"const it = {ROW.removeprefix('return ')}.querySelector('a').getBoundingClientRect();"
                assert site.js(f"{link} return it.width", "evil-1") > 150
                two = width == 1400  # a phone has one line
                site.until(lambda link=link, two=two: (site.js(f"{link} return it.height", "evil-1") > 30) is two)
            finally:
                site.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert site.js("return window.hacked === undefined && document.querySelectorAll('main img').length === 0")


def test_a_visitor_signs_in_and_is_where_the_link_led(site: Site) -> None:
    place = "#/?search=dig&sort=best"
    site.open(place)
    site.browser.delete_all_cookies()
    try:
        site.browser.refresh()
        token = site.one(".signin input[name=token]")
        assert "asked for" in site.one(".signin").text
        site.press("wrong", Keys.ENTER)
        site.until(lambda: "not this server's" in site.one(".signin [role=alert]").text)
        token.clear()
        token.send_keys(TOKEN, Keys.ENTER)
        site.until(lambda: names(site) == ["digits-1"])
        assert site.browser.current_url.endswith(place)
    finally:
        site.browser.get(f"{site.url}/login?token={TOKEN}")
    site.browser.get(f"{site.url}/login?token={TOKEN}&to=/?search=many")
    site.until(lambda: names(site) == ["many"])


@pytest.mark.long
def test_a_revoked_token_signs_in_again_without_losing_the_view(site: Site) -> None:
    secret = tokens.create(site.results, "reader", "read", Quota())
    site.browser.get(f"{site.url}/login?token={secret}")
    try:
        listed(site, "#/?sel=experiment&sort=name")
        site.click("Stop", ".bulk")
        site.until(lambda: "your token may only look" in site.one("dialog").text)
        assert site.texts("dialog button") == ["Close"]
        tokens.revoke(site.results, "reader")
        asked_again(site)
        site.until(lambda: site.all(".signin"), "the next question is refused")
        site.until(lambda: not site.all("dialog"))
        site.press(TOKEN, Keys.ENTER)
        site.until(lambda: "1 selected" in site.one(".bulk").text)
        assert site.browser.current_url.endswith("#/?sel=experiment&sort=name")
    finally:
        site.browser.get(f"{site.url}/login?token={TOKEN}")


def test_others_experiments_are_left_alone_by_a_token_that_may_not_change_them(site: Site) -> None:
    secret = tokens.create(site.results, "agent", "submit", Quota())
    site.control.put("many", "RUNNING", owner="agent")
    site.browser.get(f"{site.url}/login?token={secret}")
    try:
        listed(site, "#/?sel=experiment%2Cmany&columns=state%2Cowner")
        site.until(lambda: "agent" in row(site, "many"))
        site.click("Pause", ".bulk")
        site.until(lambda: "Pause 1 experiment?" in site.one("dialog").text)
        assert "experiment: it is the operator's" in site.one("dialog").text
        site.click("Pause", "dialog")
        site.until(lambda: site.control.experiment("many").state == "PAUSED")
        assert site.control.experiment("experiment").state == "RUNNING"
    finally:
        site.control.put("many", "PAUSED", owner="")
        site.browser.get(f"{site.url}/login?token={TOKEN}")


def test_a_name_that_does_not_exist_is_named_with_a_way_back(site: Site) -> None:
    site.open("#/e/nothing-9")
    site.until(lambda: site.texts("h1") == ["Not found"])
    assert "nothing-9" in site.one("main .trouble").text
    site.open("#/e/digits-1/t/4711")
    site.until(lambda: "no trial 4711" in site.one("main").text)
    assert site.texts("main p a") == ["digits-1", "All experiments"]
    site.js("document.querySelector('main p:last-child a:last-child').click()")
    site.until(lambda: site.texts("h1") == ["Experiments"])


def test_local_runs_are_listed_on_demand_with_the_command_that_opens_them(site: Site) -> None:
    run = site.results / "local" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"batches": 5, "time": 7.0, "final": true, "decides": true}\n')
    try:
        site.open("#/")
        site.until(lambda: "with 1 local run" in site.one(".status").text, "its number")
        assert "mine" not in names(site)
        site.js("document.querySelector('.status input[type=checkbox]').click()")
        site.until(lambda: "mine" in names(site), "the local run")
        site.until(lambda: f"dray experiment describe {run}" in row(site, "mine"))
        assert "local=1" in site.browser.current_url
    finally:
        shutil.rmtree(run)
