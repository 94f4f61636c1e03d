"""Replays a seed: python -m tests.simulation SEED. If it fails, the schedule is shrunk first."""

from __future__ import annotations

import argparse

from tests.simulation.schedule import schedule_of
from tests.simulation.simulation import Simulation, failure_of, shrunk

parser = argparse.ArgumentParser(prog="python -m tests.simulation")
parser.add_argument("seed", type=int)
parser.add_argument("--no-faults", action="store_true", help="nothing goes wrong")
parser.add_argument("--whole", action="store_true", help="do not shrink the schedule")
arguments = parser.parse_args()

schedule = schedule_of(arguments.seed, faults=not arguments.no_faults)
if failure_of(schedule) and not arguments.whole:
    schedule = shrunk(schedule)
print(*schedule.lines(), sep="\n")
lines: list[str] = []
try:
    Simulation(schedule, lines).run()  # here a debugger can be put on it
finally:
    print(*lines, sep="\n")
