"""The cost of the page's updates to the server: ten running experiments of 1,000 trials, and all their pages open.

    python bench/serve_page.py [--seconds 60]

A process writes the files of ten drivers: 8 slots each, with a validation every 5 s on each. Another sends the requests
of the list and of ten pages of experiments, each with its table, its curves and three figures on the screen. CPU time
is that of the server's process, after all figures have been made once, since a forest for the importances takes
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

EXPERIMENTS, TRIALS, SLOTS, VALIDATION_S = 10, 1_000, 8, 5.0
TOKEN = "bench"
PATHS = {"": 1.0, "/trials?sort=best_metric&limit=50": 1.5, "/curves": 1.5} | {
    f"/figures/{kind}": 4.0 for kind in ("history", "parallel", "importance")
}
"""Requests of an experiment's page, and how many intervals lie between two (see `dray/serve/page/experiment.js`)."""
LIST_S = 2.5


def write(results: Path, ready: Any) -> None:
    """Cut the experiments short, then write their ends again, as their drivers would."""
    from dray.records.metrics import MetricsLog
    from searchers.journal import Journal
    from tests.report.simulated import rows

    logs = []
    for path in sorted(results.iterdir()):
        lines = (path / "journal.jsonl").read_text().splitlines(keepends=True)
        kept = len(lines) * 9 // 10
        (path / "journal.jsonl").write_text("".join(lines[:kept]))
        logs.append((Journal(path / "journal.jsonl"), MetricsLog(path / "metrics"), itertools.cycle(lines[kept:])))
    ready.set()
    hparams = {"lr": 0.01, "optimizer": "adam", "hidden": 64}
    for count in itertools.count():
        began = time.monotonic()
        for number, (journal, metrics, rest) in enumerate(logs):
            metrics.append((count * 7 + number) % TRIALS, rows(hparams, 20 + count, time.time()))
            if (line := json.loads(next(rest)))["event"] == "reported" and not line["actions"]:
                journal.append(line)
            metrics.pack()
        time.sleep(max(0.0, VALIDATION_S / SLOTS - (time.monotonic() - began)))


paces: dict[str, float] = {}


async def ask(url: str, path: str, every: float, counts: dict[str, list[float]]) -> None:
    """One poll of a page."""
    import aiohttp

    await asyncio.sleep(LIST_S * (hash(path) % 100) / 100)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(url) as session:
        tag, pace = "", LIST_S
        while True:
            began = time.monotonic()
            async with session.get(f"/api/v1{path}", headers={**headers, "If-None-Match": tag}) as answer:
                body = await answer.read()
                assert answer.status in (200, 304), body
                tag = answer.headers.get("ETag", tag)
                kind = path.split("/")[-1].partition("?")[0] if path.count("/") > 2 else "overview"
                counts.setdefault(f"{kind} {answer.status}", []).append(time.monotonic() - began)
                if path.count("/") == 2 and body:
                    paces[path] = json.loads(body)["pace"]
            if path.count("/") > 1:
                pace = every * paces.get("/".join(path.split("/")[:3]), LIST_S)
            await asyncio.sleep(max(pace, float(answer.headers.get("Retry-After", 0))))


def look(url: str, names: list[str]) -> None:
    """The list, and a page of each experiment."""
    counts: dict[str, list[float]] = {}

    async def all_pages() -> None:
        pages = [ask(url, f"/experiments/{name}{path}", n, counts) for name in names for path, n in PATHS.items()]
        await asyncio.gather(ask(url, "/experiments", 1, counts), *pages, report())

    async def report() -> None:
        while True:
            await asyncio.sleep(20)
            for kind, times in sorted(counts.items()):
                print(
                    f"  {kind:20} {len(times):5} answers, median {1e3 * sorted(times)[len(times) // 2]:.1f} ms",
                    flush=True,
                )
            counts.clear()

    asyncio.run(all_pages())


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=150.0)
    given = parser.parse_args()
    from dray.serve.app import listening
    from tests.report.simulated import simulated
    from tests.serve.fake import FakeControl

    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-"))
        results = Path(root)
        os.environ["DRAY_HOME"] = root
        names = [f"search-{number}" for number in range(EXPERIMENTS)]
        for name in names:
            simulated(results / name, TRIALS, workers=SLOTS)
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        processes = [context.Process(target=write, args=(results, ready), daemon=True)]
        processes[0].start()
        ready.wait()
        control = FakeControl(results)
        for name in names:
            control.put(name, "RUNNING", slots=SLOTS)
        url = stack.enter_context(listening(control, results, "127.0.0.1", 8700, TOKEN))
        time.sleep(2)
        idle = measured(10)
        processes.append(context.Process(target=look, args=(url, names), daemon=True))
        processes[1].start()
        time.sleep(given.warm_up)
        print(f"idle {idle:.2%} of a core, no page open")
        print(f"all pages open: {measured(given.seconds):.2%} of a core over {given.seconds:.0f} s")
        for process in processes:
            process.terminate()
    os._exit(0)


def measured(seconds: float) -> float:
    """The share of a core that this process uses."""
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - began)


if __name__ == "__main__":
    main()
