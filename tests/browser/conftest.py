"""A browser without a window: Chromium, driven by its own driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = all(shutil.which(name) for name in ("chromium", "chromedriver"))
    for item in items:
        if item.get_closest_marker("browser") and not there:
            item.add_marker(pytest.mark.skip(reason="needs chromium and chromedriver"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of the size of a desktop's; WebGL is drawn by its CPU."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # as root, in a container
        "--disable-dev-shm-usage",
        "--use-angle=swiftshader",
        "--enable-unsafe-swiftshader",
        "--window-size=1200,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()
