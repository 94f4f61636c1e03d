"""Trials side by side: their metrics, their values, what differs; added and removed."""

from __future__ import annotations

from typing import Any

import pytest

from dray.records.result import Result
from tests.browser.page import Site
from tests.records.repeated import repeated
from tests.records.test_repeats import VALUES, runs
from tests.report.simulated import simulated

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = "<img src=x onerror=window.hacked=1>"
HEADS = "table.compare thead a"


def lines(site: Site, metric: str) -> list[dict[str, Any]]:
    """The lines of a metric's plot."""
    script = """const plots = [...document.querySelectorAll('.lines')];
                return plots.find(it => it.ariaLabel.startsWith(arguments[0]))?.drawn?.lines"""
    return list(site.js(script, metric) or [])


def values(site: Site, name: str, trial: int, metric: str, kind: str = "validation") -> list[float]:
    rows = Result(site.results / name).metrics
    rows = rows[(rows["kind"] == kind) & (rows["name"] == metric) & (rows["trial_id"] == trial)]
    return rows.sort_values("batches")["value"].tolist()


def test_trials_of_two_experiments_are_compared_in_all_their_metrics(site: Site) -> None:
    site.open("#/e/digits-1/trials")
    site.js("arguments[0].click()", site.one("tr[data-key] td.pick input"))  # wherever the filters above move it
    site.until(lambda: site.texts("#picked"), "the first")
    one = site.js("return document.querySelector('tr[data-key]').dataset.key")
    site.open("#/e/many/trials")
    site.one("tr[data-key] a[href^='#/e/many/']")
    site.press("j", "x")
    other = site.js("return document.activeElement.closest('tr').dataset.key")
    site.until(lambda: "2 trials selected in 2 experiments" in site.texts("#picked")[0])
    colour = site.js("return document.querySelector('tr[data-key] .swatch line').getAttribute('stroke')")
    site.press("c")
    site.until(lambda: site.texts(HEADS) == [f"{one} of digits-1", f"{other} of many"])
    site.until(lambda: len(lines(site, "validation_loss")) == 2)
    for kind, metric in (("validation", "validation_loss"), ("validation", "accuracy"), ("training", "loss")):
        title = metric if metric.startswith(kind) else f"{kind} {metric}"
        wanted = [values(site, name, int(key), metric, kind) for name, key in (("digits-1", one), ("many", other))]
        site.until(lambda title=title, wanted=wanted: [it["y"] for it in lines(site, title)] == wanted, title)
    drawn = lines(site, "training loss")
    assert drawn[1]["colour"] == colour, "as in the table"
    assert drawn[0]["colour"] != drawn[1]["colour"]
    assert drawn[0]["dash"] != drawn[1]["dash"]
    site.until(lambda: "lr" in site.texts("tr.differs th"))
    assert "global_batch_size" not in site.texts("tr.differs th")
    site.js("sessionStorage.clear()")


@pytest.mark.long
def test_trials_are_removed_and_added_and_the_address_has_them(site: Site) -> None:
    site.open("#/compare?t=1:digits-1&t=3:digits-1")
    site.until(lambda: site.texts(HEADS) == ["trial 1", "trial 3"])
    site.js("document.querySelector('thead [aria-label=\"Remove trial 3\"]').click()")
    site.until(lambda: site.texts(HEADS) == ["trial 1"])
    site.browser.back()
    site.until(lambda: site.texts(HEADS) == ["trial 1", "trial 3"])

    def add(text: str) -> None:
        box = site.one("input[aria-label='Add a trial']")
        box.clear()
        box.send_keys(text)
        site.click("Add", ".add")

    add("5")
    site.until(lambda: site.texts(HEADS) == ["trial 1", "trial 3", "trial 5"])
    best = Result(site.results / "many").overview.best_trial
    add("many")
    site.until(lambda: site.texts(HEADS) == ["1 of digits-1", "3 of digits-1", "5 of digits-1", f"{best} of many"])
    add("many 7")
    site.until(lambda: site.texts(HEADS)[-1:] == ["7 of many"])
    for text, problem in (
        ("nothing", "there is no experiment nothing"),
        ("many 7", "trial 7 of many is here already"),
        ("999", "has no trial 999"),
    ):
        add(text)
        site.until(lambda problem=problem: problem in site.texts(".add [role=alert]")[0], problem)
    site.browser.refresh()
    site.until(lambda: len(site.texts(HEADS)) == 5)
    site.js("sessionStorage.clear()")


def test_only_what_differs_is_shown_over_time_and_smoothed(site: Site) -> None:
    site.open("#/compare?t=1:digits-1&t=3:digits-1")
    site.until(lambda: "global_batch_size" in site.texts("table.compare th"))
    site.js("[...document.querySelectorAll('label')].find(it => it.textContent.includes('only what differs')).click()")
    site.until(lambda: "global_batch_size" not in site.texts("table.compare th"))
    assert "lr" in site.texts("table.compare th")
    site.until(lambda: len(lines(site, "validation_loss")) == 2)
    batches = lines(site, "validation_loss")[0]["x"]
    pick = """const [label, value] = arguments, labels = [...document.querySelectorAll('.controls label')];
              const it = labels.find(it => it.textContent.startsWith(label)).querySelector('select');
              it.value = value;
              it.dispatchEvent(new Event('change', { bubbles: true }));"""
    site.js(pick, "along", "epochs")
    site.until(lambda: lines(site, "validation_loss")[0]["x"] == [each / 10 for each in batches])
    site.js(pick, "smoothing", "0.9")
    raw = values(site, "digits-1", 1, "validation_loss")
    site.until(
        lambda: [line["y"] == raw for line in lines(site, "validation_loss")[:2]] == [True, False],
        "the raw line behind it",
    )
    site.browser.refresh()
    site.until(lambda: len(lines(site, "validation_loss")) == 4)
    assert "global_batch_size" not in site.texts("table.compare th")


def test_differences_come_with_intervals_where_there_are_repeats(site: Site) -> None:
    repeated(site.results / "again", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01))
    repeated(site.results / "again-2", VALUES, runs({1: 0.30, 2: 0.40, 3: 0.50}, noise=0.01))
    site.open("#/compare?t=1:again&t=3:again&t=0:again")
    site.until(lambda: len(site.all(".differences li")) == 2, "differences")
    one, other = site.texts(".differences li")
    assert one == "Trial 3 is better than trial 1 by 0.350 (0.275 .. 0.425), 3 seeds."
    assert other.startswith("Trial 0 is ahead of trial 1 by")
    site.open("#/compare?t=3:again&t=1:again-2")
    site.until(lambda: any("trial 1 of again-2 by" in text for text in site.texts(".differences li")))


def test_config_and_code_of_two_experiments_are_compared_as_text(site: Site) -> None:
    one, other = (
        simulated(site.results / name, 4, several=several) for name, several in (("ours", False), ("theirs", True))
    )
    for directory, line in ((one, "lr = 1"), (other, f"lr = 2  # {HOSTILE}")):
        directory.code.mkdir()
        (directory.code / "model_def.py").write_text(f"{line}\n")
    site.open("#/compare?t=0:ours&t=1:ours&t=2:theirs")
    site.until(lambda: len(site.texts(HEADS)) == 3)
    heading = ["Config and code: 0 of ours and 2 of theirs"]
    site.until(lambda: site.texts("summary") == heading, "those of ours are the same")
    assert not site.all("[aria-label='Differences of the configs']"), "folded"
    site.one("summary").click()
    site.until(lambda: "searcher.metrics" in site.texts("[aria-label='Differences of the configs'] th"))
    site.until(lambda: any(f"+lr = 2  # {HOSTILE}" in text for text in site.texts("details")), "the code")
    assert site.js("return window.hacked === undefined")


@pytest.mark.long
def test_more_than_twelve_and_trials_that_are_gone_are_said(site: Site) -> None:
    site.open("#/compare?" + "&".join(f"t={trial}:digits-1" for trial in range(15)))
    site.until(lambda: len(site.texts(HEADS)) == 12)
    site.until(lambda: "The first 12 of 15 trials." in site.texts("[role=status]"))
    assert not site.all("input[aria-label='Add a trial']")
    site.open("#/compare?t=1:digits-1&t=99:digits-1")
    site.until(lambda: any("has no trial 99" in text for text in site.texts(".trouble")))
    assert site.texts(HEADS) == ["trial 1"]
    site.click("Remove")
    site.until(lambda: "99" not in site.browser.current_url)
    site.open("#/compare")
    site.until(lambda: any("Select trials" in text for text in site.texts("p")))
