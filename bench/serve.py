"""The gains and costs of a server: starts, shares of slots, a higher priority, five hundred experiments.

    python bench/serve.py [--parts start shares priority many] [--rounds 5] [--minutes 10] [--experiments 500]
                          [--save]

``start``: from the start of the process `dray experiment create` to the first batch, with a server (unchanged code;
another `model_def.py` each time) and without, in turn. ``shares``: three experiments with weights 1, 1 and 2, always
with waiting trials, and the share of slot time that is leased to a trial. ``priority``: the time until the trials of an
experiment with a higher priority have the slots of another. ``many``: one experiment after another; the server's
memory, and the processes that stay. The page's cost: see `serve_page.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from _measure import BENCH, Paper, machine, quantile, spread, verdict

sys.path.insert(0, str(BENCH.parent))
from dray.serve.client import Server

PARTS = ("start", "shares", "priority", "many")
UNCHANGED_S, CHANGED_S, YIELD_S, GROWTH_MB, BUSY = 1.0, 1.5, 2.0, 50.0, 0.95
CREATE = [sys.executable, "-m", "dray.cli", "experiment", "create"]


class Site:
    """A results directory, a model directory, and a server on them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.results, self.code = directory, directory / "results", directory / "code"
        self.results.mkdir()
        self.code.mkdir()
        shutil.copy(BENCH / "model" / "served.py", self.code / "model_def.py")
        self.environment = {**os.environ, "DRAY_HOME": str(self.results), "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment.pop("RAY_ADDRESS", None)
        with (directory / "server.txt").open("wb") as log:
            serve = [sys.executable, "-m", "dray.cli", "serve", "--port", "18300"]
            self.process = subprocess.Popen(serve, env=self.environment, stdout=log, stderr=log)
        self.wait_for(lambda: (self.results / ".server.json").exists())

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """The first true value of the condition."""
        while not (value := condition()):
            if self.process.poll() is not None:
                raise SystemExit((self.directory / "server.txt").read_text())
            time.sleep(0.02)
        return value

    def config(self, name: str, *, trials: int = 1, batches: int = 20, pause_s: float = 0.0, **resources: Any) -> Path:
        """The config of a random search, whose trials note their batches in a file of this name."""
        file = self.directory / f"{name}.yaml"
        config = {
            "name": name,
            "entrypoint": "model_def:ServedTrial",
            "hyperparameters": {
                "global_batch_size": 8,
                "pause_s": pause_s,
                "file": str(self.directory / f"{name}.batches"),
                "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
            },
            "searcher": {
                "name": "random",
                "metric": "error",
                "max_length": {"batches": batches},
                "max_trials": trials,
            },
            "resources": {"slot": "cpu", **resources},
        }
        file.write_text(yaml.safe_dump(config))
        return file

    def batches(self, name: str) -> list[dict[str, Any]]:
        """The batches that an experiment's trials have recorded."""
        file = self.directory / f"{name}.batches"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def create(self, config: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start the command."""
        with (self.directory / "client.txt").open("ab") as log:
            return subprocess.Popen(
                [*CREATE, str(config), str(self.code), *options], env=self.environment, stdout=log, stderr=log
            )

    def states(self) -> dict[str, dict[str, Any]]:
        """The states of submitted experiments, by the config's name."""
        return {each["title"]: each for each in _server(self).experiments() if each["submitted"]}

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(120)


# ---------------------------------------------------------------------------------------------------------------- parts
def start(site: Site, paper: Paper, rounds: int) -> None:
    """The time from the command to the first batch."""
    took: dict[str, list[float]] = {"unchanged": [], "changed": [], "without": []}
    _first_batch(site, "warm-up", "--detach")
    for number in range(rounds):
        for way in took:
            if way == "changed":
                with (site.code / "model_def.py").open("a") as file:
                    file.write(f"\nCHANGED = {number}\n")
            options = ["--no-server"] if way == "without" else ["--detach"]
            took[way].append(_first_batch(site, f"{way}-{number}", *options))
    paper.say("\n## From the command to the first batch\n")
    rows = []
    for way, goal in (("unchanged", UNCHANGED_S), ("changed", CHANGED_S), ("without", None)):
        reached = "" if goal is None else verdict(quantile(took[way], 0.5) <= goal)
        label = {"unchanged": "server, the same code", "changed": "server, other code", "without": "without a server"}
        rows.append([label[way], spread(took[way], "s"), "" if goal is None else f"{goal:g} s", reached])
    paper.table(["", "median (range)", "goal", ""], rows)


def _first_batch(site: Site, name: str, *options: str) -> float:
    """Seconds from the start of the process to the first batch; returns once the experiment has ended."""
    config = site.config(name)
    began = time.time()
    process = site.create(config, *options)
    site.wait_for(lambda: site.batches(name))
    code = process.wait()
    assert code == 0, (site.directory / "client.txt").read_text()
    if "--no-server" not in options:
        site.wait_for(lambda: site.states()[name]["state"] == "COMPLETED")
    time.sleep(3)  # a person reads, and changes a line
    return float(site.batches(name)[0]["time"]) - began


def shares(site: Site, paper: Paper, minutes: float) -> None:
    """Three experiments share the slots in proportion to their weights."""
    weights = {"weight-1": 1, "weight-one": 1, "weight-2": 2}
    for name, weight in weights.items():
        code = site.create(site.config(name, trials=100_000, batches=20, pause_s=0.1, weight=weight), "--detach").wait()
        assert code == 0
    site.wait_for(lambda: all(site.batches(name) for name in weights))
    since = time.time()
    time.sleep(minutes * 60)
    until = time.time()
    trained = {
        name: sum(each["took"] for each in site.batches(name) if since <= each["time"] < until) for name in weights
    }
    slots = _server(site).status().slots
    for name in weights:
        _verb(site, name, "stop")  # so that the ends of leases are recorded
    for name in weights:
        site.wait_for(lambda name=name: site.states()[name]["state"] == "STOPPED")
    leased = sum(_leased_s(Path(site.states()[name]["path"]), since, until) for name in weights)
    busy = leased / (slots * (until - since))
    paper.say(f"\n## Shares of {slots:g} slots in {minutes:g} minutes\n")
    total = sum(trained.values())
    due = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    group_s = 20 * 0.1  # a trial's
    rows = []
    for name, weight in weights.items():
        behind = abs(trained[name] / total - due[name]) * total / group_s
        row = [f"weight {weight}", f"{trained[name] / total:.1%}", f"{due[name]:.1%}"]
        rows.append([*row, f"{behind:.1f} trials off", verdict(behind <= (until - since) / group_s)])
    paper.table(["", "of the trained time", "due", "", ""], rows)
    paper.say(
        f"\nLeased to a trial: {busy:.1%} of the slots' time, while trials waited; goal {BUSY:.0%}: "
        f"{verdict(busy >= BUSY)}."
    )
    paper.say(f"Trials slept through batches in {total / (slots * (until - since)):.1%} of it.")


def _leased_s(path: Path, since: float, until: float) -> float:
    """The slot-seconds of an experiment's trials within a period, by its timeline."""
    from dray.records.metrics import read_system
    from dray.records.timeline import read_timeline

    table = read_timeline(path / "metrics", read_system(path / "metrics"))
    leased = table[table["trial_id"] >= 0]
    seconds = leased["end"].clip(since, until) - leased["start"].clip(since, until)
    return float((seconds * leased["slots"]).sum())


def _server(site: Site) -> Server:
    server = Server.find(site.results)
    assert server is not None
    return server


def _verb(site: Site, name: str, verb: str) -> None:
    getattr(_server(site), verb)(site.states()[name]["name"])


def priority(site: Site, paper: Paper, rounds: int) -> None:
    """The time that an experiment with a higher priority waits for the slots of trials that train."""
    took = []
    for number in range(rounds):
        low, high = f"low-{number}", f"high-{number}"
        site.create(site.config(low, trials=8, batches=10_000, pause_s=0.1), "--detach").wait()
        site.wait_for(lambda name=low: len(site.batches(name)) > 40)
        began = time.time()
        site.create(site.config(high, trials=2, pause_s=0.1, priority=1), "--detach").wait()
        submitted = time.time()
        site.wait_for(lambda name=high: len({each["pid"] for each in site.batches(name)}) == 2)
        first = min(each["time"] for each in site.batches(high))
        took.append(max(0.0, first - submitted))
        paper.say(f"submitted in {submitted - began:.2f} s, first batch {first - began:.2f} s after the command")
        site.wait_for(lambda name=high: site.states()[name]["state"] == "COMPLETED")
        _verb(site, low, "kill")
        site.wait_for(lambda name=low: site.states()[name]["state"] == "STOPPED")
    paper.say("\n## From the submission with a higher priority to the first slot\n")
    paper.say(f"{spread(took, 's')}; goal {YIELD_S:g} s and the time to save: {verdict(max(took) <= YIELD_S)}")


def many(site: Site, paper: Paper, experiments: int) -> None:
    """One experiment after another leaves nothing behind."""
    memory, processes = [], []
    began = time.monotonic()
    for number in range(experiments):
        name = f"many-{number}"
        assert site.create(site.config(name), "--detach").wait() == 0
        site.wait_for(lambda name=name: site.batches(name))
        if number % 25 == 24 or number == 9:
            site.wait_for(lambda name=name: site.states()[name]["state"] == "COMPLETED")
            time.sleep(2)
            memory.append(_rss_mb(site.process.pid))
            processes.append(_family(site.process.pid))
            print(f"{number + 1}: {memory[-1]:.0f} MB, {processes[-1]} processes", flush=True)
    each = (time.monotonic() - began) / experiments
    growth = memory[-1] - memory[0]
    paper.say(f"\n## {experiments} experiments, one after another\n")
    paper.say(
        f"{each:.2f} s each. The server's memory: {memory[0]:.0f} MB after 10, {memory[-1]:.0f} MB at the end, "
        f"{growth:+.0f} MB; goal {GROWTH_MB:g} MB: {verdict(growth <= GROWTH_MB)}. Its processes: {processes[0]} after "
        f"10, {processes[-1]} at the end: {verdict(processes[-1] <= processes[0])}."
    )


def _rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def _family(pid: int) -> int:
    """The number of descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return len(family) - 1


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--experiments", type=int, default=500)
    parser.add_argument("--save", action="store_true", help="write bench/results/serve.md")
    options = parser.parse_args()
    paper = Paper()
    paper.say(machine())
    with tempfile.TemporaryDirectory(prefix="dray-serve-") as scratch:
        site = Site(Path(scratch))
        try:
            for part in options.parts:
                match part:
                    case "start":
                        start(site, paper, options.rounds)
                    case "shares":
                        shares(site, paper, options.minutes)
                    case "priority":
                        priority(site, paper, options.rounds)
                    case "many":
                        many(site, paper, options.experiments)
        finally:
            site.close()
    if options.save:
        paper.save("serve", "A server: starts, shares, priorities, and many experiments")


if __name__ == "__main__":
    main()
