"""How many simulated schedules of faults a minute, and whether any of them fails: see tests/simulation.

Each seed gives one schedule: experiments with their trials, on a driver's own groups or on a server, and what goes
wrong. A seed that fails is replayed, and shrunk, by `python -m tests.simulation SEED`.

    python bench/simulation.py [--first 0] [--seeds 20000] [--processes 2] [--save]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from _measure import BENCH, Paper, arguments, machine, perform

sys.path.insert(0, str(BENCH.parent))

from tests.simulation.schedule import schedule_of
from tests.simulation.simulation import failure_of

PART = 100
"""How many seeds a process gets at a time."""


@dataclass(slots=True)
class Part:
    """What some seeds gave: failures by seed, faults by kind, and how many of the schedules were of a server."""

    schedules: int = 0
    servers: int = 0
    experiments: int = 0
    cpu_s: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, other: Part) -> None:
        """Add those of other seeds."""
        self.schedules += other.schedules
        self.servers += other.servers
        self.experiments += other.experiments
        self.cpu_s += other.cpu_s
        self.failures |= other.failures
        self.faults += other.faults


def simulate(seeds: range) -> Part:
    """Run these seeds."""
    part, began = Part(), time.process_time()
    gc.disable()  # what a simulation leaves is collected once, afterwards
    for seed in seeds:
        schedule = schedule_of(seed)
        part.schedules += 1
        part.servers += schedule.server
        part.experiments += len(schedule.setups)
        part.faults.update(fault.kind for fault in schedule.faults)
        if why := failure_of(schedule):
            part.failures[seed] = why
    gc.collect()
    part.cpu_s = time.process_time() - began
    return part


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all seeds, and say what failed."""
    paper.say(machine())
    end = options.first + options.seeds
    parts = [range(first, min(first + PART, end)) for first in range(options.first, end, PART)]
    total, began = Part(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for part in pool.imap_unordered(simulate, parts):
            total.add(part)
            for seed, why in part.failures.items():
                print(f"seed {seed}: {why}", flush=True)
    wall = time.monotonic() - began
    paper.say(f"\nSeeds {options.first} to {end - 1}, {options.processes} processes.\n")
    rows = [
        ("schedules", f"{total.schedules:,}"),
        ("of a server", f"{total.servers:,}"),
        ("experiments", f"{total.experiments:,}"),
        ("faults, and what users do", f"{total.faults.total():,}"),
        ("failures", f"{len(total.failures):,}"),
        ("schedules a minute", f"{60 * total.schedules / wall:,.0f}"),
        ("CPU time of one, ms", f"{1000 * total.cpu_s / total.schedules:.1f}"),
    ]
    paper.table(("", ""), rows)
    paper.say()
    paper.table(("fault", "times"), [(kind, f"{times:,}") for kind, times in total.faults.most_common()])
    for seed, why in sorted(total.failures.items()):
        paper.say(f"\nSeed {seed}: {why}")


def main() -> None:
    """Read the command line, and measure."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--first", type=int, default=0, help="seed (default 0)")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many (default 20,000)")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core"
    )
    perform(measure, parser.parse_args(), name="simulation", title="Simulated schedules of faults")


if __name__ == "__main__":
    main()
