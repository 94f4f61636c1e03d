"""The site that MkDocs makes of docs/: no broken link, nothing fetched from elsewhere, no Markdown left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import browser, chromium  # noqa: F401 - fixtures
from tests.docs.pages import DOCS, PAGES, ROOT

PUBLIC = {"docs.ray.io", "github.com", "kueue.sigs.k8s.io", "pypi.org", "pytorch.org", "ray.io", "ui.perfetto.dev"}
"""Hosts that pages may link to: of public projects."""


class Page(HTMLParser):
    """A page of the site: what it fetches, and its text outside of code. MkDocs itself checks the links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""
        self._code = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self._code += tag in ("code", "pre", "script", "style")
        source = found.get("src") or (found.get("href") if tag == "link" and found.get("rel") != "canonical" else None)
        if source:
            self.fetched.append(source)

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it."""
    to = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(to)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return to


@pytest.mark.parametrize("page", PAGES)
def test_links_to_other_places_are_to_public_projects(page: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`]+`", "", PAGES[page], flags=re.DOTALL))
    assert {str(urlsplit(each).hostname) for each in targets if urlsplit(each).scheme} <= PUBLIC
    if page == "README.md":
        assert [each for each in targets if not urlsplit(each).scheme and not (ROOT / each).is_file()] == []


@pytest.mark.slow
@pytest.mark.long
def test_site(site: Path) -> None:
    pages = {path.name: Page(path) for path in site.glob("*.html")}
    assert {path.stem for path in DOCS.glob("*.md")} <= {Path(name).stem for name in pages}
    for name, page in pages.items():
        assert [each for each in page.fetched if urlsplit(each).netloc] == [], f"{name} needs a network"
        for each in page.fetched:
            assert (site / urlsplit(each).path.lstrip("/")).is_file(), (name, each)
        # Markdown that was not understood remains in the text.
        left = re.findall(r"^[ \t]*(?:[-*] |\|.*\||#+ |!!! ).*$|```|\*\*", page.text, flags=re.MULTILINE)
        assert left == [], name


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs chromium and chromedriver")
@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("early stopping", "early-stopping"),
        ("W&B", "tracking"),
        ("get_hparam", "pytorch-api"),
        ("searcher.max_trials", "config"),
    ],
)
def test_search_finds_a_page_from_disk(site: Path, browser: Any, query: str, page: str) -> None:  # noqa: F811
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    browser.find_element("css selector", "[data-md-component=search-query]").send_keys(query)
    found = WebDriverWait(browser, 60).until(lambda _: browser.find_elements("css selector", ".md-search-result__link"))
    pages = [each.get_attribute("href").partition("?")[0].partition("#")[0] for each in found]
    assert (site / f"{page}.html").as_uri() in list(dict.fromkeys(pages))[:2]
