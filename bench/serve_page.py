"""The server's page in Chromium: how soon it shows something, how soon it answers a key, and what an open page costs.

    python bench/serve_page.py [--trees OLD NEW] [--views list trials] [--rounds 3] [--seconds 60] [--save]

There are 503 experiments; `large` has 10,000 trials, and its page is measured. Cold: a server that has just started,
and a browser without a cache. With several trees, such as a git worktree of an older version, they take turns.

- first: from the request for the page to its first rows or values on the screen; whole: to the last change of the page
  before two quiet seconds, without placeholders; bytes: those received until then.
- keys: from pressing a key in the search box, or on a column's heading, to the changed rows on the screen. Keys that
  change no row, since all match, are left out.
- open: `large` and two experiments of 1,000 trials run, each with 8 slots and a validation every 5 s on each; a page is
  open at one view for a while: the CPU time of the server's process, and the heap of the page, collected.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _measure import BENCH, Paper, arguments, machine, perform, quantile, spread, verdict

SMALL, LARGE, RUNNING, SLOTS, VALIDATION_S = 500, 10_000, 2, 8, 5.0
TOKEN = "bench"
LIMIT_S = 30.0
GOALS = {"first": 1.0, "whole": 3.0, "keys": 0.050, "cpu": 0.01, "heap": 60.0}
EXPERIMENT = "#/e/large"
COMPARE = "#/compare?" + "&".join(f"t={trial}%3Alarge" for trial in (3, 17, 33, 64))
OLD = {"list": "#/", "experiment": EXPERIMENT, "trial": f"{EXPERIMENT}/t/3", "compare": COMPARE}
"""The views of a page before it had tabs. Its experiment is one column, which has all that the tabs have."""
NEW = (
    {"list": "#/", "queue": "#/queue", "overview": EXPERIMENT}
    | {tab: f"{EXPERIMENT}/{tab}" for tab in ("trials", "curves", "analysis", "failures", "logs", "code")}
    | {"trial": f"{EXPERIMENT}/t/3", "trial's log": f"{EXPERIMENT}/t/3/logs", "compare": COMPARE}
)
SAME = {"trials": "experiment"}  # what a view was before
TALL = {"experiment": 5600, "analysis": 4000, "trial": 2600, "compare": 2600}
"""Heights of the window at which all of a view is on the screen, for views that load the rest when it comes there."""
WORDS = {
    "list": ["sweep-12", "running-", "sweep-4 completed", "4 sweep-3", "large", "77", "sweep-301", "25 sweep"],
    "trials": ["adam", "lr<0.003", "77", "sgd hidden>200", "lr>0.01 batches<100", "best<0.5", "512"],
}
FIRST = ", ".join(f"main {each}" for each in (
    "tbody tr a[href]", ".tiles b", "td", "canvas", ".main-svg", "pre", "dd", ".said", ".empty"
))  # fmt: skip
WAITING = ".skeleton, tr.waiting, [aria-busy=true]"

WATCH = """
const fetched = window.fetch;
const watch = window.watch = { changed: 0, first: null, pending: 0, key: 0, rows: 0 };
const drawn = then => requestAnimationFrame(() => setTimeout(() => then(performance.now())));
window.fetch = async (...given) => {
  watch.pending += 1;
  try {
    return await fetched(...given);
  } finally {
    watch.pending -= 1;
  }
};
watch.busy = () => watch.pending > 0 || document.querySelector(waiting) !== null
  || /Reading …|still to be read/.test(document.getElementById("main").textContent);
new MutationObserver(changes => {
  watch.changed = performance.now();
  const element = ({ target }) => target.nodeType === 1 ? target : target.parentElement;
  watch.last = element(changes.at(-1))?.outerHTML.slice(0, 200);
  const shows = it => it.matches("canvas, .main-svg") || it.textContent.trim();
  if (watch.first === null && [...document.querySelectorAll(first)].some(shows)) {
    watch.first = 0;
    drawn(at => { watch.first = at; });
  }
  if (changes.some(each => element(each)?.closest("tbody"))) {
    const key = watch.key;
    drawn(at => { watch.rows = key === watch.key ? at : watch.rows; });
  }
}).observe(document, { subtree: true, childList: true, characterData: true });
addEventListener("keydown", () => { [watch.key, watch.rows] = [performance.now(), 0]; }, true);
"""


# ------------------------------------------------------------------------------------------------------- experiments
def make(results: Path) -> None:
    """Write the experiments' directories; they are kept from run to run."""
    from tests.report.simulated import simulated

    if (results / "done").exists():
        return
    shutil.rmtree(results, ignore_errors=True)
    large = simulated(results / "large", LARGE, workers=64, failures=0.0005)
    for rank in (0, 1):
        log = large.trial(3) / "logs" / f"rank_{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"2026-11-23T10:00:00.000Z batch {n}: loss {1 / (n + 1):.5f}\n" for n in range(20_000)))
    kinds = [simulated(results / f"sweep-{n:03}", 8 << n % 4, failures=0.01 * (n % 2)).path for n in range(5)]
    for number in range(len(kinds), SMALL):
        shutil.copytree(kinds[number % len(kinds)], results / f"sweep-{number:03}")
    for number in range(RUNNING):
        simulated(results / f"running-{number}", 1_000, workers=SLOTS)
    (results / "done").touch()


def write(paths: Sequence[Path], ready: Any) -> None:
    """Cut experiments short, then write their ends again, as their drivers would."""
    from dray.records.metrics import MetricsLog
    from searchers.journal import Journal
    from tests.report.simulated import rows

    logs = []
    for path in paths:
        lines = (path / "journal.jsonl").read_text().splitlines(keepends=True)
        kept = len(lines) * 9 // 10
        (path / "journal.jsonl").write_text("".join(lines[:kept]))
        began = {record["trial"] for record in map(json.loads, lines[:kept]) if record["event"] == "started"}
        rest = [record for record in map(json.loads, lines[kept:]) if record["event"] == "reported"]
        again = itertools.cycle([each for each in rest if each["trial"] in began and not each["actions"]])
        logs.append((Journal(path / "journal.jsonl"), MetricsLog(path / "metrics"), again))
    ready.set()
    hparams = {"lr": 0.01, "optimizer": "adam", "hidden": 64}
    for count in itertools.count():
        began = time.monotonic()
        for number, (journal, metrics, again) in enumerate(logs):
            metrics.append((count * 7 + number) % 1_000, rows(hparams, 20 + count, time.time()))
            journal.append(next(again))
            metrics.pack()
        time.sleep(max(0.0, VALIDATION_S / SLOTS - (time.monotonic() - began)))


# ------------------------------------------------------------------------------------------------------------ server
def serve(results: Path, port: int) -> None:
    """The server of the tree that this process imports, with a control that runs nothing."""
    from dray.serve.app import listening
    from dray.serve.tokens import Tokens
    from tests.serve.fake import FakeControl

    control = FakeControl(results)
    for path in results.iterdir():
        if (path / "experiment.yaml").exists():
            runs = (path / "journal.jsonl.lock").exists()
            control.put(path.name, "RUNNING" if runs else "COMPLETED", slots=float(SLOTS * runs))
    with listening(control, results, "127.0.0.1", port, Tokens(results, TOKEN)) as url:
        print(url, flush=True)
        time.sleep(1e6)


class Server:
    """A process of `serve`."""

    def __init__(self, tree: Path, results: Path, port: int) -> None:
        command = [sys.executable, str(BENCH / "serve_page.py"), "--serve", str(results), str(port)]
        environment = os.environ | {"PYTHONPATH": str(tree), "DRAY_HOME": str(results)}
        self.process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        connection.request("GET", f"/login?token={TOKEN}")
        self.cookie = dict([(connection.getresponse().getheader("Set-Cookie") or "").split(";")[0].split("=", 1)])

    def cpu_s(self) -> float:
        """CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


# ----------------------------------------------------------------------------------------------------------- browser
class Page:
    """A page in Chromium, watched by `WATCH`."""

    def __init__(self, browser: Any, server: Server) -> None:
        self.browser, self.server, self.do = browser, server, browser.execute_cdp_cmd

    def load(self, place: str, height: int = 900) -> tuple[float, float, int]:
        """Load it without a cache: seconds to the first rows and to the whole page, and the bytes received."""
        self.browser.get("about:blank")
        size = {"width": 1400, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", size)
        self.do("Network.clearBrowserCache", {})
        for name, value in self.server.cookie.items():
            self.do("Network.setCookie", {"name": name, "value": value, "url": self.server.url})
        self.do("Page.navigate", {"url": f"{self.server.url}/{place}"})
        first, changed = self.until("return [watch.first, watch.changed]")
        sizes = "return performance.getEntries().reduce((sum, it) => sum + (it.transferSize ?? 0), 0)"
        return (first or 1e3 * LIMIT_S) / 1e3, max(first or 0, changed) / 1e3, self.js(sizes)

    def go(self, place: str) -> None:
        """Go there as a link does."""
        self.js("location.hash = arguments[0]", place)

    def until(self, found: str = "", *, quiet_ms: int = 2000) -> Any:
        """Wait until nothing has changed for a while."""
        quiet = f"return window.watch?.first && performance.now() - watch.changed > {quiet_ms} && !watch.busy()"
        deadline = time.monotonic() + LIMIT_S
        while not self.js(quiet):
            if time.monotonic() > deadline:
                why = self.js("return [watch.first, watch.busy(), watch.last]")
                print(f"{self.browser.current_url} is never quiet: {why}", flush=True)
                break
            time.sleep(0.05)
        return self.js(found) if found else None

    def press(self, key: str, code: str = "", text: str | None = None) -> None:
        """Press a key, as a person does."""
        names = {
            "key": key,
            "code": code or f"Key{key.upper()}",
            "windowsVirtualKeyCode": {"Enter": 13, "Backspace": 8}.get(key, 0),
        }
        text = {"Enter": "\r", "Backspace": "", "Escape": ""}.get(key, key) if text is None else text
        self.do("Input.dispatchKeyEvent", {"type": "keyDown", **names, **({"text": text} if text else {})})
        self.do("Input.dispatchKeyEvent", {"type": "keyUp", **names})

    def answer(self, key: str) -> list[float]:
        """Seconds from a key to the rows that it changes; [] if it changes none."""
        self.press(key)
        time.sleep(0.15)
        self.until(quiet_ms=250)
        pressed, rows = self.js("return [watch.key, watch.rows]")
        return [(rows - pressed) / 1e3] if rows else []

    def search(self, words: Sequence[str]) -> list[float]:
        """Type words into the search box, and delete them."""
        self.js("document.querySelector('main input[type=search]').focus()")
        found = []
        for word in words:
            for key in (*word, *["Backspace"] * len(word)):
                found += self.answer(key)
        return found

    def sort(self) -> list[float]:
        """Press Enter on each heading, twice."""
        found = []
        for place in range(self.js("return document.querySelectorAll('main th button.sort').length")):
            for _ in range(2):
                self.js("document.querySelectorAll('main th button.sort')[arguments[0]].focus()", place)
                found += self.answer("Enter")
        return found

    def heap_mb(self) -> float:
        for _ in range(3):
            self.do("HeapProfiler.collectGarbage", {})
        sizes = ("usedSize", "embedderHeapUsedSize", "backingStorageSize")
        return sum(float(size) for name, size in self.do("Runtime.getHeapUsage", {}).items() if name in sizes) / 1e6

    def js(self, script: str, *given: object) -> Any:
        return self.browser.execute_script(script, *given)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--use-angle=swiftshader"):
        options.add_argument(argument)
    options.add_argument("--enable-unsafe-swiftshader")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {"source": f"{{ const [first, waiting] = {json.dumps([FIRST, WAITING])};\n{WATCH} }}"},
    )
    browser.execute_cdp_cmd("Network.enable", {})
    try:
        yield browser
    finally:
        browser.quit()


# -------------------------------------------------------------------------------------------------------------- main
def views_of(tree: Path, wanted: Sequence[str]) -> dict[str, str]:
    views = NEW if (tree / "dray" / "serve" / "page" / "lib").exists() else OLD
    return {
        name: place for name, place in views.items() if not wanted or name in wanted or name in map(SAME.get, wanted)
    }


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    results, trees = BENCH.parent / "build" / "serve_page", [path.resolve() for path in options.trees]
    make(results)
    about = (__doc__ or "").partition("    python")
    paper.say(f"{machine()}\n\n{about[0].strip()}\n\n{about[2].partition(chr(10) * 2)[2].strip()}")
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)  # by tree, view, and what is measured
    for _ in range(options.rounds):
        for tree in trees:
            with chromium() as browser:
                for view, place in views_of(tree, options.views).items():
                    with Server(tree, results, options.port) as server:
                        page = Page(browser, server)
                        for what, value in zip(
                            ("first", "whole", "bytes"), page.load(place, TALL.get(view, 900)), strict=True
                        ):
                            found[tree.name, view, what].append(value)
                        print(
                            tree.name,
                            view,
                            *(f"{found[tree.name, view, it][-1]:.2f}" for it in ("first", "whole", "bytes")),
                            flush=True,
                        )
                        if view in ("list", "trials", "experiment"):
                            page.load(place)
                            found[tree.name, view, "search"] += page.search(
                                WORDS["list" if view == "list" else "trials"]
                            )
                            found[tree.name, view, "sort"] += page.sort()
    for tree in trees if options.seconds else ():
        running = directory / f"running-{tree.name}"
        shutil.copytree(results, running)
        context = multiprocessing.get_context("spawn")
        paths, ready = [running / "large", *(running / f"running-{n}" for n in range(RUNNING))], context.Event()
        writer = context.Process(target=write, args=(paths, ready), daemon=True)
        writer.start()
        ready.wait()
        with Server(tree, running, options.port) as server, chromium() as browser:
            page, views = Page(browser, server), views_of(tree, options.views)
            page.load("#/")
            for view, place in views.items():
                page.go(place)
                time.sleep(10)
                before, began = server.cpu_s(), time.monotonic()
                time.sleep(options.seconds)
                found[tree.name, view, "cpu"].append((server.cpu_s() - before) / (time.monotonic() - began))
                found[tree.name, view, "heap"].append(page.heap_mb())
                print(tree.name, view, found[tree.name, view, "cpu"], found[tree.name, view, "heap"], flush=True)
            for place in [*views.values()] * 2:
                page.go(place)
                time.sleep(3)
            found[tree.name, "all", "heap"].append(page.heap_mb())
        writer.terminate()
        writer.join()
    tell(paper, [tree.name for tree in trees], found)


def tell(paper: Paper, trees: Sequence[str], found: dict[tuple[str, str, str], list[float]]) -> None:
    """The figures of the last tree, and of the others beside them."""
    views = list(dict.fromkeys(view for _, view, _ in found))

    def table(title: str, whats: Sequence[tuple[str, str, Any]]) -> None:
        paper.say(f"\n## {title}\n")
        rows = []
        for tree in trees:
            for view in views:
                if any(found.get((tree, view, what)) for what, _, _ in whats):
                    rows.append([tree, view, *(show(found[tree, view, what]) for what, _, show in whats)])
        paper.table(["version", "view", *(label for _, label, _ in whats)], rows)

    table(
        "Cold",
        [
            ("first", f"first rows, goal {GOALS['first']:g} s", lambda of: spread(of, "s")),
            ("whole", f"whole, goal {GOALS['whole']:g} s", lambda of: spread(of, "s")),
            ("bytes", "received", lambda of: f"{quantile(of, 0.5) / 1e3:,.0f} kB"),
        ],
    )
    keys = lambda of: f"{1e3 * quantile(of, 0.5):.0f} / {1e3 * quantile(of, 0.95):.0f} ms of {len(of)}" if of else "-"  # noqa: E731
    table(
        f"Keys: median / 95th percentile, goal {1e3 * GOALS['keys']:.0f} ms",
        [("search", "search", keys), ("sort", "sort", keys)],
    )
    table(
        "Open",
        [
            ("cpu", f"of a core of the server, goal {GOALS['cpu']:.0%}", lambda of: f"{max(of):.2%}" if of else "-"),
            ("heap", f"heap, goal {GOALS['heap']:g} MB", lambda of: f"{max(of):.1f} MB" if of else "-"),
        ],
    )
    paper.say()
    last = trees[-1]
    for what, limit in (
        ("first", "first"),
        ("whole", "whole"),
        ("search", "keys"),
        ("sort", "keys"),
        ("cpu", "cpu"),
        ("heap", "heap"),
    ):
        share = 0.95 if limit == "keys" else 0.5
        missed = [
            view for view in views if (of := found.get((last, view, what))) and quantile(of, share) > GOALS[limit]
        ]
        paper.say(f"{what}: {verdict(not missed)}{' at ' + ', '.join(missed) if missed else ''}.")
    for view in views if len(trees) > 1 else ():
        before, ratios = SAME.get(view, view), []
        for what in ("first", "whole", "search", "sort", "cpu", "heap"):
            old, new = found.get((trees[0], before, what)), found.get((last, view, what))
            if old and new and quantile(new, 0.5):  # CPU time has steps of 10 ms
                ratios.append(f"{what} {quantile(old, 0.5) / quantile(new, 0.5):.1f}x")
        if ratios:
            paper.say(f"{view}, {trees[0]} / {last}: {', '.join(ratios)}.")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]), int(sys.argv[3]))
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--trees", nargs="+", type=Path, default=[BENCH.parent], help="checkouts of dray, the oldest first"
    )
    parser.add_argument("--views", nargs="+", default=[], help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="of cold loads")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for which a page is open at each view; 0: not at all"
    )
    parser.add_argument("--port", type=int, default=8700)
    perform(measure, parser.parse_args(), name="page", title="The server's page")


if __name__ == "__main__":
    main()
