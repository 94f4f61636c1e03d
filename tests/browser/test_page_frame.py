"""The page's frame: what is in the address, and what Back and a reload restore."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.page import Site

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def focused(site: Site) -> str:
    return str(site.js("return document.activeElement.textContent"))


def names(site: Site) -> list[str]:
    return site.texts("table[aria-label=Experiments] tbody a.open")


@pytest.mark.long
def test_a_search_is_in_the_address_and_back_restores_it_with_the_focus(site: Site) -> None:
    site.open("#/")
    site.until(lambda: len(names(site)) >= 3)
    site.press("/", "exper", Keys.ESCAPE)  # which clears it
    assert len(names(site)) >= 3
    site.press("/", "exper", Keys.TAB)
    site.until(lambda: names(site) == ["experiment"])
    assert site.browser.current_url.endswith("#/?search=exper")
    site.press("j")
    site.until(lambda: focused(site) == "experiment")
    site.press(Keys.ENTER)
    site.until(lambda: "#/e/experiment" in site.browser.current_url)
    site.browser.back()
    site.until(lambda: names(site) == ["experiment"] and focused(site) == "experiment")
    site.browser.refresh()
    site.until(lambda: names(site) == ["experiment"] and focused(site) == "experiment")


def test_addresses_that_lead_nowhere_say_so(site: Site) -> None:
    for place in ("#/nope", "#/e/digits-1/t/x", "#/compare/more"):
        site.open(place)
        site.until(lambda: site.texts("h1") == ["Not found"], place)


@pytest.mark.long
def test_addresses_that_were_typed_are_no_errors(site: Site) -> None:
    site.browser.get_log("browser")
    everything = ",".join(f"{first}00000-9999999" for first in range(1, 90))
    shown = {
        "#/?state=50%": "main .chips",
        f"#/e/digits-1/trials?columns=%&state=%&sel={everything}": "#picked",
        "#/e/digits-1/curves?metric=%&sel=none": "main .trouble",
        "#/compare?t=1:digits-1&x=constructor": "main .u-over",
        f"#/e/{'x' * 60_000}/trials?sel=1-100": "#picked",
    }
    for place, part in shown.items():
        site.open(place)
        site.one(part)
        if part == "#picked":
            site.click("Clear", part)
    assert not [each for each in site.browser.get_log("browser") if "Uncaught" in each["message"]]


def test_help_lists_the_keys_of_the_view(site: Site) -> None:
    site.open("#/")
    site.until(lambda: len(names(site)) >= 3)
    site.press("?")
    keys = site.texts("dialog kbd")
    letters = [key for key in keys if len(key) == 1 and key.isalpha()]
    assert letters == sorted(set(letters))
    assert {"/", "j", "k", "?"} <= set(keys)
    site.press(Keys.ESCAPE)
    site.until(lambda: not site.all("dialog"))


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_a_hidden_tab_asks_nothing(site: Site) -> None:
    site.open("#/")
    site.one("tbody tr.row")
    asked = "return performance.getEntriesByType('resource').filter(it => it.name.includes('/api/')).length"
    hide = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
    site.until(lambda: site.js(asked) > 5, "questions while it is seen")
    site.js(hide.format("true") + "document.dispatchEvent(new Event('visibilitychange'))")
    before = site.js(asked)
    site.browser.execute_async_script("setTimeout(arguments[0], 50 * 500)")
    assert site.js(asked) <= before + 2, "two were on their way"
    site.js(hide.format("false") + "document.dispatchEvent(new Event('visibilitychange'))")
    site.until(lambda: site.js(asked) > before + 2)
