"""Replay a seed, or run a range of seeds.

    python -m tests.simulation SEED [--kind commit] [--no-faults] [--requests] [--lines rpc/stream.py]
    python -m tests.simulation FIRST END [--kind commit] [--requests] [--processes 2]

`--kind`: `whole` experiments, some of them on a server; the path of a `commit`; or the cores `alone`. A failing
schedule is shrunk first. A range prints a line for each failing seed, and at the end the number of each event.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import multiprocessing
import os
import time
from collections import Counter
from dataclasses import replace

from tests.simulation.schedule import NO_FAULTS, OPTIONS
from tests.simulation.seeds import Kind, Seed, outcome_of, shrunk

PART = 50
"""How many seeds a process gets at a time."""


def replay(seed: Seed, *, whole: bool) -> None:
    """Print every event."""
    schedule = None if seed.kind == "commit" else seed.schedule()
    if schedule is not None and not whole and outcome_of(seed).why:
        schedule = shrunk(seed, schedule)
    outcome = outcome_of(seed, schedule, logs=True)
    print(*([] if schedule is None else schedule.lines()), *outcome.lines, sep="\n")
    print(outcome.why or f"no failure; digest {outcome.digest}")


def simulate(seeds: range, seed: Seed) -> Counter[str]:
    """Run these seeds, and return the number of each event."""
    counts, began = Counter[str](), time.process_time()
    logging.disable()
    gc.disable()
    if not gc.get_freeze_count():
        gc.freeze()  # what was imported is not looked at again
    for number in seeds:
        each = replace(seed, number=number)
        outcome = outcome_of(each)
        if outcome.why:
            print(f"seed {number}: {outcome.why}", flush=True)
        if each.kind != "commit":
            schedule = each.schedule()
            counts.update(f"fault: {fault.kind}" for fault in schedule.faults)
            counts += Counter({"of a server": schedule.server, "experiments": len(schedule.setups)})
        counts += Counter({"schedules": 1, "failures": bool(outcome.why), "switches": outcome.switches})
    gc.collect()
    counts["CPU ms"] = round(1000 * (time.process_time() - began))
    return counts


def simulate_all(seeds: range, processes: int, seed: Seed) -> None:
    """Run these seeds in several processes, and print the number of each event."""
    parts = [range(first, min(first + PART, seeds.stop)) for first in range(seeds.start, seeds.stop, PART)]
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        counted = pool.imap_unordered(functools.partial(simulate, seed=seed), parts)
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
    parser.add_argument("--kind", choices=["whole", "commit", "alone"], default="whole")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-faults", action="store_true", help="nothing goes wrong")
    for name, (_, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--whole", action="store_true", help="do not shrink the schedule")
    parser.add_argument("--lines", action="append", default=[], help="a file of dray in which threads are interrupted")
    arguments = parser.parse_args()
    kind: Kind = arguments.kind
    options = frozenset(name for name in (*OPTIONS, NO_FAULTS) if getattr(arguments, name))
    seed = Seed(number=arguments.seed, kind=kind, options=options, preempt_in=tuple(arguments.lines))
    if arguments.end is None:
        replay(seed, whole=arguments.whole)
    else:
        simulate_all(range(arguments.seed, arguments.end), arguments.processes, seed)


if __name__ == "__main__":
    main()
