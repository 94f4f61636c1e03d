"""Shared by the benchmarks: time stamps written by any process of a run, runs in fresh processes, tables, results.

It imports only the standard library, since the measured processes import it too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

BENCH = Path(__file__).resolve().parent
DIGITS = BENCH.parent / "examples" / "digits"
STAMPS = "DRAY_BENCH_STAMPS"
"""The environment variable that names the file of a run's time stamps; Ray's processes inherit it."""
RUN_LIMIT_S = 540.0


# --------------------------------------------------------------------------------------------------------------- stamps
@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """An event in a process of a run.

    Args:
        kind: of event.
        time: seconds since the epoch; all processes are on one machine.
        pid: of the process.
        fields: further details.
    """

    kind: str
    time: float
    pid: int
    fields: Mapping[str, Any]


def stamp(kind: str, **fields: Any) -> None:
    """Write a time stamp, which takes about 20 microseconds; outside a benchmark, do nothing."""
    path = os.environ.get(STAMPS)
    if path is None:
        return
    line = json.dumps({"kind": kind, "time": time.time(), "pid": os.getpid(), "fields": fields}) + "\n"
    # One write to a file opened for appending: lines of several processes do not mix.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def stamp_counts(experiment: Any) -> None:
    """Stamp how many processes the last run of an experiment started and lost."""
    counts = experiment.last_run.driver.counts
    stamp(
        "counts",
        handles=counts.handles_started,
        groups=counts.groups_started,
        lost=counts.groups_lost,
        restarts=counts.restarts.total(),
    )


def of_kind(stamps: Sequence[Stamp], *kinds: str) -> list[Stamp]:
    """The stamps of these kinds, in order of time."""
    return [s for s in stamps if s.kind in kinds]


# ----------------------------------------------------------------------------------------------------------------- runs
@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run, in a separate process."""

    began: float
    ended: float
    stamps: list[Stamp]

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the process to its end."""
        return self.ended - self.began


def run(script: str, arguments: Sequence[str], directory: Path, *, limit_s: float = RUN_LIMIT_S) -> Ran:
    """Run ``script`` in a fresh interpreter, wait for its end, and collect what it stamped.

    Args:
        script: its path.
        arguments: its command line.
        directory: empty; for the stamps and the output.
        limit_s: how long it may take.
    """
    directory.mkdir(parents=True)
    stamps, output = directory / "stamps.jsonl", directory / "output.txt"
    # Ray's processes inherit the environment, by which they find the model and this module.
    paths = [str(BENCH), str(BENCH.parent), str(DIGITS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        STAMPS: str(stamps),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with output.open("wb") as log:
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, script, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
            ended = time.time()
        except BaseException:
            # Ray's processes end with their driver only if it is terminated, not if it is killed.
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if code != 0:
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(f"{script} {' '.join(arguments)} ended with code {code}:\n{tail}")
    return Ran(began=began, ended=ended, stamps=read_stamps(stamps))


def run_in_turn(script: str, trials: Mapping[str, int], rounds: int, directory: Path) -> Iterator[tuple[str, Ran]]:
    """Run the cases of a benchmark in turn, `rounds` times: ``script --child <case> <directory> <trials>``.

    Args:
        script: its path.
        trials: of the search of each case.
        rounds: how often each case is run.
        directory: for their files.

    Yields:
        A case, and its run.
    """
    for number in range(1, rounds + 1):
        for case, count in trials.items():
            where = directory / f"{number}-{case}"
            ran = run(script, ["--child", case, str(where), str(count)], where)
            print(f"round {number}, {case}: {count} trials in {ran.wall_s:.1f} s", flush=True)
            yield case, ran


def read_stamps(file: Path) -> list[Stamp]:
    """The stamps of a run's processes so far, in order of time."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted((Stamp(**line) for line in lines), key=lambda s: s.time)


def end_on_sigterm() -> None:
    """Turn SIGTERM into an exit that runs every ``finally``, so that no Ray is left running."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


# -------------------------------------------------------------------------------------------------------------- numbers
def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by at least this share of all.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([3.0, 1.0, 2.0], 0.9)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else float("nan")


def spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """The median, with the smallest and the largest value.

    >>> spread([1.0, 4.0, 2.0], "s")
    '2.00 s (1.00 - 4.00)'
    """
    if not values:
        return "-"
    space = " " if unit and unit != "x" else ""
    middle = f"{quantile(values, 0.5):.{digits}f}{space}{unit}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def verdict(reached: bool) -> str:
    """One word on a target."""
    return "reached" if reached else "MISSED"


# --------------------------------------------------------------------------------------------------------------- output
class Paper:
    """Prints lines, and keeps them for the results."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def say(self, text: str = "") -> None:
        """Print one line or several."""
        print(text, flush=True)
        self._lines += text.split("\n")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, in Markdown's form, with columns aligned."""
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        for row in (head, ["-" * width for width in widths], *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.say(f"| {' | '.join(cells)} |")

    def save(self, name: str, title: str) -> None:
        """Write the printed lines to ``bench/results/<name>.md``."""
        path = BENCH / "results" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.text(title))
        print(f"\nsaved in {path.relative_to(BENCH.parent)}")

    def text(self, title: str) -> str:
        """The printed lines, under a title."""
        return f"# {title}\n\n" + "\n".join(self._lines) + "\n"


def machine() -> str:
    """This machine, the versions installed on it, and how busy it is."""
    packages = ", ".join(_version(name) for name in ("ray", "torch"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = " / ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory, {platform.system()}; "
        f"Python {platform.python_version()}, {packages}; {time.strftime('%Y-%m-%d')}.\n"
        f"Load of the machine before the first run (1, 5, 15 minutes): {load}."
    )


def command() -> str:
    """The command line without `--keep`, whose directory does not matter."""
    script, *given = sys.argv
    if "--keep" in given:
        at = given.index("--keep")
        del given[at : at + 2]
    return shlex.join(["python", f"bench/{Path(script).name}", *given])


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _cpu() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        yield from path.read_text().splitlines()


def arguments(doc: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    parser.add_argument("--keep", type=Path, help="keep the files of all runs in this directory")
    return parser


def perform(
    measure: Callable[[argparse.Namespace, Path, Paper], None], options: argparse.Namespace, *, name: str, title: str
) -> None:
    """Measure, print how long that took, and save the figures as ``bench/results/<name>.md``, if ``options`` say so.

    Args:
        measure: given the options, a directory for its files, and the paper for its figures.
        options: those of `arguments`, and more.
    """
    end_on_sigterm()
    paper, began = Paper(), time.monotonic()
    with tempfile.TemporaryDirectory() as unkept:
        directory = options.keep or Path(unkept)
        directory.mkdir(parents=True, exist_ok=True)
        measure(options, directory.resolve(), paper)
    paper.say(f"\n{time.monotonic() - began:.0f} s in all")
    if options.save:
        paper.save(name, title)
