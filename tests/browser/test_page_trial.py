"""A trial's page as a browser draws it."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from dray.records.directory import DIFF
from dray.records.metrics import SYSTEM, MetricsLog
from dray.records.result import Result
from searchers.events import Requested, Source, Started
from tests.browser.page import SCREENS, Site, on_screen
from tests.experiment.test_requests import answering
from tests.records.repeated import repeated
from tests.records.test_repeats import VALUES, runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DRAWN = """const line = ({ x, y, label, band, behind }) => ({ x, y, label, band, behind });
const all = [...document.querySelectorAll("[data-metric], [data-figure]")];
const lines = it => it.querySelector(".lines").drawn.lines.map(line);
const there = all.filter(it => it.querySelector(".lines")?.drawn);
return Object.fromEntries(there.map(it => [it.dataset.metric ?? it.dataset.figure, lines(it)]));"""


def drawn(site: Site) -> dict[str, list[dict[str, Any]]]:
    return dict(site.js(DRAWN))


def rows_of(site: Site, name: str, trial: int) -> Any:
    rows = Result(site.results / name).metrics.query(f"trial_id == {trial}")
    return dict(iter(rows.groupby(["kind", "name"])))


def best_of(site: Site, name: str) -> int:
    best = Result(site.results / name).reader.best()
    assert best is not None
    return best.id


def choose(site: Site, label: str, value: str) -> None:
    script = """const label = [...document.querySelectorAll('label')].find(it => it.innerText.startsWith(arguments[0]));
                const it = label.querySelector('select');
                it.value = arguments[1];
                it.dispatchEvent(new Event('change', { bubbles: true }));"""
    site.js(script, label, value)


def test_a_trial_stands_beside_the_best_with_what_differs_marked(site: Site) -> None:
    site.open("#/e/digits-1/t/3")
    site.until(lambda: site.texts("table[aria-label=Hyperparameters] tbody tr"), "hyperparameters")
    reader = Result(site.results / "digits-1").reader
    mine, best = reader.trials[3].hparams, reader.trials[best_of(site, "digits-1")]
    differs = {name for name in mine if mine[name] != best.hparams[name]}
    assert 0 < len(differs) < len(mine)
    site.until(lambda: set(site.texts("table[aria-label=Hyperparameters] tr.differs th")) == differs)
    assert all("≠" in text for text in site.texts("table[aria-label=Hyperparameters] tr.differs"))
    assert f"trial {best.id}, the best" in site.texts("table[aria-label=Hyperparameters] thead th")
    rank = f"rank {[each.id for each in reader.ranked()].index(3) + 1} of 64"
    site.until(lambda: rank in site.one(".tiles").text)
    site.until(lambda: "validation_loss" in site.texts("table[aria-label='Last metrics'] th"))
    site.js("document.querySelector('table[aria-label=Hyperparameters] thead a').click()")
    site.until(lambda: site.texts("h1")[0].startswith(f"Trial {best.id}"))
    site.until(lambda: "This is the best trial." in site.texts("section p"))


def test_one_goes_from_trial_to_trial_in_a_tab_by_links_and_keys(site: Site) -> None:
    site.open("#/e/digits-1/t/0/checkpoints")
    site.until(lambda: site.texts(".neighbours a") == ["trial 1 ›"], "the first has none before")
    site.press("]")
    site.until(lambda: "#/e/digits-1/t/1/checkpoints" in site.browser.current_url)
    site.until(lambda: site.texts(".neighbours a") == ["‹ trial 0", "trial 2 ›"])
    site.press("[")
    site.until(lambda: "#/e/digits-1/t/0/checkpoints" in site.browser.current_url)
    site.open("#/e/digits-1/t/63")
    site.until(lambda: site.texts(".neighbours a") == ["‹ trial 62"], "the last has none after")
    site.press("x")
    site.until(lambda: "sel=63" in site.browser.current_url)
    site.until(lambda: site.one(".neighbours input").is_selected())
    site.js("document.querySelector('#picked button').click()")
    site.until(lambda: not site.one(".neighbours input").is_selected())
    for place in ("#/e/digits-1/t/64", "#/e/digits-1/t/3/nothing"):
        site.open(place)
        site.until(lambda: site.texts("h1") == ["Not found"], place)


def test_all_metrics_are_a_grid_with_the_best_trial_beside(site: Site) -> None:
    best, shown = best_of(site, "digits-1"), ".metric-grid h2 span:last-child"
    site.open("#/e/digits-1/t/3/metrics")
    single = rows_of(site, "digits-1", 3)
    assert all(len(each) == 1 for each in single.values())
    loss = float(single["validation", "validation_loss"]["value"].iloc[0])
    site.until(lambda: site.texts(shown)[:1] == [f"{loss:.5g}"] and len(site.texts(shown)) == len(single), "numbers")
    assert not drawn(site), "no plots with a single point"
    trial, rows = next(
        (each, found)
        for each in range(64)
        if each != best and len((found := rows_of(site, "digits-1", each))["validation", "validation_loss"]) > 1
    )
    site.open(f"#/e/digits-1/t/{trial}/metrics")
    site.until(lambda: len(drawn(site)) == len(rows), "a plot for each metric")
    names = {(kind, name): name if name.startswith(kind) else f"{kind} {name}" for kind, name in rows}
    for key, mine in rows.items():
        [line] = drawn(site)[names[key]]
        assert (line["x"], line["y"]) == (mine["batches"].tolist(), mine["value"].tolist())
    assert site.texts(".metric-grid h2 span:first-child")[0] == "validation_loss", "the searched one first"
    label = site.js("return document.querySelector('[data-metric=validation_loss] .lines').ariaLabel")
    points = len(rows["validation", "validation_loss"])
    assert label.startswith(f"validation_loss along batches: {points} points, at last ")
    site.js("[...document.querySelectorAll('.controls input[type=checkbox]')][0].click()")
    choose(site, "along", "epochs")
    theirs = rows_of(site, "digits-1", best)["validation", "validation_loss"]
    both = [f"trial {trial}", f"trial {best}, the best"]
    site.until(lambda: sorted(line["label"] for line in drawn(site)["validation_loss"]) == sorted(both), "both")
    values = (theirs["epochs"].tolist(), theirs["value"].tolist())
    site.until(
        lambda: [(it["x"], it["y"]) for it in drawn(site)["validation_loss"] if it["label"] == both[1]] == [values]
    )
    choose(site, "smoothing", "0.6")
    site.until(lambda: sum(bool(line["behind"]) for line in drawn(site)["validation_loss"]) == 2, "thin raw lines")
    url = site.browser.current_url
    assert all(each in url for each in ("best=1", "x=epochs", "smooth=0.6"))
    before = drawn(site)
    site.browser.refresh()
    site.until(lambda: drawn(site) == before, "the same after a reload")


def test_a_stretch_of_the_grid_is_zoomed_into_in_all_plots_and_all_is_seen_again(site: Site) -> None:
    site.open(f"#/e/digits-1/t/{best_of(site, 'digits-1')}/metrics")
    site.until(lambda: len(drawn(site)) == 4, "a plot for each metric")
    ranges = """return [...document.querySelectorAll('.lines')].filter(it => it.drawn)
                .map(({ drawn: { scales } }) => [scales.x.min, scales.x.max])"""
    whole = site.js(ranges)
    [left, top, width] = site.js(
        "const it = document.querySelector('.u-over').getBoundingClientRect(); return [it.left, it.top, it.width]"
    )
    for at, act in ((0.25, "pointerMove"), (0.25, "pointerDown"), (0.75, "pointerMove"), (0.75, "pointerUp")):
        chain = ActionChains(site.browser, duration=0)
        pointer = chain.w3c_actions.pointer_action
        pointer.move_to_location(round(left + at * width), round(top + 40))  # type: ignore[no-untyped-call]
        {"pointerDown": chain.click_and_hold, "pointerUp": chain.release}.get(act, lambda: None)()
        chain.perform()
    (least, most), *_ = whole

    def is_zoomed() -> bool:
        (low, high), *others = site.js(ranges)
        return least < low < high < most and others == [[low, high]] * 3

    site.until(is_zoomed, "zoomed")
    site.js("document.querySelector('.lines').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    site.until(lambda: site.js(ranges) == whole, "all again")


def test_values_that_are_not_numbers_are_gaps_with_crosses_and_long_names_fit(site: Site) -> None:
    name = "<img src=x onerror=hacked=1>" + "a_long_name_" * 9
    values = [1.0, math.nan, 3.0, math.inf]
    site.story.metrics.append(
        3,
        [
            {"batches": 10 + at, "epochs": 2.5, "kind": "training", "name": name, "value": value, "time": 1012.0 + at}
            for at, value in enumerate(values)
        ],
    )
    site.open("#/e/experiment/t/3/metrics")
    site.until(lambda: f"training {name}" in drawn(site), "the plot")
    [line] = drawn(site)[f"training {name}"]
    assert line["y"] == [1, "nan", 3, "inf"]
    told = "A cross marks values that are NaN or infinite."
    site.until(lambda: told in site.texts("main p[role=status]")[0])
    frame = f"[data-metric='training {name}'] .lines-frame"
    for key, told in ((Keys.ARROW_LEFT, "3"), (Keys.ARROW_RIGHT, "∞")):
        site.one(f"{frame} .lines").send_keys(*[Keys.ARROW_RIGHT] * 4, key)
        site.until(lambda told=told: f": {told}" in site.texts(f"{frame} .tip")[0], "the value beside the cross")
    site.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        site.until(lambda: site.js("return document.querySelector('.metric-grid').getBoundingClientRect().width") < 390)
        assert site.js("return document.documentElement.scrollWidth") <= 390
    finally:
        site.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert site.js("return window.hacked === undefined && document.querySelectorAll('main img').length === 0")


@pytest.mark.long
def test_use_of_the_machine_is_drawn_over_time_with_units(site: Site) -> None:
    log, began = MetricsLog(site.results / "many" / "metrics"), Result(site.results / "many").reader.trials[7].started
    assert began is not None
    figures = {
        "gpu_percent": [90.0, 70.0, 95.0],
        "gpu_memory_gb": [11.0, 12.0, 12.0],
        "cpu_cores": [3.0, 3.5, 2.5],
        "memory_gb": [4.0, 4.5, 5.0],
        "step_ms": [12.0, 13.0, 11.0],
        "host_wait_percent": [5.0, 0.0, 2.5],
    }
    for name, values in {**figures, "slowest_rank_percent/gpu-7/3": [3.0, 60.0, 38.4]}.items():
        log.append(
            7,
            [
                {
                    "batches": 1 + at,
                    "epochs": 0.1,
                    "kind": SYSTEM,
                    "name": name,
                    "value": value,
                    "time": began + 60 * at,
                }
                for at, value in enumerate(values)
            ],
        )
    log.close()
    site.open("#/e/many/t/7/utilization")
    site.until(lambda: len(drawn(site)) == len(figures), "figures")
    for name, values in figures.items():
        [line] = drawn(site)[name]
        assert (line["x"], line["y"]) == ([0, 60, 120], values)
    titles = site.texts(".metric-grid h2 span:first-child")
    assert titles == [
        "GPU utilization, % of time",
        "GPU memory per rank, GB",
        "CPU cores per trial",
        "memory per trial, GB",
        "step time, ms",
        "waiting for data, % of training time",
    ]
    assert site.js(
        "const { y } = document.querySelector('[data-figure=gpu_percent] .lines').drawn.scales; return [y.min, y.max]"
    ) == [0, 100]
    spent = Result(site.results / "many").system_metrics.query("trial_id == 7").groupby("name")["value"].sum()
    total = spent[[name for name in spent.index if name.endswith("_s")]].sum()
    assert (
        site.one(".share-bar")
        .get_attribute("aria-label")
        .startswith(f"starting {100 * spent['starting_s'] / total:.0f}%, training ")
    )
    site.open("#/e/many/t/7")
    told = "ank 3 on gpu-7 takes 38% longer per step than the median of the others."
    site.until(lambda: site.texts(".trouble") == [f"R{told}"], "the slow rank")
    site.open("#/e/many")
    site.until(lambda: f"Trial 7: r{told}" in site.texts(".trouble"), "the slow rank")
    site.open("#/e/experiment/t/0/utilization")
    site.until(lambda: "a trial tells of its machine every five seconds" in site.one("main").text)


def test_checkpoints_have_the_command_that_downloads_them(site: Site) -> None:
    site.open("#/e/experiment/t/0/checkpoints")
    site.until(lambda: len(site.all("table[aria-label=Checkpoints] tbody tr")) == 2, "checkpoints")
    latest, best = site.texts("table[aria-label=Checkpoints] tbody tr")
    assert latest.startswith("20")
    assert "best" in best
    assert str(site.story.directory.path / "trial_0" / "checkpoint_10") in best
    assert site.texts("table[aria-label=Checkpoints] code") == [
        f"dray checkpoint download experiment 0 --batches {at}" for at in (20, 10)
    ]
    site.until(lambda: "Checkpoints 2" in " ".join(site.one("nav.tabs").text.split()))
    site.js("document.querySelector('table[aria-label=Checkpoints] .copy button').click()")
    site.until(lambda: "Copied" in site.texts("table[aria-label=Checkpoints] .copy button"))


def test_a_trial_is_forked_and_stopped_and_its_lineage_has_links(site: Site) -> None:
    with answering(site.story):
        site.open("#/e/experiment/t/0")
        site.until(lambda: "Fork" in site.one(".actions").text)
        assert "Stop" not in site.one(".actions").text, "it has ended"
        site.click("Fork", ".actions")
        rate = site.one("dialog[open] input[data-hparam=lr]")
        rate.clear()
        rate.send_keys("much")
        site.click("Fork", "dialog")
        site.until(lambda: "lr: must be a value like" in site.one("dialog").text)
        rate.clear()
        rate.send_keys("0.15")
        site.click("Fork", "dialog")
        site.until(lambda: "#/e/experiment/t/5" in site.browser.current_url, "the fork's page")
        site.until(lambda: "Forked from trial 0 at batch 10." in site.texts(".lineage p"), "its source")
        assert site.story.search.params(5) == {**site.story.search.params(0), "lr": 0.15}
        site.story.happen(Started(trial=5))
        site.click("Stop", ".actions")
        assert "checkpoints, metrics and logs are kept" in site.one("dialog[open]").text
        site.click("Stop", "dialog")
        site.until(lambda: site.story.search.trials[5].stop_requested)
    site.story.validate(5, 15, 0.28125)
    site.story.search.request(Requested(source=Source(trial=5, step=15, batches=15)))
    site.story.happen(Started(trial=6))
    site.open("#/e/experiment/t/6")
    site.until(
        lambda: "Forked from trial 5 at batch 15, itself forked from trial 0 at batch 10." in site.texts(".lineage p")
    )
    site.js("document.querySelectorAll('.lineage a')[1].click()")
    site.until(lambda: "Forked into trial 5 at batch 10." in site.texts(".lineage p"), "the other direction")


def test_a_trial_begins_anew_with_other_hyperparameters_and_back_closes_what_was_asked(site: Site) -> None:
    site.open("#/e/experiment/t/1")
    site.open("#/e/experiment/t/0")
    site.click("Fork", ".actions")
    site.until(lambda: site.all("dialog[open]"))
    site.browser.back()
    site.until(lambda: site.texts("h1")[0].startswith("Trial 1"))
    site.until(lambda: not site.all("dialog"), "it is not about this trial")
    with answering(site.story):
        site.open("#/e/experiment/t/0")
        site.click("Fork", ".actions")
        site.js("document.querySelector('dialog [name=at]').value = 'none'")
        rate = site.one("dialog[open] input[data-hparam=lr]")
        rate.clear()
        rate.send_keys("0.125")
        site.click("Fork", "dialog")
        site.until(lambda: not site.all("dialog"), "the end of the dialog")
        new = max(site.story.search.trials)
        assert site.story.search.params(new) == {**site.story.search.params(0), "lr": 0.125}
        site.until(lambda: site.browser.current_url.endswith(f"#/e/experiment/t/{new}"))
        assert not site.texts(".lineage p")


def test_repeats_have_links_to_what_they_repeat_and_back(site: Site) -> None:
    directory = repeated(site.results / "again", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01))
    try:
        site.open("#/e/again/t/5")
        site.until(lambda: "Repeat of trial 1, seed 1." in site.texts("p"), "what it repeats")
        site.js("document.querySelector('.lineage a').click()")
        site.until(lambda: any(text.startswith("Trained again as trial 5, seed 1, trial ") for text in site.texts("p")))
    finally:
        shutil.rmtree(directory.path)


def test_failures_and_the_code_of_a_variant_are_text(site: Site) -> None:
    site.open("#/e/experiment/t/1")
    site.until(lambda: len(site.all("details")) == 2, "failures")
    assert ["restarted" in site.texts("summary")[0], "given up" in site.texts("summary")[1]] == [True, True]
    directory, name = site.story.directory, "0" * 12
    directory.variant(name).mkdir(parents=True)
    lines = [
        "--- a/model.py",
        "+++ b/model.py",
        "@@ -1 +1 @@",
        "-lr = 1",
        "+x = '<script>window.hacked = 1</script>'",
        "+y = 1 # \u202e\x1b[8m",
    ]
    shown = [*lines[:-1], "+y = 1 # \\u202e\\u001b[8m"]
    (directory.variant(name) / DIFF).write_text("\n".join(lines))
    trial = len(site.story.search.trials)
    site.story.search.request(Requested(code=name))
    error = "Traceback\n<img src=x onerror=hacked=1>\nOSError: \u202edisk\x1b[8m full"
    site.story.write({"event": "restarted", "trial": trial, "error": error})
    site.open(f"#/e/experiment/t/{trial}")
    site.until(lambda: site.texts(".said") == shown)
    assert site.texts(".added .said") == [shown[1], shown[4], shown[5]]
    site.until(lambda: site.texts("details pre") == [error.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")])
    assert site.js(
        "return window.hacked === undefined && document.querySelectorAll('.said *, details img').length === 0"
    )


def test_what_a_trial_printed_is_reached_by_its_tab(site: Site) -> None:
    site.open("#/e/digits-1/t/3")
    site.until(lambda: site.texts("nav.tabs a")[-1:] == ["Logs"], "tabs")
    site.js("[...document.querySelectorAll('nav.tabs a')].at(-1).focus()")
    site.press(Keys.ENTER)
    site.until(lambda: "#/e/digits-1/t/3/logs" in site.browser.current_url)
    site.until(lambda: "<script>window.hacked" in site.one("main").text)
    assert site.js(
        "return window.hacked === undefined && document.querySelectorAll('main script, main img').length === 0"
    )


@pytest.mark.long
def test_a_trial_fits_its_screens_light_and_dark(site: Site) -> None:
    for width, theme in SCREENS:
        with on_screen(site.browser, width, theme):
            for tab in ("", "/metrics", "/utilization", "/checkpoints"):
                site.open(f"#/e/digits-1/t/3{tab}")
                site.one("nav.tabs a[aria-current]")
                site.until(lambda: not site.all(".skeleton"), tab)
                assert site.js("return document.documentElement.scrollWidth") <= width, (tab, width)
    severe = [each for each in site.browser.get_log("browser") if each["level"] == "SEVERE"]
    expected = ("/fork", "/trials/64", "/variants/")  # refused, as the tests wanted; Chromium writes them down
    assert [each for each in severe if not any(part in each["message"] for part in expected)] == []
