"""Runs versions of a program on a server's warm workers, to find the commit after which a metric is worse."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dray.bisect.history import Commit, History, NoHistory
from dray.bisect.search import LEAST, Regression, Run, Verdict, bisect
from dray.code.archive import pack
from dray.config.yaml_file import parsed
from dray.errors import ConfigError, ExperimentError
from dray.serve.client import Server, Unreachable
from dray.serve.verbs.on_server import OnServer
from dray.text import counted, one_line
from searchers.objectives import loss_of

START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The metric and the length of the runs.

    Attributes:
        batches: the length of each run; None: as in the config of its commit.
        larger_is_better: it is also if the last commit's config says so of this metric.
        first_seed: the experiments' seed is this, plus that of the run: runs with the same seed are paired.
        least: see `dray.bisect.search`.
    """

    metric: str
    batches: int | None = None
    larger_is_better: bool = False
    first_seed: int = 1
    least: float = LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The verdict about a history.

    Attributes:
        ids: what identifies each version, oldest first; a change and its revert give the same.
        versions: the commits of each version, which train alike.
        values: the metric of each run; None if it failed, NaN if it diverged.
    """

    verdict: Verdict
    ids: Sequence[str]
    versions: Sequence[Sequence[Commit]]
    values: Mapping[Run, float | None]

    def values_of(self, version: int) -> list[float | None]:
        return [value for run, value in self.values.items() if run.version == self.ids[version]]

    def commit(self, run: Run) -> Commit:
        return self.versions[self.ids.index(run.version)][0]

    @property
    def suspects(self) -> list[Commit]:
        """The first commit of a regression's bad version, and all failing ones before it; [] without a regression."""
        match self.verdict:
            case Regression(good=good, bad=bad):
                failing = [each for place in range(good + 1, bad) for each in self.versions[place]]
                return [*failing, self.versions[bad][0]]
        return []

    def to_json(self, history: History) -> dict[str, Any]:
        commits = self.suspects
        return {
            "verdict": type(self.verdict).__name__,
            "commits": [
                {"hash": each.hash, "subject": each.subject, "author": each.author, "date": each.date}
                for each in commits
            ],
            "stat": history.stat(commits[0], commits[-1]) if commits else [],
            "runs": [
                {"commit": self.commit(run).hash, "seed": run.seed, "value": value}
                for run, value in self.values.items()
            ],
        }


Train = Callable[[Mapping[Run, Commit]], Mapping[Run, float | None]]
"""Trains commits, and returns the metric of each run: None if it failed, NaN if it diverged."""


def find(history: History, goal: Goal, train: Train, say: Callable[[str], None]) -> Found:
    """Find the commit of a history after which the metric is worse."""
    ids: list[str] = []
    versions: list[list[Commit]] = []
    for commit in history.commits:
        version = history.version(commit)
        if ids[-1:] == [version]:
            versions[-1].append(commit)
        else:
            ids.append(version)
            versions.append([commit])
    say(f"{counted(len(history.commits), 'commit')}, {len(set(ids))} of which train differently")
    sign, values = _sign(history, goal), dict[Run, float | None]()
    search = bisect(ids, least=goal.least)
    try:
        runs = next(search)
        while True:
            commits = {run: versions[ids.index(run.version)][0] for run in runs}
            found = train(commits)
            for run, value in found.items():
                shown = "failed" if value is None else f"{goal.metric} {value:.6g}"
                say(f"{commits[run].short}, seed {run.seed}: {shown}  {commits[run].subject}")
            values |= found
            finished = {run: value for run, value in found.items() if value is not None}
            losses = {run: loss_of(value, smaller_is_better=sign > 0) for run, value in finished.items()}
            runs = search.send(dict.fromkeys(found) | losses)
    except StopIteration as end:
        return Found(verdict=end.value, ids=ids, versions=versions, values=values)


def _sign(history: History, goal: Goal) -> int:
    """1 if smaller values of the metric are better, else -1."""
    content, _ = parsed(history.config_text(history.commits[-1]))
    searcher = content.get("searcher") if isinstance(content, dict) else None
    is_larger_better = (
        isinstance(searcher, dict)
        and searcher.get("metric") == goal.metric
        and searcher.get("smaller_is_better") is False
    )
    return -1 if goal.larger_is_better or is_larger_better else 1


def config_of(text: str, goal: Goal, seed: int, name: str) -> dict[str, Any]:
    """The config of a commit as it is run: one trial, with the given seed and length.

    Raises:
        ConfigError: it is no mapping, or has no length.
    """
    content, fault = parsed(text)
    if fault is not None or not isinstance(content, dict):
        raise ConfigError([fault or ("config", "must be a mapping of fields to values")], name)
    searcher = content.get("searcher")
    length = goal.batches
    if length is None and isinstance(searcher, dict):
        length = searcher.get("max_length")
    if length is None:
        raise ConfigError([("searcher.max_length", "missing; give the length of the runs, as --length 100")], name)
    single = {"name": "single", "metric": goal.metric, "max_length": length}
    seeds = {**(content.get("reproducibility") or {}), "experiment_seed": goal.first_seed + seed}
    changed = {
        "name": name,
        "searcher": single,
        "reproducibility": seeds,
        "max_restarts": 0,
        "checkpoint_policy": "none",
    }
    return {
        **{key: value for key, value in content.items() if key not in ("budget", "min_checkpoint_period")},
        **changed,
    }


@contextlib.contextmanager
def on_server(server: Server, history: History, goal: Goal, say: Callable[[str], None]) -> Iterator[Train]:
    """Train commits as experiments on a server; those that still run at the end of the block are killed."""
    running: set[str] = set()

    def submit(run: Run, commit: Commit) -> str:
        name = f"bisect-{commit.short}"
        with tempfile.TemporaryDirectory() as scratch:
            history.export(commit, Path(scratch))
            config = config_of(history.config_text(commit), goal, run.seed, name)
            submitted = server.submit(yaml.safe_dump(config, sort_keys=False), pack(Path(scratch)))
        running.add(submitted.name)
        return submitted.name

    def train(runs: Mapping[Run, Commit]) -> Mapping[Run, float | None]:
        names: dict[Run, str] = {}
        for run, commit in runs.items():
            try:
                names[run] = submit(run, commit)
            except (ConfigError, NoHistory) as error:
                say(f"{commit.short} does not run: {one_line(error)}")
        values: dict[Run, float | None] = dict.fromkeys(runs)
        for run, name in names.items():
            for _ in server.follow(name, say=say):
                pass
            running.discard(name)
            values[run] = _value(server.read(name, "trials")["trials"])
            if values[run] is None:
                see = f"dray experiment describe {OnServer(server, name).typed}"
                say(f"{runs[run].short} does not run, or reports no {goal.metric}: see {see}")
        return values

    try:
        yield train
    finally:
        for name in running:
            with contextlib.suppress(ConnectionError, ValueError, LookupError):
                OnServer(server, name).kill()


def _value(trials: Sequence[Mapping[str, Any]]) -> float | None:
    """The last value of the metric of a run with one trial."""
    if not trials or trials[0]["state"] not in ("COMPLETED", "PRUNED"):
        return None
    value: float | None = trials[0]["metric"]
    return math.nan if value is None and trials[0]["nan_since"] is not None else value


@contextlib.contextmanager
def a_server(say: Callable[[str], None]) -> Iterator[Server]:
    """The server that is up, or one for the duration of the block."""
    if (server := Server.find()) is not None:
        yield server
        return
    say("starting a server for these runs")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dray.cli", "serve"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            yield _up(process, output)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _up(process: subprocess.Popen[bytes], output: Any) -> Server:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(Unreachable):
            if (server := Server.find()) is not None:
                return server
        time.sleep(0.1)
    output.seek(0)
    said = output.read().decode(errors="replace").strip().splitlines()
    raise ExperimentError(
        f"the server did not start: {said[-1] if said else 'it printed nothing'}; start it: dray serve"
    )
