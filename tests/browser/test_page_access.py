"""The page for everybody: axe-core finds nothing, nothing is cut off at 390 pixels, and tasks are done by keyboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from dray.records.result import Result
from tests.browser.page import Site, axe
from tests.browser.test_page_queue import ORDER, QueueSite
from tests.browser.test_page_queue import site as queue  # noqa: F401
from tests.experiment.test_requests import answering
from tests.report.simulated import simulated

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = "a-name-of-120-characters-" + "x" * 95
ERROR = f"""RuntimeError: {"e" * 200}
  model_def.py:41 in train_batch
    loss.backward()

Traceback (most recent call last):
  File "model_def.py", line 41, in train_batch
    loss.backward()
RuntimeError: {"e" * 200}"""
WHERE = "RuntimeError at model_def.py:41 in train_batch"
PHONE = 390
LEAST_CONTRAST, LEAST_GRAPHIC = 4.5, 3.0
"""WCAG's for text, and for parts of drawings."""


def fails(directory: Path, trials: set[int]) -> None:
    """Let trials of a simulated experiment have failed."""
    lines = []
    for line in (directory / "journal.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "exited" and record["trial"] in trials:
            failure = {"event": "gave_up", "why": "max_restarts", "error": ERROR, "where": WHERE}
            lines.append(json.dumps({**failure, "trial": record["trial"], "time": record["time"]}))
            record["reason"] = "errored"
        lines.append(json.dumps(record))
    (directory / "journal.jsonl").write_text("".join(line + "\n" for line in lines))


def best(site: Site, name: str) -> int | None:
    return Result(site.results / name).overview.best_trial


@pytest.fixture(scope="module")
def full(site: Site) -> Iterator[Site]:
    """With an experiment that has a long name and failures, and with the output of two ranks."""
    path = simulated(site.results / LONG, 24).path
    (path / "code").mkdir()
    (path / "code" / "model_def.py").write_text("".join(f"line = {number}\n" for number in range(1, 60)))
    fails(path, {3, 5})
    for rank in (0, 1):
        log = path / f"trial_{best(site, LONG)}" / "logs" / f"rank_{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"2026-11-23T10:00:00.000Z line {n} of rank {rank} {'y' * 150}\n" for n in range(300)))
    site.control.put(LONG, "COMPLETED", tags=("t" * 60,), notes="n" * 200)
    yield site
    shutil.rmtree(path)


def places(site: Site) -> list[str]:
    """All views, as the tabs of the page lead to them."""
    found = ["#/", "#/queue", "#/nothing", f"#/compare?t=0%3A{LONG}&t=3%3Adigits-1&t=5%3A{LONG}"]
    for place in (f"#/e/{LONG}", f"#/e/{LONG}/t/{best(site, LONG)}", "#/e/experiment"):
        site.open(place)
        site.one("nav.tabs a")
        tabs = site.js("return [...document.querySelectorAll('nav.tabs a')].map(each => each.getAttribute('href'))")
        found += tabs if LONG in place else [place]
    return found


def show(site: Site, place: str) -> None:
    """Go to a view, and wait until it has its data."""
    site.open(place)
    whole = "return document.querySelector('h1') && !document.querySelector('.skeleton, tr.waiting, [aria-busy=true]')"
    site.until(lambda: site.js(whole), place)


def theme(site: Site, name: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": name}]
    site.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def screen(full: Site, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A screen of a width on which all of a view is seen, since what is not seen is not loaded."""
    size = {"width": request.param, "height": 5000, "deviceScaleFactor": 1, "mobile": request.param == PHONE}
    full.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield full
    full.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    full.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def violations(site: Site, where: list[str], **options: object) -> str:
    """What axe-core finds in these views, a line each."""
    found = []
    for place in where:
        show(site, place)
        found += [f"{place}: {each}" for each in axe(site.browser, options)]
    return "\n".join(found)


@pytest.mark.long  # it takes 20 s; `make test` has one category of its rules, below
@pytest.mark.parametrize("screen", [1400, PHONE], indirect=True)
def test_axe_finds_nothing(screen: Site) -> None:
    where = places(screen)
    assert len(where) >= 15
    theme(screen, "light")
    assert violations(screen, where) == ""


@pytest.mark.long  # of what is dark, `make test` has the colours, below
@pytest.mark.parametrize("screen", [1400, PHONE], indirect=True)
def test_axe_finds_nothing_in_the_dark(screen: Site) -> None:
    theme(screen, "dark")
    assert violations(screen, places(screen), runOnly=["color-contrast", "link-in-text-block"]) == ""


@pytest.mark.long
def test_axe_finds_nothing_in_dialogs(full: Site) -> None:
    for place, label, press in (
        ("#/e/experiment", "Stop", full.click),
        ("#/e/experiment", "Share…", full.more),
        (f"#/e/{LONG}", "Fork", full.click),
    ):
        show(full, place)
        press(label)
        full.one("dialog[open]")
        assert axe(full.browser, {}) == [], label
        full.press(Keys.ESCAPE)
        full.until(lambda: not full.all("dialog"))


SIDEWAYS = """const scrolls = it => it && it !== document.body
  && (getComputedStyle(it).overflowX !== "visible" || scrolls(it.parentElement));
const wide = [...document.querySelectorAll("body *")].filter(it => {
  const box = it.getBoundingClientRect();
  return box.width > 1 && box.right > innerWidth + 1 && !scrolls(it.parentElement)
    && !it.closest(".skip, .hidden, dialog, details:not([open])");
});
const short = [...document.querySelectorAll("main *")].filter(it => {
  const text = [...it.childNodes].filter(each => each.nodeType === 3 && each.data.trim().length > 5);
  return text.some(each => {
    const range = document.createRange();
    range.selectNodeContents(each);
    const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top))).size;
    return lines > 3 && each.data.trim().length / lines < 4;
  });
});
const told = it => `${it.localName}.${it.className}: ${it.textContent.slice(0, 60)}`;
return [document.documentElement.scrollWidth - innerWidth, wide.map(told), short.map(told)];"""


@pytest.mark.parametrize("screen", [PHONE], indirect=True)
def test_nothing_is_wider_than_a_phone_and_no_text_stands_letter_under_letter(screen: Site) -> None:
    """And elements have names that screen readers can say."""
    found = {}
    for place in places(screen):
        show(screen, place)
        beyond, wide, short = screen.js(SIDEWAYS)
        unnamed = axe(screen.browser, {"runOnly": ["cat.name-role-value"]})
        if beyond > 0 or wide or short or unnamed:
            found[place] = (beyond, wide[:3], short[:3], unnamed[:3])
    assert found == {}


CONTRAST = """const channel = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const canvas = document.createElement("canvas").getContext("2d");
const light = colour => {
  canvas.fillStyle = colour;
  const [red, green, blue] = [1, 3, 5].map(at => channel(parseInt(canvas.fillStyle.slice(at, at + 2), 16) / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const contrast = (one, other) => {
  const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
};
const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(`--${name}`).trim();
const texts = ["ink", "quiet", "accent", "good", "bad", "wait"].flatMap(text => ["page", "panel"].map(
  ground => [`${text} on ${ground}`, contrast(of(text), of(ground))]));
const [done] = [arguments[arguments.length - 1]];
import("/static/selection.js").then(({ colourOf }) => done([texts, Array.from({ length: 12 }, (_, trial) => {
  const colour = colourOf("contrast", trial);
  return [`line ${colour}`, contrast(colour, of("page"))];
})]));"""


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_have_contrast(full: Site, name: str) -> None:
    theme(full, name)
    try:
        show(full, "#/")
        texts, lines = full.browser.execute_async_script(CONTRAST)
        assert {each: ratio for each, ratio in texts if ratio < LEAST_CONTRAST} == {}
        assert {each: ratio for each, ratio in lines if ratio < LEAST_GRAPHIC} == {}
    finally:
        full.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        full.js("sessionStorage.clear()")


# ---------------------------------------------------------------------------------------------------------- a person
class Person:
    """Somebody without a mouse. A step is a key, or a text that is typed into a field."""

    def __init__(self, site: Site) -> None:
        self.site, self.steps = site, 0
        site.js("sessionStorage.clear()")
        site.browser.get("about:blank")
        site.open("#/")
        site.until(lambda: len(self.names()) > 3)

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.site.browser).send_keys(key).perform()
            self.steps += 1

    def chord(self, *keys: str) -> None:
        """Press keys at once."""
        actions = ActionChains(self.site.browser)
        for key in keys:
            actions.key_down(key)
        for key in reversed(keys):
            actions.key_up(key)
        actions.perform()
        self.steps += 1

    def names(self) -> list[str]:
        links = "document.querySelectorAll('table[aria-label=Experiments] tbody a.open')"
        hrefs = self.site.js(f"return Array.from({links}, each => each.getAttribute('href'))")
        return [unquote(href.split("?")[0].rpartition("/")[2]) for href in hrefs]

    def find(self, words: str, name: str) -> None:
        """Search the list, and go to the row that was found."""
        self.press("/", words)
        self.site.until(lambda: self.names() == [name], words)
        self.press(Keys.ENTER)
        self.site.until(lambda: self.site.js("return document.activeElement.closest('tr') !== null"))

    def open(self, words: str, name: str) -> None:
        self.find(words, name)
        self.press(Keys.ENTER)
        self.site.until(lambda: self.site.texts("main nav.tabs a"), name)


def test_what_failed_last_night_and_why(full: Site) -> None:
    person = Person(full)
    person.open("partly failed", LONG)
    person.press("5")
    full.until(lambda: "model_def.py:41 in train_batch" in full.one("main").text, "the line")
    assert "trial 3, 5" in full.one("main").text
    assert person.steps == 5


@pytest.mark.long
def test_the_best_of_two_sweeps_are_compared(full: Site) -> None:
    person = Person(full)
    for name in ("digits-1", "many"):
        person.find(name, name)
        person.press("x")
    person.press("c")
    full.until(lambda: len(full.all("table.compare thead a, table[aria-label^='Trials compared'] thead a")) == 2)
    assert person.steps == 9


def test_the_best_is_forked_at_half_the_lr(full: Site) -> None:
    story = full.story
    with answering(story):
        person = Person(full)
        person.open("running", "experiment")
        person.press("b")
        full.until(lambda: full.browser.current_url.endswith(f"/t/{best(full, 'experiment')}"))
        full.until(lambda: full.texts(".actions button"))
        person.press("f")
        rate = full.one("dialog [data-hparam=lr]")
        while not full.js("return document.activeElement.dataset.hparam === 'lr'"):
            person.press(Keys.TAB)
        half = float(rate.get_property("value")) / 2
        person.press(repr(half), Keys.ENTER)
        full.until(lambda: "Forked from" in full.one("main").text or "Fork" in full.one("#said").text)
        assert story.search.params(max(story.search.trials))["lr"] == half
        assert person.steps == 10


@pytest.mark.long
def test_the_last_lines_of_rank_1_are_read(full: Site) -> None:
    person = Person(full)
    person.open("120", LONG)
    person.press("b")
    full.until(lambda: full.browser.current_url.endswith(f"/t/{best(full, LONG)}"))
    person.press("5")
    full.until(lambda: full.texts("main select"))
    for rank in (0, 1):
        person.press("r")
        full.until(lambda rank=rank: f"rank={rank}" in full.browser.current_url)
    full.until(lambda: "line 299 of rank 1" in full.one("main").text)
    assert "of rank 0" not in full.one("main").text
    assert person.steps == 8


@pytest.mark.long
def test_an_experiment_is_moved_up_in_the_queue(queue: QueueSite) -> None:  # noqa: F811
    person = Person(queue)
    person.press("q")
    queue.until(lambda: queue.names() == ORDER)
    person.press("j", "j")
    queue.until(lambda: queue.js("return document.activeElement.textContent") == "gpt")
    person.chord(Keys.ALT, Keys.ARROW_UP)
    assert "gpt gets the next free slot." in queue.lines(), "what it will do"
    person.press(Keys.ENTER)
    queue.until(lambda: queue.names()[:2] == ["gpt", "digits"])
    assert person.steps == 5
