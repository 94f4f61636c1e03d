"""Replay a seed, or run a range of seeds.

    python -m tests.simulation SEED [--no-faults] [--requests] [--pbt] [--auto] [--repeats] [--whole]
    python -m tests.simulation FIRST END [--requests] [--pbt] [--auto] [--repeats] [--processes 2]

A failing seed is shrunk first. A range prints a line for each failing seed, and at the end the number of each event;
ranges can be run one after another, and their numbers added.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import time
from collections import Counter

from tests.simulation.schedule import drawn
from tests.simulation.simulation import Simulation, failure_of, outcome_of, shrunk

PART = 100
"""How many seeds a process gets at a time."""


def replay(seed: int, *, whole: bool, **options: bool) -> None:
    """Print every event."""
    schedule = drawn(seed, **options)
    if failure_of(schedule) and not whole:
        schedule = shrunk(schedule)
    print(*schedule.lines(), sep="\n")
    lines: list[str] = []
    try:
        Simulation(schedule, lines).run()  # a place for a debugger's breakpoint
    finally:
        print(*lines, sep="\n")


def simulate(seeds: range, **options: bool) -> Counter[str]:
    """Run these seeds, and return the number of each event."""
    counts, began = Counter[str](), time.process_time()
    gc.disable()  # garbage is collected once, after each simulation
    for seed in seeds:
        schedule = drawn(seed, **options)
        why, steps = outcome_of(schedule)
        if why:
            print(f"seed {seed}: {why}", flush=True)
        counts.update(f"fault: {fault.kind}" for fault in schedule.faults)
        counts += Counter(
            {"schedules": 1, "of a server": schedule.server, "experiments": len(schedule.setups), "failures": bool(why)}
        )
        counts["steps"] += steps
    gc.collect()
    counts["CPU ms"] = round(1000 * (time.process_time() - began))
    return counts


def simulate_all(seeds: range, processes: int, **options: bool) -> None:
    """Run these seeds in several processes, and print the number of each event."""
    parts = [range(first, min(first + PART, seeds.stop)) for first in range(seeds.start, seeds.stop, PART)]
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        counted = pool.imap_unordered(functools.partial(simulate, **options), parts)
        counts = functools.reduce(lambda one, other: one + other, counted)
    counts["seconds"] = round(time.monotonic() - began)
    print(f"\nSeeds {seeds.start} to {seeds.stop - 1}, {processes} processes\n\n| | |\n|---|---:|")
    print(f"| schedules a minute | {60 * counts['schedules'] / max(counts['seconds'], 1):,.0f} |")
    print(f"| CPU time of one, ms | {counts['CPU ms'] / counts['schedules']:.1f} |")
    for name, times in sorted(counts.items(), key=lambda each: (each[0].startswith("fault"), each[0])):
        print(f"| {name} | {times:,} |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seed", type=int)
    parser.add_argument("end", type=int, nargs="?", help="run all seeds from the first to before this one")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-faults", action="store_true", help="nothing goes wrong")
    parser.add_argument("--requests", action="store_true", help="a person adds, forks and stops trials")
    parser.add_argument("--pbt", action="store_true", help="the searches are population-based training")
    parser.add_argument("--auto", action="store_true", help="the searches are by auto, with its model")
    parser.add_argument("--budgets", action="store_true", help="experiments have budgets")
    parser.add_argument("--repeats", action="store_true", help="the best trials are trained again")
    parser.add_argument("--alerts", action="store_true", help="somebody is told of failures, no gain, a budget's end")
    parser.add_argument("--token", action="store_true", help="a token with a quota of slots submits them to a server")
    parser.add_argument("--whole", action="store_true", help="do not shrink the schedule")
    arguments = parser.parse_args()
    parser.add_argument("--once", action="store_true", help="what programs do works only once in a process")
    names = ("requests", "pbt", "auto", "budgets", "repeats", "token", "alerts", "once")
    options = {name: getattr(arguments, name) for name in names}
    options["faults"] = not arguments.no_faults
    if arguments.end is None:
        replay(arguments.seed, whole=arguments.whole, **options)
    else:
        simulate_all(range(arguments.seed, arguments.end), arguments.processes, **options)


if __name__ == "__main__":
    main()
