"""An experiment's page: its tabs, what it says at a glance, what failed, logs, config and code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from selenium.webdriver.common.keys import Keys

from dray.records.directory import DIFF
from dray.records.overview import Overview
from dray.records.reader import ExperimentReader
from dray.records.standing import standing
from dray.serve import tokens
from dray.serve.quota import Quota
from searchers.events import Exited
from tests.browser.page import Site
from tests.serve.conftest import TOKEN

pytestmark = [pytest.mark.browser, pytest.mark.slow]

EVIL = "<script>window.hacked = 1</script><img src=x onerror=hacked=1>"
UNHARMED = "return window.hacked === undefined && document.querySelectorAll('main script, main img').length === 0"
LINES = "return [...document.querySelectorAll('.log .line')].map(it => it.innerText.replace('\\n', ' '))"
LAST = "return [...document.querySelectorAll('.log .said')].at(-1)?.textContent ?? ''"
TARGET = "return document.querySelector('.log .line.target .said')?.textContent"


def tabs(site: Site) -> list[str]:
    return site.texts("nav.tabs a")


def current(site: Site) -> list[str]:
    return site.texts("nav.tabs a[aria-current]")


def write_log(site: Site, trial: int, rank: int, lines: list[str]) -> Path:
    place = site.results / "digits-1" / f"trial_{trial}" / "logs"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"rank_{rank}.log").write_text("".join(f"{line}\n" for line in lines))
    return place / f"rank_{rank}.log"


def query(site: Site) -> str:
    return str(site.browser.current_url.partition("?")[2])


# ---------------------------------------------------------------------------------------------------------------- tabs
def test_tabs_are_in_the_address_and_reached_by_keys(site: Site) -> None:
    site.open("#/e/digits-1")
    site.until(lambda: current(site) == ["Overview"])
    assert tabs(site) == ["Overview", "Trials", "Curves", "Analysis", "Failures", "Logs", "Config and code"]
    site.js("document.querySelector('nav.tabs a[aria-current]').focus()")
    site.press(*[Keys.ARROW_RIGHT] * 6, Keys.ARROW_LEFT, Keys.ENTER)
    site.until(lambda: current(site) == ["Logs"] and site.all(".log .line"))
    assert site.browser.current_url.endswith("#/e/digits-1/logs")
    site.browser.refresh()
    site.until(lambda: current(site) == ["Logs"])
    site.js("document.activeElement.blur()")
    site.press("7")
    site.until(lambda: current(site) == ["Config and code"])
    site.browser.back()
    site.until(lambda: current(site) == ["Logs"])
    for place in ("#/e/digits-1/nonsense", "#/e/digits-1/constructor", "#/e/nothing", "#/e/%zz/t/1"):
        site.open("#/")
        site.until(lambda: site.texts("h1") != ["Not found"])
        site.open(place)
        site.until(lambda: site.texts("h1") == ["Not found"], place)
    site.press(Keys.ESCAPE)
    site.until(lambda: site.browser.current_url.endswith("#/e/%25zz/trials"))


def test_experiments_that_have_not_begun_or_are_damaged_say_so(site: Site) -> None:
    digits = site.results / "digits-1"
    for name, journal in (("queued", None), ("damaged", "{}}\n{}\n")):
        (site.results / name).mkdir()
        (site.results / name / "experiment.yaml").write_text((digits / "experiment.yaml").read_text())
        if journal:
            (site.results / name / "journal.jsonl").write_text(journal)
    site.control.put("queued", "QUEUED")
    site.open("#/e/queued")
    site.until(lambda: "".join(site.texts(".standing")).startswith("Queued for "))
    for tab in ("failures", "logs", "code"):
        site.open(f"#/e/queued/{tab}")
        site.until(lambda: site.all(".empty, .log .line"), tab)
    site.open("#/e/damaged")
    site.until(lambda: "line 1 is damaged" in site.texts("main .trouble")[0])


def test_an_experiment_that_somebody_deletes_is_not_shown_any_more(site: Site) -> None:
    shutil.copytree(site.results / "digits-1", site.results / "deleted")
    site.control.put("deleted", "RUNNING")  # so that it is asked often
    site.open("#/e/deleted")
    site.until(lambda: site.all(".standing"))
    shutil.rmtree(site.results / "deleted")
    site.until(lambda: site.texts("h1") == ["Not found"])


# ------------------------------------------------------------------------------------------------------------ overview
def test_the_overview_says_what_the_command_says_and_is_followed(site: Site) -> None:
    site.open("#/e/experiment")
    site.until(lambda: "best error 0.25 of trial 0" in site.texts(".standing")[0])
    reader = ExperimentReader(site.story.directory)
    reader.refresh()
    seen: Overview = reader.overview()
    told = {part.about: part.text for part in standing(seen, reader).parts}
    site.until(lambda: all(told[it] in site.texts(".standing")[0] for it in ("trials", "failed", "best", "search")))
    assert site.one(".standing .bad").get_attribute("href").endswith("#/e/experiment/failures")
    site.until(lambda: "dray checkpoint download experiment best" in site.texts(".copy code"))
    site.click("Copy", ".copy:first-of-type")
    site.until(lambda: "Copied" in site.texts(".copy button"))
    site.until(lambda: "1 failed" in site.one(".tiles").text)
    site.story.validate(3, 20, 0.0625)
    site.until(lambda: "best error 0.0625 of trial 3" in site.texts(".standing")[0], "the sentence")
    site.until(lambda: "0.0625" in site.one(".tiles").text, "the tile")
    site.story.happen(Exited(trial=3, reason="completed"))
    site.until(lambda: "4 of 5 trials ended" in site.texts(".standing")[0])
    site.story.journal.append({"event": "unread", "unread": ["dropuot"], "read": ["lr"]})
    line = "dropuot is searched, but no trial has read it; read: lr"
    site.until(lambda: site.texts("main p.trouble") == [line], "an unread hyperparameter")


def test_how_far_trials_came_is_counted_by_rung(site: Site) -> None:
    site.open("#/e/digits-1")
    site.until(lambda: site.all("table[aria-label=Rungs]"))
    reader = ExperimentReader(type(site.story.directory)(site.results / "digits-1"))
    reader.refresh()
    reached = [sum(trial.last_step >= length for trial in reader.trials.values()) for length in reader.rungs]
    assert site.texts("table[aria-label=Rungs] td:nth-child(3)") == [f" {number}" for number in reached]
    assert site.texts("table[aria-label=Rungs] td:nth-child(2)") == ["1 epoch", "4 epochs", "16 epochs"]
    site.until(lambda: site.texts(".notes .text") == ["<b>first</b>"], "notes are text")
    assert site.texts(".notes .tag") == ["baseline"]


def test_stopping_asks_first_and_reaches_the_server(site: Site) -> None:
    site.open("#/e/experiment")
    site.click("Stop", ".actions")
    assert "save a checkpoint first" in site.one("dialog[open]").text
    site.click("Cancel", "dialog")
    site.until(lambda: not site.all("dialog"))
    assert ("stop", "experiment") not in site.control.calls
    site.click("Stop", ".actions")
    site.click("Stop", "dialog")
    site.until(lambda: ("stop", "experiment") in site.control.calls)
    site.until(lambda: "Activate" in site.one(".actions").text)
    site.until(lambda: site.texts(".standing")[0].startswith("Stopped after "))
    site.click("Activate", ".actions")
    site.click("Activate", "dialog")
    site.until(lambda: ("activate", "experiment") in site.control.calls)


def test_slots_tags_and_notes_are_changed(site: Site) -> None:
    site.open("#/e/experiment")
    site.more("Share…")
    weight = site.one("dialog input[name=weight]")
    weight.clear()
    weight.send_keys("2.5")
    site.click("Change", "dialog")
    site.until(lambda: not site.all("dialog"), "the end of the dialog")
    site.until(lambda: "weight 2.5" in site.one(".tiles").text)
    assert site.control.experiment("experiment").share.weight == 2.5
    site.more("Tags and notes")
    site.one("dialog input").send_keys("new, tags")
    site.one("dialog textarea").send_keys("two\nlines")
    site.click("Save", "dialog")
    site.until(lambda: {"new", "tags"} <= set(site.texts(".notes .tag")))
    site.until(lambda: site.control.experiment("experiment").notes == "two\nlines")


@pytest.mark.long
def test_a_token_that_may_not_change_an_experiment_sees_why_in_place_of_the_buttons(site: Site) -> None:
    secret = tokens.create(site.results, "agent", "submit", Quota())
    site.browser.get(f"{site.url}/login?token={secret}")
    try:
        site.open("#/e/experiment")
        site.until(lambda: "may change only what it has submitted" in site.one(".actions").text)
        assert site.texts(".actions button") == ["Fork"]
        site.control.put("experiment", "RUNNING", owner="agent")
        site.browser.refresh()
        site.until(lambda: "Stop" in site.texts(".actions button"))
        reader = tokens.create(site.results, "reader", "read", Quota())
        site.browser.get(f"{site.url}/login?token={reader}")
        site.open("#/e/experiment")
        site.until(lambda: "may only look" in site.one(".actions").text)
        assert site.texts(".actions button") == []
    finally:
        site.control.put("experiment", "RUNNING", owner="")
        site.browser.get(f"{site.url}/login?token={TOKEN}")


def test_an_experiment_is_run_again_with_changes(site: Site) -> None:
    site.open("#/e/digits-1")
    site.click("Fork", ".actions")
    text = site.one("dialog textarea").get_property("value")
    change = """const it = document.querySelector('dialog textarea');
                it.value = arguments[0];
                it.dispatchEvent(new Event('input'));"""
    assert "max_restarts" not in text, "what has its default is left out"
    lines = "dialog [role=status] li"
    site.js(change, text.replace("num_rungs: 3", "divisor: 1"))
    site.until(lambda: site.texts(lines) == ["searcher.num_rungs: no longer set", "searcher.divisor: 1"])
    site.click("Fork", "dialog")
    told = "return document.querySelector('dialog .trouble')?.innerText ?? ''"
    site.until(lambda: "searcher.divisor: must be > 1" in site.js(told))
    smaller = text.replace("max_trials: 64", "max_trials: 8").replace("name: simulated", "name: smaller")
    site.js(change, smaller.replace("searcher:\n", "searcher:\n  like:\n  - '11'\n  - other-*\n"))
    site.one("dialog label input").send_keys("12, digits-*\t")
    changed = ["name: simulated → smaller", "searcher.max_trials: 64 → 8", 'searcher.like: ["12","digits-*"]']
    site.until(lambda: site.texts(lines) == changed)
    site.click("Fork", "dialog")
    site.until(lambda: "#/e/smaller" in site.browser.current_url)
    [made] = site.results.glob("smaller*")
    searcher = yaml.safe_load((made / "experiment.yaml").read_text())["searcher"]
    assert (searcher["max_trials"], searcher["like"]) == (8, ["12", "digits-*"])
    assert (made / "code" / "model_def.py").exists()


# ------------------------------------------------------------------------------------------------------------ failures
def test_failures_are_grouped_and_lead_to_the_users_line_and_to_the_log(site: Site) -> None:
    code = site.story.directory.code
    code.mkdir()
    (code / "model_def.py").write_text("".join(f"line = {number}\n" for number in range(1, 301)))
    head = f"KeyError: '{EVIL}'\n  model_def.py:200, in __init__\n    line = 200"
    error = f"{head}\n\nTraceback (most recent call last):\n{EVIL}"
    failure = {"error": error, "where": "KeyError at model_def.py:200 in __init__", "batches": 4}
    for trial, event in ((3, "restarted"), (3, "restarted"), (4, "restarted")):
        site.story.write({"event": event, "trial": trial, **failure})
    site.open("#/e/experiment")
    site.until(lambda: site.texts("nav.tabs .badge") == ["5"], "the number beside the tab")
    site.until(lambda: any("KeyError" in text for text in site.texts(".causes li")))
    site.js("[...document.querySelectorAll('nav.tabs a')].find(it => it.textContent.startsWith('Failures')).click()")
    site.until(lambda: len(site.all("article.failure")) == 2)
    first, second = site.texts("article.failure")
    assert first.startswith(f"3× KeyError: '{EVIL}'"), "the most frequent first"
    assert "trial 3 2×, 4" in first
    assert "restarted 3 times" in first
    assert "last after 4 batches" in first
    assert second.startswith("2× no")
    assert "restarted 1 time, given up 1 time" in second
    assert EVIL in site.texts("article.failure details pre")[0]
    assert site.js(UNHARMED)
    links = [each.get_attribute("href").partition("#")[2] for each in site.all("article.failure:nth-of-type(1) > p a")]
    assert links[-1] == "/e/experiment/t/3/logs"
    site.all("article.failure a")[0].click()
    site.until(lambda: site.js(TARGET) == "line = 200", "the line of the code")
    assert "file=model_def.py&line=200" in query(site)

    def is_seen() -> bool:
        box, line = (site.one(each).rect for each in (".log", ".log .line.target"))
        return bool(box["y"] <= line["y"] <= box["y"] + box["height"])

    site.until(is_seen, "it is scrolled to")


# ---------------------------------------------------------------------------------------------------------------- logs
@pytest.fixture
def long_log(site: Site) -> Path:
    lines = [f"2026-11-23T10:00:00.000Z step {number}" for number in range(1, 30_001)]
    lines[12_344] += f" Loss is NaN \x1b[31m{EVIL}\x1b[0m \u202e"
    lines[20_000] += " loss is nan"
    write_log(site, 5, 0, ["2026-11-23T10:00:01.000Z of rank 0"])
    return write_log(site, 5, 1, lines)


def test_any_line_of_a_long_log_is_shown_searched_and_linked_to(site: Site, long_log: Path) -> None:
    site.open("#/e/digits-1/t/5/logs?rank=1")
    site.until(lambda: any("step 30000" in line for line in site.js(LINES)), "the last lines first")
    assert len(site.all(".log .line")) < 150, "only what is seen is drawn"
    site.press("/", *"loss is NAN")
    site.until(lambda: "2 lines" in site.texts(".logbar [role=status]"))
    site.press(Keys.ENTER)
    site.until(lambda: "Loss is NaN" in (site.js(TARGET) or ""))
    assert site.texts(".log .line.target mark") == ["Loss is NaN"]
    site.until(lambda: "1 of 2 lines" in site.texts(".logbar [role=status]"))
    assert EVIL in site.js(TARGET)
    assert site.js(TARGET).endswith(" \\u202e"), "colours are gone, and what would change the order is visible"
    assert site.js(UNHARMED)
    site.until(lambda: "line=12345" in query(site))
    site.press(Keys.ENTER)
    site.until(lambda: "line=20001" in query(site))
    site.until(lambda: "2 of 2 lines" in site.texts(".logbar [role=status]"))
    site.press(Keys.ENTER)
    site.until(lambda: "line=12345" in query(site), "from the last to the first")
    site.open("#/e/digits-1/t/5/logs?rank=1&line=77")
    site.browser.refresh()
    site.until(lambda: (site.js(TARGET) or "").endswith("step 77"), "by a link")
    site.all(".log .line.target + .line a")[0].click()
    site.until(lambda: (site.js(TARGET) or "").endswith("step 78") and "line=78" in query(site))


@pytest.mark.long
def test_all_ranks_are_shown_by_time_and_one_of_them_can_be_chosen(site: Site, long_log: Path) -> None:
    site.open("#/e/digits-1/t/5/logs")
    site.until(lambda: any("of rank 0" in line for line in site.js(LINES)))
    shown = site.js(LINES)
    assert shown[-1].startswith("0:1 "), "its rank and number"
    assert shown[-2].startswith("1:30000 ")
    site.press("/", *"nan")
    site.until(lambda: "2 lines" in site.texts(".logbar [role=status]"))
    site.press(Keys.ENTER)
    site.until(lambda: "rank=1" in query(site) and "line=12345" in query(site), "where the match is")
    site.open("#/e/digits-1/t/5/logs")
    site.one(".logbar select").send_keys("0")
    site.until(lambda: [line.partition(" ")[0] for line in site.js(LINES)] == ["1"] and "rank=0" in query(site))
    site.js("document.activeElement.blur()")
    site.press("r")
    site.until(lambda: "rank=1" in query(site) and site.js(LAST).endswith(" step 30000"), "the next rank")


def test_a_rank_that_has_printed_nothing_can_be_left_again(site: Site) -> None:
    write_log(site, 7, 0, ["the only line"])
    write_log(site, 7, 1, [])
    site.open("#/e/digits-1/t/7/logs?rank=1")
    site.until(lambda: "Rank 1 has printed nothing." in site.texts(".empty"))
    site.press("r", "r")
    site.until(lambda: "rank=0" in query(site) and site.js(LAST).endswith("the only line"))


def test_what_a_trial_prints_is_text_and_is_followed(site: Site) -> None:
    path = write_log(site, 3, 0, [f"2026-11-23T10:00:00.000Z {EVIL}", *map(str, range(500))])
    site.open("#/e/digits-1/t/3/logs")
    site.until(lambda: any(line.endswith(" 499") for line in site.js(LINES)))
    with path.open("a") as file:
        file.write("10%\r50%\rone more\x1b[31m line\n")
    site.browser.refresh()  # it has ended, so that it is asked rarely
    site.until(lambda: site.js(LAST) == "one more line", "as a terminal would show it")
    site.open("#/e/digits-1/t/3/logs?line=1")
    site.until(lambda: EVIL in (site.js(TARGET) or ""))
    assert site.js(UNHARMED)


@pytest.mark.long
def test_an_experiments_log_is_followed_and_searched(site: Site) -> None:
    site.open("#/e/experiment/logs")
    site.until(lambda: any("trial 2 has invalid hyperparameters" in line for line in site.js(LINES)))
    site.story.write({"event": "ended", "reason": f"budget.time is spent {EVIL}"})
    site.until(lambda: site.js(LAST).endswith(f"experiment ended: budget.time is spent {EVIL}"))
    site.press("/", *"given up", Keys.ESCAPE)
    site.press("/", *"budget")
    site.until(lambda: "1 line" in site.texts(".logbar [role=status]"))
    assert site.js(UNHARMED)


# ----------------------------------------------------------------------------------------------------- config and code
def test_config_and_code_are_text_with_numbered_lines(site: Site) -> None:
    code = site.results / "digits-1" / "code"
    (code / "net").mkdir()
    (code / "net" / "evil.py").write_text(f"x = '{EVIL}'\ny = 1 # \u202e\x1b[8m\n")
    (code / "weights.bin").write_bytes(b"\0" * 2048)
    (code / "link").symlink_to("/etc/passwd")
    site.open("#/e/digits-1/code")
    site.until(lambda: any("1 entrypoint: model_def:DigitsTrial" in line for line in site.js(LINES)), "the config")
    files = site.texts("nav[aria-label=Files] li")
    assert files == [
        "experiment.yaml config",
        "link link",
        "model_def.py 37 B",
        "net/evil.py 85 B",
        "weights.bin 2.0 KiB",
    ]
    assert "link" not in site.texts("nav[aria-label=Files] a"), "it is not followed"
    site.all("nav[aria-label=Files] a")[2].click()
    site.until(lambda: site.js(LINES) == [f"1 x = '{EVIL}'", "2 y = 1 # \\u202e\\u001b[8m"])
    assert site.js(UNHARMED)
    site.all("nav[aria-label=Files] a")[3].click()
    site.until(lambda: "weights.bin is binary: 2.0 KiB." in site.texts(".empty"))


@pytest.mark.long
def test_what_a_variant_of_the_code_changes_is_shown(site: Site) -> None:
    variant = site.results / "digits-1" / "variants" / ("0" * 12)
    (variant / "code").mkdir(parents=True)
    (variant / "code" / "model_def.py").write_text("lr = 2\n")
    (variant / DIFF).write_text("--- a/model_def.py\n+++ b/model_def.py\n@@ -1 +1 @@\n-lr = 1\n+lr = 2\n")
    site.open("#/e/digits-1/code")
    site.browser.refresh()
    choice: Any = site.one("select")
    choice.send_keys("0")
    site.until(lambda: site.texts(".log .added .said") == ["+++ b/model_def.py", "+lr = 2"])
    assert site.texts(".log .removed .said") == ["--- a/model_def.py", "-lr = 1"]
    site.all("nav[aria-label=Files] a")[1].click()
    site.until(lambda: site.js(LINES) == ["1 lr = 2"])
    assert f"variant={'0' * 12}" in query(site)
