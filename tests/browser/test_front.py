"""The Pareto front as a browser draws it, in the report and on the server's page: each trial where it belongs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

import dray
from dray.report import write_report
from dray.report.figures import BEST_COLOUR
from dray.report.front import GREY
from dray.serve.app import make_app
from dray.serve.auth import LOOPBACK
from tests.browser.test_report import CHOOSE, DRAWN, same
from tests.report.simulated import simulated
from tests.serve.conftest import TOKEN, listening
from tests.serve.fake import FakeControl

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LOOKS = """
const plot = document.getElementById("front");
return [...plot.querySelectorAll(".scatterlayer .trace")].map(trace => [
  getComputedStyle(trace.querySelector(".points path")).fill, trace.querySelectorAll(".lines path").length]);
"""
"""The colour of each trace's points, and its lines."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    return dray.Result(simulated(tmp_path_factory.mktemp("browser") / "objectives", 64, several=True).path)


@pytest.fixture(scope="module")
def page(browser: Any, result: dray.Result) -> Any:
    browser.get(write_report(result.path).as_uri())
    return browser


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))})"


def test_each_trial_is_drawn_in_its_group(page: Any, result: dray.Result) -> None:
    trials = result.trials
    exceed = trials["metrics.size"] > 200
    front = trials["front"].eq(1).fillna(False)
    assert exceed.any()
    assert front.sum() > 2
    groups = (exceed, ~exceed & ~front, front)
    for scale in page.execute_script("return Object.keys(figures.front.scales)"):
        if "hidden" in scale:
            continue
        page.execute_script(CHOOSE, "scale", "front", scale)
        for drawn, group in zip(page.execute_script(DRAWN, "front"), groups, strict=True):
            same([tuple(point) for point in drawn], trials[group][["metrics.size", "metrics.validation_loss"]])


def test_front_is_a_line_and_what_exceeds_a_limit_is_grey(page: Any) -> None:
    looks = page.execute_script(LOOKS)
    assert looks[0] == [rgb(GREY), 0]
    assert looks[2] == [rgb(BEST_COLOUR), 1]
    assert looks[1][0] not in (looks[0][0], looks[2][0])


def test_table_has_the_front_the_best_in_the_first_objective_first(page: Any, result: dray.Result) -> None:
    first = page.execute_script("""
        const heading = [...document.querySelectorAll("h2")].find(each => each.textContent === "Pareto front");
        return [...heading.parentElement.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent);
    """)
    front = result.trials[result.trials["front"] == 1].sort_values("best_metric")
    assert list(map(int, first)) == front["trial_id"].tolist()


def test_page_has_no_error(page: Any) -> None:
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_report_of_one_metric_has_no_front(tmp_path: Path) -> None:
    text = write_report(simulated(tmp_path / "one", 8).path).read_text()
    assert "<h2>Pareto front</h2>" not in text
    assert "<h2>The best trial</h2>" in text


@pytest.fixture(scope="module")
def at_server(browser: Any, result: dray.Result) -> Iterator[Any]:
    """The server's page of the experiment."""
    results = result.path.parent
    control, ports, up, stopped = FakeControl(results), [0], threading.Event(), threading.Event()
    control.put(result.path.name, "COMPLETED")

    def note(port: int) -> None:
        ports[0] = port
        up.set()

    app = make_app(control, results, token=TOKEN, hosts=LOOPBACK)
    thread = threading.Thread(target=listening, args=(app, note, stopped))
    thread.start()
    assert up.wait(30)
    browser.get(f"http://127.0.0.1:{ports[0]}/login?token={TOKEN}")
    browser.get(f"http://127.0.0.1:{ports[0]}/#/e/{result.path.name}")
    yield browser
    browser.get("about:blank")
    stopped.set()
    thread.join(30)


PLOT = """
const heading = [...document.querySelectorAll("h2")].find(each => each.textContent === "Pareto front");
if (!heading) return null;
heading.scrollIntoView();
const plot = heading.closest("section").querySelector(".js-plotly-plot");
return plot && plot.data && plot.data.map(each => [each.name, each.customdata]);
"""


def test_server_page_shows_the_front(at_server: Any, result: dray.Result) -> None:
    wait = WebDriverWait(at_server, 60)
    front = result.trials[result.trials["front"] == 1].sort_values("best_metric")["trial_id"].tolist()
    traces = dict(wait.until(lambda page: page.execute_script(PLOT)))
    assert set(traces[f"Pareto front ({len(front)})"]) == set(front)
    exceed = result.trials[result.trials["violation"] > 0]["trial_id"]
    assert set(traces[f"exceeds a limit ({len(exceed)})"]) == set(exceed)
    tiles = [each.text.split("\n") for each in at_server.find_elements(By.CSS_SELECTOR, ".tiles > div")]
    assert [str(len(front)), "on the Pareto front"] in [each[:2] for each in tiles]
    assert any(each[1:] == ["best validation_loss", f"trial {front[0]}"] for each in tiles)
