"""Replays a seed: python -m tests.simulation SEED."""

from __future__ import annotations

import sys

from tests.simulation.schedule import schedule_of
from tests.simulation.simulation import run

if __name__ == "__main__":
    lines: list[str] = []
    schedule = schedule_of(int(sys.argv[1]), faults="--no-faults" not in sys.argv)
    print(*schedule.lines(), sep="\n")
    try:
        run(schedule, lines)
    finally:
        print(*lines, sep="\n")
