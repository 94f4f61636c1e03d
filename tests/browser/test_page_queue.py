"""The queue's page, with a server's real decisions behind it: lanes, reasons, and changes that do what they said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from dray.serve import tokens
from dray.serve.app import listening
from dray.serve.control import Share
from dray.serve.quota import Quota
from dray.serve.root_path import RootPath
from dray.serve.tokens import Tokens
from tests.browser.page import Site
from tests.serve.conftest import PORT, TOKEN
from tests.serve.scene import SceneControl, kind

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NASTY = "<img src=x onerror=window.hacked=1>-1"
ORDER = ["digits", "gpt", NASTY, "mine", "nightly"]


class QueueSite(Site):
    """The page, and the server's decisions."""

    control: SceneControl

    def names(self) -> list[str]:
        return self.texts("ol.entries a.open")

    def lines(self) -> list[str]:
        """The sentences of the preview, once they are there."""
        self.until(lambda: self.texts(".preview li"))
        return self.texts(".preview li")

    def show(self, secret: str = TOKEN) -> None:
        """The queue, for the holder of a token."""
        self.browser.get(f"{self.url}/login?token={secret}")
        self.open("#/queue")
        self.until(self.names, "the queue")

    def choose(self, label: str) -> None:
        """Press the button with this label for screen readers."""
        self.until(lambda: self.js("return document.querySelector(`[aria-label=${CSS.escape(arguments[0])}]`)", label))
        self.js("document.querySelector(`[aria-label=${CSS.escape(arguments[0])}]`).click()", label)

    def priorities(self) -> dict[str, int]:
        return {each.name: each.share.priority for each in self.control.experiments()}


@pytest.fixture
def site(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueueSite]:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    scene = SceneControl(tmp_path, 4)
    scene.run("digits", 20)
    scene.settle(60.0)
    scene.finish("digits", "errored", count=1)
    scene.run("gpt", 20)
    scene.settle(120.0)
    scene.finish("digits", count=2)
    scene.run(NASTY, 20)
    scene.run("mine", 20, owner="agent")
    scene.run("nightly", 20, priority=60)
    scene.settle(60.0)
    # Below a path, as behind JupyterHub's proxy: the page, its requests and the sign-in work there, too.
    with listening(scene, tmp_path, "127.0.0.1", PORT, Tokens(tmp_path, TOKEN), RootPath(path="/lab/dray")) as url:
        site = QueueSite(browser, url, tmp_path, scene, None)  # type: ignore[arg-type]
        site.show()
        yield site
        browser.get("about:blank")


def test_who_runs_who_waits_and_why(site: QueueSite) -> None:
    assert site.names() == ORDER
    entries = {each.name: each.why for each in site.control.experiments()}
    shown = dict(zip(site.names(), site.texts("ol.entries .why"), strict=True))
    assert shown == entries
    assert shown["gpt"] == "has its share: digits of the same priority have theirs"
    assert site.texts("ol.entries .level") == ["4 of priority 42: they share the slots by weight"]
    assert site.texts("#summary")[0].startswith("4 of 4 slots busy · 3 experiments wait for slots")
    middle = "const it = document.querySelector(arguments[0]).getBoundingClientRect(); return it.top + it.height / 2"
    bar = 'a.bar[aria-label*="on slot 1: "] rect'
    site.until(lambda: site.all(bar))
    beside = abs(site.js(middle, ".slot-names span") - site.js(middle, bar))
    assert beside < 4, "a slot's name is beside its bars"
    assert site.js("return window.hacked") is None
    assert not site.all("ol.entries img")


@pytest.mark.long
def test_lanes_are_walked_and_opened_by_keyboard(site: QueueSite) -> None:
    site.until(lambda: len(site.all(".lanes a.bar")) == len(site.control.queue(3600).lanes["bars"]))
    assert len(site.all(".lanes a.bar.bad")) == 1, "the trial that failed"
    site.js("document.querySelector('.lanes a.bar[tabindex=\"0\"]').focus()")
    first = site.texts(".detail")[0]
    assert first.startswith("digits, trial 0, on slot 1: ")
    assert first.endswith(", failed")
    site.press(Keys.ARROW_RIGHT)
    site.until(lambda: site.texts(".detail")[0].startswith("digits, trial 4, on slot 1: "))
    site.press(Keys.ARROW_DOWN)
    site.until(lambda: " on slot 2: " in site.texts(".detail")[0])
    bar = site.js("return document.activeElement.getAttribute('href')")
    site.press(Keys.ENTER)
    site.until(lambda: site.browser.current_url.endswith(bar))
    site.browser.back()
    site.until(site.names)


def test_a_button_moves_an_experiment_and_the_preview_says_what_that_does(site: QueueSite) -> None:
    site.choose("Move gpt up")
    lines = site.lines()
    assert lines == [
        "gpt goes from 2 to 4 slots, at once: trials of digits save, leave, and continue later.",
        "digits goes from 2 to 0 slots.",
        f"{NASTY} and mine wait longer.",
        "gpt gets the next free slot.",
    ]
    assert site.texts(".preview p") == ["gpt: priority 42 → 41"]
    assert site.priorities()["gpt"] == 42, "nothing has changed yet"
    site.click("Move", "dialog")
    site.until(lambda: site.names() == ["gpt", "digits", NASTY, "mine", "nightly"])
    assert site.control.has()["gpt"] == 4
    assert site.control.has()["digits"] == 0
    site.until(lambda: "behind gpt, which has priority 41" in site.texts("ol.entries .why"))


def test_keys_move_an_experiment_and_cancel_does_not(site: QueueSite) -> None:
    site.press("j", "j", "j", "j", "j")
    site.until(lambda: site.js("return document.activeElement.textContent") == "nightly")
    ActionChains(site.browser).key_down(Keys.ALT).send_keys(Keys.ARROW_UP).key_up(Keys.ALT).perform()
    assert site.lines()
    site.press(Keys.ESCAPE)
    site.until(lambda: not site.all("dialog"))
    assert site.names() == ORDER
    assert site.js("return document.activeElement.textContent") == "nightly"
    ActionChains(site.browser).key_down(Keys.ALT).send_keys(Keys.ARROW_UP).key_up(Keys.ALT).perform()
    site.until(lambda: site.texts("dialog h2") == ["Move nightly before mine?"])
    assert site.lines()[-1].startswith(f"nightly has priority 42, as digits, gpt and {NASTY}: they share")
    site.until(lambda: site.js("return document.activeElement.textContent") == "Move")
    site.press(Keys.ENTER)
    site.until(lambda: site.names() == [*ORDER[:3], "nightly", "mine"])
    site.until(lambda: site.js("return document.activeElement.textContent") == "nightly")
    assert site.priorities() == {**dict.fromkeys(ORDER, 42), "mine": 43}


@pytest.mark.long
def test_dragging_shows_what_dropping_does_and_asks_before_it_does_it(site: QueueSite) -> None:
    handle, target = site.one('li[data-name="nightly"] .handle'), site.one('li[data-name="digits"]')
    actions = ActionChains(site.browser)
    actions.click_and_hold(handle).move_to_element_with_offset(target, 0, -10).perform()
    site.until(lambda: site.texts(".dropping b") == ["nightly before digits"])
    lines = site.lines()
    assert lines[0].startswith("nightly goes from 0 to 4 slots, at once: trials of digits and gpt save")
    site.press(Keys.ESCAPE)
    site.until(lambda: not site.all(".dropping"))
    actions.release().perform()
    assert (site.names(), site.all("dialog")) == (ORDER, [])
    handle, target = site.one('li[data-name="nightly"] .handle'), site.one('li[data-name="digits"]')
    actions = ActionChains(site.browser)
    actions.click_and_hold(handle).move_to_element_with_offset(target, 0, -10).perform()
    assert site.lines() == lines
    assert site.priorities()["nightly"] == 60
    actions.release().perform()
    site.until(lambda: site.texts("dialog h2") == ["Move nightly before digits?"])
    assert site.lines() == lines
    site.click("Move", "dialog")
    site.until(lambda: site.names() == ["nightly", *ORDER[:4]])
    assert site.control.has()["nightly"] == 4


def test_a_share_is_previewed_while_it_is_typed(site: QueueSite) -> None:
    site.choose("Change the share of gpt")
    site.until(lambda: site.texts(".preview li") == ["Nothing changes."])
    site.one("dialog input[name=max_slots]").send_keys("3")
    site.until(lambda: site.texts(".preview p") == ["gpt: most slots no limit → 3"])
    priority = site.one("dialog input[name=priority]")
    priority.clear()
    priority.send_keys("10")
    how = "at once: trials of digits save, leave, and continue later"
    site.until(lambda: f"gpt goes from 2 to 3 slots, {how}." in site.texts(".preview li"))
    site.until(lambda: site.texts(".preview p") == ["gpt: priority 42 → 10; gpt: most slots no limit → 3"])
    priority.clear()
    priority.send_keys("0")
    site.until(lambda: "priority must be an integer from 1 to 99, got 0" in site.texts(".preview .trouble"))
    site.click("Change", "dialog")  # the form does not let it pass
    assert site.all("dialog")
    priority.clear()
    priority.send_keys("10")
    site.click("Change", "dialog")
    site.until(lambda: not site.all("dialog"))
    assert site.control.experiment("gpt").share == Share(priority=10, max_slots=3)
    site.until(lambda: "3 of at most 3 slots" in " ".join(site.texts('li[data-name="gpt"] .has')))


@pytest.mark.long
def test_those_who_may_not_change_the_queue_see_it_and_why(site: QueueSite) -> None:
    site.show(tokens.create(site.results, "reader", "read", Quota()))
    site.until(lambda: not site.all("ol.entries button"))
    assert site.names() == ORDER
    site.until(lambda: any("this needs a token with the scope submit" in each for each in site.texts("section p")))
    site.press("j")
    ActionChains(site.browser).key_down(Keys.ALT).send_keys(Keys.ARROW_DOWN).key_up(Keys.ALT).perform()
    assert not site.all("dialog")
    site.show(tokens.create(site.results, "agent", "submit", Quota(priority=42)))
    able = "return [...document.querySelectorAll('ol.entries button:enabled')].map(it => it.ariaLabel)"
    site.until(lambda: site.js(able) == ["Move mine up", "Move mine down", "Change the share of mine"])
    site.choose("Move mine up")
    site.until(lambda: site.texts(".preview .trouble")[0].startswith("Not allowed: "))
    site.click("Move", "dialog")
    site.until(lambda: site.texts("dialog [role=alert] p"))
    assert site.priorities()["mine"] == 42


@pytest.mark.long
def test_an_idle_slot_says_for_how_long(site: QueueSite) -> None:
    site.control.cpus = 6
    site.control.core.lender.look(site.control.view())
    for name in ORDER:
        site.control.act(name, "pause")
    site.control.settle(600.0)
    site.browser.refresh()
    site.until(lambda: {text[:8] for text in site.texts(".lanes .idle text")} == {"idle for"})


@pytest.mark.long
def test_the_time_shown_is_in_the_address_and_a_phone_scrolls_only_the_lanes(site: QueueSite) -> None:
    site.js("const it = document.querySelector('select'); it.value = '600'; it.dispatchEvent(new Event('change'))")
    site.until(lambda: site.browser.current_url.endswith("#/queue?span=600"))
    site.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        site.browser.refresh()
        site.until(site.names)
        assert site.js("return document.querySelector('select').value") == "600"
        site.until(lambda: site.js("return document.querySelector('.box').scrollLeft") > 0, "the newest is in sight")
        assert site.js("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        site.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.long
def test_of_a_long_queue_the_first_are_listed(site: QueueSite) -> None:
    for number in range(120):
        site.control.core.scheduler.submit(site.results / f"later-{number}", Share(), has_process=False)
    site.browser.refresh()
    site.until(lambda: len(site.names()) == 100)
    site.click("Show 25 more experiments")
    site.until(lambda: len(site.names()) == 125)


@pytest.mark.long
def test_large_groups_and_shared_slots_have_their_places(site: QueueSite) -> None:
    site.control.run("big", 1, of=kind(4), priority=1)
    site.control.settle(30.0)
    site.browser.refresh()
    site.until(lambda: site.all('a.bar[aria-label^="big, trial 0, on slot 1 and 3 more: "]'))
    high = site.js("return [...document.querySelectorAll('a.bar rect')].map(it => Number(it.getAttribute('height')))")
    assert max(high) > 3 * min(high)
