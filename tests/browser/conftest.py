"""A browser without a window, Chromium, driven by its own driver; and experiments to look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.serve.app import listening
from dray.serve.tokens import Tokens
from tests.browser.page import MANY, PATIENCE_S, POLL_S, Site
from tests.records.test_result import config, told
from tests.report.simulated import simulated
from tests.serve.conftest import PORT, TOKEN
from tests.serve.fake import FakeControl


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = all(shutil.which(name) for name in ("chromium", "chromedriver"))
    for item in items:
        if item.get_closest_marker("browser") and not there:
            item.add_marker(pytest.mark.skip(reason="needs chromium and chromedriver"))


@contextmanager
def opened(*arguments: str) -> Iterator[Any]:
    """Chromium with further arguments."""
    from selenium import webdriver
    from selenium.webdriver.support.wait import WebDriverWait

    class Chromium(webdriver.Chrome):
        def get(self, url: str) -> None:
            """Go there and wait for the page; chromedriver alone returns too early now and then on a busy machine."""
            super().get(url)
            WebDriverWait(self, PATIENCE_S, POLL_S).until(
                lambda _: self.execute_script("return document.readyState") == "complete"
            )

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    root = "--no-sandbox"  # in a container
    for argument in ("--headless=new", root, "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chromium(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Without WebGL, which nothing uses: emulated, it would take half of the time."""
    with opened("--disable-gpu") as driver:
        yield driver


@pytest.fixture(scope="module")
def browser(chromium: Any) -> Any:
    """Chromium at a desktop's size, with a blank page and no data of earlier modules."""
    chromium.get("about:blank")
    chromium.delete_all_cookies()
    chromium.get_log("browser")  # which empties it
    chromium.set_window_size(1200, 900)
    return chromium


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    return dray.Result(simulated(tmp_path_factory.mktemp("browser") / "simulated", 64).path)


@pytest.fixture(scope="session")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experiments of which each module has a copy; only MANY trials take a second to simulate."""
    results = tmp_path_factory.mktemp("experiments")
    digits = simulated(results / "digits-1", 64)
    (digits.path / "code").mkdir()
    (digits.path / "code" / "model_def.py").write_text("class DigitsTrial(PyTorchTrial): ...\n")
    logs = digits.trial(3) / "logs"
    logs.mkdir(parents=True)
    (logs / "rank_0.log").write_text(
        "2026-11-23T10:00:00.000Z <script>window.hacked = 1</script><img src=x onerror=hacked=1>\n"
    )
    simulated(results / "many", MANY, workers=32)
    return results


@pytest.fixture(scope="module")
def site(browser: Any, experiments: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    results = tmp_path_factory.mktemp("results")
    shutil.copytree(experiments, results, dirs_exist_ok=True)
    story = told(results, config())  # its journal stays open: it runs
    control = FakeControl(results)
    control.put("digits-1", "COMPLETED", tags=("baseline",), notes="<b>first</b>")
    control.put("many", "PAUSED")
    control.put("experiment", "RUNNING", slots=1.0, waiting=1)
    with (
        pytest.MonkeyPatch.context() as patch,
        listening(control, results, "127.0.0.1", PORT, Tokens(results, TOKEN)) as url,
    ):
        patch.setenv("DRAY_HOME", str(results))
        browser.get(f"{url}/login?token={TOKEN}")
        browser.execute_script("sessionStorage.clear()")  # what tests of other modules have selected
        yield Site(browser, url, results, control, story)
        browser.get("about:blank")


@pytest.fixture
def quick(site: Site) -> Iterator[None]:
    """The page's clock goes fifty times as fast: it asks every tenth of a second."""
    source = "const real = setTimeout; window.setTimeout = (call, ms) => real(call, ms / 50);"
    script = site.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    site.browser.get("about:blank")  # what is opened next is a new document
    yield
    site.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    site.browser.get("about:blank")
    site.open("")  # other fixtures clear the page's storage
