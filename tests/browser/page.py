"""A browser at a server's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from selenium.common.exceptions import JavascriptException, StaleElementReferenceException
from selenium.webdriver.support.wait import WebDriverWait

from tests.records.test_result import Story
from tests.serve.fake import FakeControl

NOT_YET = (IndexError, JavascriptException, StaleElementReferenceException)  # what is looked for is not there yet
MANY = 1_000  # trials of the experiment "many"
PATIENCE_S, POLL_S = 60, 0.1
SCREENS = ((1400, "light"), (390, "dark"))  # widths of a desktop and a phone, with a theme each
AXE = files("selenium_axe_python").joinpath("axe-core", "axe.min.js").read_text(encoding="utf-8")
CHECK = """const done = arguments[arguments.length - 1];
const told = (each, node) => `${each.id}: ${node.target.join(" ")}: ${node.html.slice(0, 120)}: ${node.failureSummary}`;
axe.run(document, { resultTypes: ["violations"], ...arguments[0] }).then(
  found => done(found.violations.flatMap(each => each.nodes.map(node => told(each, node)))));"""


def axe(browser: Any, options: Mapping[str, object]) -> list[str]:
    """What axe-core finds on the page, a line each."""
    browser.execute_script(AXE)
    return list(browser.execute_async_script(CHECK, options))


@contextmanager
def on_screen(browser: Any, width: int, theme: str) -> Iterator[None]:
    """The browser with a screen of this width, light or dark; 390 pixels are a phone."""
    command = browser.execute_cdp_cmd
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
    try:
        command("Emulation.setDeviceMetricsOverride", size)
        command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
        yield
    finally:
        command("Emulation.clearDeviceMetricsOverride", {})
        command("Emulation.setEmulatedMedia", {"features": []})


@dataclass
class Site:
    """A browser at a server's page."""

    browser: Any
    url: str
    results: Path
    control: FakeControl
    story: Story

    def open(self, place: str) -> None:
        """Go to a view, as a link does, and leave the one before."""
        self.browser.get(f"{self.url}/{place}")
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.until(lambda: self.all(selector)[0], selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
        return list(self.browser.execute_script(script, selector))

    def until(self, holds: Callable[[], Any], what: str = "") -> Any:
        return WebDriverWait(self.browser, PATIENCE_S, POLL_S, NOT_YET).until(lambda _: holds(), what)

    def click(self, label: str, within: str = "body") -> None:
        """Press the button with this label."""
        script = """const [label, within] = arguments;
                    const all = [...document.querySelectorAll(`${within} button`)];
                    const found = all.filter(it => it.innerText === label);
                    if (found.length === 1) found[0].click();
                    return found.length === 1;"""
        self.until(lambda: self.js(script, label, within), label)

    def more(self, label: str) -> None:
        """Press a button of the menu of an experiment's page."""
        self.one(".actions details")
        self.js("document.querySelector('.actions details').open = true")
        self.click(label, ".actions")

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)
