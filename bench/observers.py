"""What a logger's thread takes of the driver's process to follow a run, besides what the logger itself does; simulated.

An ASHA search of many trials in virtual time, with four metrics per epoch, is written to its files in many pieces, and
after each piece the thread reads what is new.

    python bench/observers.py [--trials 1000] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from _measure import BENCH, Paper, arguments, machine, perform

sys.path.insert(0, str(BENCH.parent))

PIECES = 100


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Follow a search that is written piece by piece."""
    from dray.observers.observer import Followed
    from dray.records.directory import ExperimentDirectory
    from dray.records.metrics import MetricsLog, read_metrics
    from tests.report.simulated import simulated

    paper.say(machine())
    whole = simulated(directory / "whole", options.trials)
    records = whole.journal.read_text().splitlines(keepends=True)
    rows = read_metrics(whole.metrics).sort_values("time", kind="stable").to_dict("records")
    growing = ExperimentDirectory(directory / "growing")
    growing.path.mkdir()
    growing.config_file.write_bytes(whole.config_file.read_bytes())
    log, followed, took_s = MetricsLog(growing.metrics), Followed(growing), list[float]()
    for piece in range(PIECES):
        with growing.journal.open("a") as journal:
            journal.writelines(records[len(records) * piece // PIECES : len(records) * (piece + 1) // PIECES])
        for row in rows[len(rows) * piece // PIECES : len(rows) * (piece + 1) // PIECES]:
            log.append(int(row["trial_id"]), [{str(name): each for name, each in row.items() if name != "trial_id"}])
        began = time.thread_time()
        for _ in followed.news():
            pass
        took_s.append(time.thread_time() - began)
    cells = [f"{len(records):,}", f"{len(rows):,}", f"{sum(took_s):.2f} s", f"{max(took_s):.3f} s"]
    cells.append(f"{1e6 * sum(took_s) / (len(records) + len(rows)):.1f} us")
    paper.say("")
    paper.table(["events of the search", "metrics", "all looks", "the longest", "an event or metric"], [cells])


def main() -> None:
    """Read the command line and measure."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=1_000, help="trials of the search (default 1000)")
    perform(measure, parser.parse_args(), name="observers", title="A run that is followed")


if __name__ == "__main__":
    main()
