"""A mechanical researcher: sixty patches of examples/gpt, through ``dray mcp``, and one by one in a plain script.

    python bench/laboratory.py [--parts race plain overhead many] [--quick] [--save] [--keep DIRECTORY]

``race``: all patches as trials of one experiment with early stopping; four proposals are under way. ``plain``: the same
list, each patch trained to the end by ``python train.py`` in a directory of its own, with a time limit. ``overhead``:
proposals that work, two at a time, and the time of each beyond its training. ``many``: 500 proposals; the memory of the
server's processes. ``--quick``: every third patch, 60 proposals in ``many``; within five minutes. The patches are in
`laboratory_patches.py`, in an order drawn once. All decisions are replayed from the journals at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from _agent import Agent, agent, environment, serving
from _measure import Paper, arguments, machine, perform, quantile
from laboratory_patches import GPT, KINDS, Patch, patches

from dray.config.load import stored_config
from dray.config.search import build_search
from dray.records.directory import ExperimentDirectory
from searchers.journal import Journal

PARTS = ("race", "plain", "overhead", "many")
UNDER_WAY = 4  # proposals at a time in the race
BATCHES, QUICK_BATCHES = 512, 192
HANG_S, PLAIN_LIMIT = 10, 3  # the plain limit is a multiple of the time of the unchanged code
GOAL_S = 1.5
HPARAMS = {
    "global_batch_size": 16,
    "aggregation_frequency": 1,
    "block": 32,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "dropout": 0.0,
    "lr": 3.0e-3,
    "warm_up_steps": 10,
}


@dataclass
class Outcome:
    """What became of a proposal.

    Attributes:
        end: refused, or the trial's state, or of the plain script: completed, failed, timeout.
        at_s: seconds from the start of the part to the end.
        took_s: seconds from the proposal to the end.
        trained_s: training and validating, as far as the trial has reported them.
    """

    patch: Patch
    end: str
    at_s: float
    took_s: float
    loss: float | None = None
    trial: int | None = None
    batches: int = 0
    trained_s: float = 0.0
    why: str = ""


@dataclass
class Laboratory:
    """An agent with its server, and what it has measured."""

    ask: Agent
    home: Path
    server_pid: int
    paper: Paper
    quick: bool
    experiments: list[str] = field(default_factory=list)

    @property
    def batches(self) -> int:
        return QUICK_BATCHES if self.quick else BATCHES

    async def submit(self, name: str, *, batches: int, hparams: dict[str, Any] | None = None) -> str:
        """Submit the unchanged code as an experiment with one trial, and return its number."""
        config = {
            "name": name,
            "entrypoint": "model_def:GPTTrial",
            "hyperparameters": {**HPARAMS, **(hparams or {})},
            "searcher": {
                "name": "asha",
                "metric": "validation_loss",
                "max_length": {"batches": batches},
                "max_trials": 1,
                "divisor": 4,
                "num_rungs": 3,
            },
            "budget": {"slot_hours": 2},
            "max_restarts": 0,
            "hang_timeout_s": HANG_S,
            "reproducibility": {"experiment_seed": 7},
        }
        sent = await self.answer("submit", config=yaml.safe_dump(config), directory=str(GPT))
        self.experiments.append(sent["name"])
        return str(sent["experiment"])

    async def answer(self, tool: str, **given: Any) -> dict[str, Any]:
        done = await self.ask(tool, **given)
        if done.is_error:
            raise SystemExit(f"{tool}: {done.text}")
        found: dict[str, Any] = json.loads(done.text)
        return found

    async def propose(self, experiment: str, patch: Patch | None, began: float, **hparams: Any) -> Outcome:
        """Add a trial, and wait until it has ended."""
        started = time.monotonic()
        given = {"patch": patch.diff()} if patch else {}
        done = await self.ask("add_trial", experiment=experiment, hparams=hparams, **given)
        if done.is_error:
            now = time.monotonic()
            return Outcome(patch or UNCHANGED, "refused", now - began, now - started, why=done.text)
        trial = json.loads(done.text)["trial"]
        assert trial is not None, "the experiment has ended"
        while not (seen := await self.answer("wait", experiment=experiment, trial=trial))["ended"]:
            pass
        now = time.monotonic()
        return Outcome(patch or UNCHANGED, seen["trial_state"], now - began, now - started, trial=trial)

    async def fill(self, experiment: str, outcomes: Sequence[Outcome]) -> None:
        """Read what the trials reached."""
        server = dray_server(self.home)
        name = server.named(experiment)
        for one in outcomes:
            if one.trial is None:
                continue
            row = server.read(name, f"trials/{one.trial}")
            one.batches, one.loss = row["batches"], row["best_metric"]
            one.why = next((each["error"] or "" for each in row["failures"]), "").partition("\n")[0]
            series = server.read(name, f"trials/{one.trial}/metrics")["series"]
            parts = [each for each in series if each["name"] in ("training_s", "validating_s")]
            one.trained_s = sum(sum(each["values"]) for each in parts)


UNCHANGED = Patch(name="unchanged", kind="works", file="model_def.py", old="", new="")


def dray_server(home: Path) -> Any:
    from dray.serve.client import Server

    server = Server.find(home)
    assert server is not None
    return server


async def side_by_side(tasks: Sequence[Callable[[], Coroutine[Any, Any, Outcome]]], most: int) -> list[Outcome]:
    """Run tasks in their order, at most some at a time."""
    left, done = list(enumerate(tasks)), dict[int, Outcome]()

    async def one_after_another() -> None:
        while left:
            number, task = left.pop(0)
            done[number] = await task()

    await asyncio.gather(*(one_after_another() for _ in range(most)))
    return [done[number] for number in range(len(tasks))]


# ---------------------------------------------------------------------------------------------------------------- parts
async def race(lab: Laboratory, chosen: Sequence[Patch]) -> list[Outcome]:
    """All patches as trials of one experiment."""
    began = time.monotonic()
    one = await lab.submit("laboratory", batches=lab.batches)
    await lab.answer("wait", experiment=one, until="event")
    tasks = [lambda patch=patch: lab.propose(one, patch, began) for patch in chosen]
    outcomes = await side_by_side(tasks, UNDER_WAY)
    wall_s = time.monotonic() - began
    await lab.fill(one, outcomes)
    budget = (await lab.answer("get_budget", experiment=one))["budget"]
    slot_s = 3600 * budget["slot_hours"]["spent"]
    lab.paper.say(f"\n## The race\n\n{len(chosen)} patches in {wall_s:.0f} s; {slot_s:.0f} slot-seconds.\n")
    report(lab.paper, outcomes)
    return outcomes


def plain(directory: Path, chosen: Sequence[Patch], paper: Paper, batches: int) -> list[Outcome]:
    """The same list by a script: one after another, each to the end."""
    limit_s = PLAIN_LIMIT * train(directory / "unchanged", None, batches, 600.0).took_s
    began, outcomes = time.monotonic(), []
    for number, patch in enumerate(chosen):
        outcomes.append(train(directory / str(number), patch, batches, limit_s))
        outcomes[-1].at_s = time.monotonic() - began
    took = f"{len(chosen)} patches in {time.monotonic() - began:.0f} s, with a limit of {limit_s:.0f} s for each"
    paper.say(f"\n## A plain script\n\n{took}.\n")
    report(paper, outcomes)
    return outcomes


def train(directory: Path, patch: Patch | None, batches: int, limit_s: float) -> Outcome:
    """Train a copy of the code with a change, in a process of its own."""
    code = directory / "code"
    shutil.copytree(GPT, code, ignore=shutil.ignore_patterns("__pycache__"))
    config = yaml.safe_load((GPT / "const.yaml").read_text())
    config["hyperparameters"] = HPARAMS
    (code / "const.yaml").write_text(yaml.safe_dump(config))
    if patch:
        (code / patch.file).write_text(patch.changed())
    command = [sys.executable, "train.py", "--batches", str(batches), "--characters", "0"]
    began = time.monotonic()
    with (directory / "output.txt").open("wb") as output:
        home = environment(directory / "results")
        process = subprocess.Popen(command, cwd=code, env=home, stdout=output, stderr=output, start_new_session=True)
        try:
            end = "COMPLETED" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            end = "timeout"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took_s = time.monotonic() - began
    rows = [json.loads(line) for file in directory.glob("results/local/*/metrics.jsonl") for line in file.open()]
    losses = [
        row["validation"]["validation_loss"] for row in rows if "validation_loss" in (row.get("validation") or {})
    ]
    return Outcome(
        patch or UNCHANGED, end, 0.0, took_s, loss=min(losses, default=None), batches=batches * (end == "COMPLETED")
    )


async def overhead(lab: Laboratory, chosen: Sequence[Patch]) -> None:
    """The time of proposals beyond their training."""
    works = [patch for patch in chosen if patch.kind == "works"][: 6 if lab.quick else 16]
    one = await lab.submit("overhead", batches=lab.batches)
    began = time.monotonic()
    outcomes = await side_by_side([lambda patch=patch: lab.propose(one, patch, began) for patch in works], 2)
    await lab.fill(one, outcomes)
    wall_s = time.monotonic() - began
    beyond = [each.took_s - each.trained_s for each in outcomes]
    of_all = (wall_s - sum(each.trained_s for each in outcomes) / 2) / len(outcomes)
    reached = "reached" if quantile(beyond, 0.5) <= GOAL_S else "not reached"
    lab.paper.say(
        f"\n## Overhead\n\n{len(works)} patches that work, two at a time on two slots: from the call of add_trial to "
        f"the answer that the trial has ended, without its training and validation, median "
        f"{quantile(beyond, 0.5):.2f} s, least {min(beyond):.2f} s, most {max(beyond):.2f} s "
        f"(goal {GOAL_S:g} s: {reached}). In all, {of_all:.2f} s of wall time a proposal beyond training on two slots."
    )


async def many(lab: Laboratory, chosen: Sequence[Patch]) -> None:
    """Hundreds of proposals; the memory of the server's processes."""
    count = 60 if lab.quick else 500
    works = [patch for patch in chosen if patch.kind == "works"][:10]
    one = await lab.submit("many", batches=4, hparams={"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2}})
    began, rows = time.monotonic(), []
    for start in range(0, count, count // 5):
        tasks = [
            lambda number=number: lab.propose(one, works[number % 10], began, lr=10 ** (-4 + 2 * number / count))
            for number in range(start, start + count // 5)
        ]
        outcomes = await side_by_side(tasks, UNDER_WAY)
        ends = Counter(each.end for each in outcomes)
        memory = rss_mb(lab.server_pid)
        server = [f"{memory[lab.server_pid]:.0f}", f"{sum(memory.values()):.0f}", str(len(memory))]
        took = f"{(time.monotonic() - began) / (start + count // 5):.2f}"
        rows.append([str(start + count // 5), took, *server, ", ".join(f"{n} {end}" for end, n in ends.items())])
    lab.paper.say(
        f"\n## {count} proposals\n\nTen patches with {count} learning rates, 4 batches each, {UNDER_WAY} at a time.\n"
    )
    head = ["proposals", "seconds each", "server, MiB", "with its processes, MiB", "processes", "trials of this row"]
    lab.paper.table(head, rows)


def rss_mb(root: int) -> dict[int, float]:
    """The resident memory of a process and its descendants, in MiB, without Ray's."""
    import psutil

    found = {}
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            if "ray" not in process.name() and "raylet" not in " ".join(process.cmdline()):
                found[process.pid] = process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return found


# -------------------------------------------------------------------------------------------------------------- figures
def report(paper: Paper, outcomes: Sequence[Outcome]) -> None:
    """A table of ends by kind, with the time that they took."""
    rows = []
    for kind in KINDS:
        mine = [each for each in outcomes if each.patch.kind == kind]
        ends = Counter(each.end for each in mine)
        text = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        rows.append(
            [
                kind,
                str(len(mine)),
                text,
                f"{sum(each.took_s for each in mine):.0f}",
                str(sum(each.batches for each in mine)),
            ]
        )
    paper.table(["patch", "number", "ends", "seconds from proposal to end", "batches"], rows)


def compare(paper: Paper, raced: Sequence[Outcome], scripted: Sequence[Outcome]) -> None:
    """The best of both, and when it was known. The script's runs have the whole machine, one at a time."""
    paper.say("\n## Both\n")
    truth = {each.patch.name: each.loss for each in scripted if each.end == "COMPLETED" and each.loss is not None}
    order = sorted(truth, key=lambda name: truth[name])
    rows = []
    for name, outcomes in (("dray mcp", raced), ("plain script", scripted)):
        full = [each for each in outcomes if each.end == "COMPLETED" and each.loss is not None]
        best = min(full, key=lambda each: each.loss or 0)
        wasted = sum(
            each.end != "COMPLETED" and each.patch.kind != "works" and each.end != "refused" for each in outcomes
        )
        place = f"{order.index(best.patch.name) + 1} of {len(order)}" if best.patch.name in order else "-"
        trained = sum(each.batches for each in outcomes)
        rows.append(
            [
                name,
                best.patch.name,
                f"{best.loss:.4f}",
                place,
                f"{best.at_s:.0f}",
                f"{max(each.at_s for each in outcomes):.0f}",
                str(len(full)),
                str(wasted),
                str(trained),
            ]
        )
    head = [
        "",
        "best patch",
        "validation loss",
        "its place by the script",
        "found after s",
        "all after s",
        "trained to the end",
        "ran in vain",
        "batches",
    ]
    paper.table(head, rows)


def replayed(home: Path, names: Sequence[str]) -> str:
    """Rebuild each search from its journal: an error if it decides anything else than it did."""
    counts = defaultdict(int)
    for name in names:
        directory = ExperimentDirectory.open(home / name)
        records = Journal.read(directory.journal)
        build_search(stored_config(directory.config_file), lambda record: None, records=records)
        counts[name] = len(records)
    return ", ".join(f"{count} records of {name}" for name, count in counts.items())


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    paper.say(f"{machine()}\n\n{(__doc__ or '').partition('[--keep DIRECTORY]')[2].strip()}\n")
    chosen = patches()[:: 3 if options.quick else 1]
    batches = QUICK_BATCHES if options.quick else BATCHES
    home, raced, names = directory / "results", list[Outcome](), list[str]()

    async def with_agent(pid: int) -> None:
        async with agent(home) as ask:
            lab = Laboratory(ask, home, pid, paper, options.quick)
            if "race" in options.parts:
                raced.extend(await race(lab, chosen))
            if "overhead" in options.parts:
                await overhead(lab, chosen)
            if "many" in options.parts:
                await many(lab, chosen)
            names.extend(lab.experiments)
            sizes = [len(each.text.encode()) for each in ask.calls]
            paper.say(f"\n{len(sizes)} calls of tools; the largest answer has {max(sizes):,} bytes.")

    if set(options.parts) - {"plain"}:
        began = time.monotonic()
        with serving(home, 18500) as (_, process):
            paper.say(f"The server was up after {time.monotonic() - began:.1f} s.")
            asyncio.run(with_agent(process.pid))
        paper.say(f"Replayed with the same decisions: {replayed(home, names)}.")
    if "plain" in options.parts:
        (directory / "plain").mkdir()
        scripted = plain(directory / "plain", chosen, paper, batches)
        if raced:
            compare(paper, raced, scripted)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="every third patch, shorter, and 60 proposals in `many`")
    perform(measure, parser.parse_args(), name="laboratory", title="A mechanical researcher")


if __name__ == "__main__":
    main()
