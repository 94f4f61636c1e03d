"""Search in the site of docs/, as a reader has it on disk, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.docs.test_site import site  # noqa: F401 - a fixture

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("words", "page"), [("early stopping", "early-stopping.html"), ("spot machines", "operating-clusters.html")]
)
def test_search_finds_a_page_from_disk(words: str, page: str, site: Path, browser: Any) -> None:  # noqa: F811
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys(words)
    found = WebDriverWait(browser, 60).until(
        lambda _: [
            each.get_attribute("href") for each in browser.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
        ]
    )
    first = found[0].partition("?")[0].partition("#")[0]
    assert first == (site / page).as_uri()
    browser.get(found[0])
    assert "not found" not in browser.title.lower()
