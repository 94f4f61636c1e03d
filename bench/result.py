"""The cost of reading and writing the results of an experiment with many trials, all simulated.

  asha     10,000 trials of an ASHA search, most of which end after one epoch
  random   10,000 trials of 16 epochs; four metrics per epoch

Each is read in a separate process: `result.metrics`, then `result.trials`, from the opening of the directory: wall and
CPU seconds (without the imports), and peak memory beyond that of the imports. The cost of writing is the driver's CPU
time per report of four metrics, packing to Parquet included.

    python bench/result.py [--trials 10000] [--rounds 5] [--save]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _measure import BENCH, Paper, arguments, machine, perform, spread, verdict

sys.path.insert(0, str(BENCH.parent))

READ_S = 2.0
REPORT_MS = 0.2


def read(path: Path) -> None:
    """Read the experiment as a user does, and print the cost."""
    import pyarrow.dataset  # noqa: F401  what reading Parquet imports

    import dray
    import dray.records.result  # the name in `dray` is lazy

    def peak_mb() -> float:
        # Not by getrusage(), which begins with the peak of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM"))

    before, began, cpu = peak_mb(), time.perf_counter(), time.process_time()
    result = dray.Result(path)
    rows, metrics_s = len(result.metrics), time.perf_counter() - began
    trials = len(result.trials)
    figures = {"rows": rows, "trials": trials, "metrics_s": metrics_s, "wall_s": time.perf_counter() - began}
    print(json.dumps({**figures, "cpu_s": time.process_time() - cpu, "mb": peak_mb() - before}))


def write(path: Path, epochs: int) -> float:
    """Write the metrics of all trials, an epoch of each in turn; return the seconds of CPU time per report."""
    from dray.records.metrics import MetricsLog
    from dray.records.result import Result
    from tests.report.simulated import rows

    trials = [(trial, dict(each.drawn)) for trial, each in Result(path).reader.trials.items() if each.drawn is not None]
    reports = [(trial, rows(hparams, epoch, 0.0)) for epoch in range(1, epochs + 1) for trial, hparams in trials]
    log, began = MetricsLog(path / "metrics"), time.process_time()
    for trial, report in reports:
        log.append(trial, report)
        log.pack()
    log.close()
    return (time.process_time() - began) / len(reports)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Write both, and read them again and again."""
    from tests.report.simulated import simulated

    paper.say(machine())
    asha, random = directory / "asha", directory / "random"
    simulated(asha, options.trials, workers=32)
    shutil.copytree(asha, random)
    shutil.rmtree(random / "metrics")
    report_s = write(random, epochs=16)
    paper.say("")
    found: list[list[str]] = []
    for path in (asha, random):
        runs: list[dict[str, Any]] = []
        for _ in range(options.rounds):
            command = [sys.executable, __file__, "--child", str(path)]
            environment = {"PYTHONPATH": str(BENCH.parent), "PATH": "/usr/bin:/bin"}
            out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            runs.append(json.loads(out))
        wall = [one["wall_s"] for one in runs]
        found.append(
            [
                path.name,
                f"{runs[0]['trials']:,}",
                f"{runs[0]['rows']:,}",
                spread([one["metrics_s"] for one in runs], "s"),
                spread(wall, "s"),
                spread([one["cpu_s"] for one in runs], "s"),
                f"{max(one['mb'] for one in runs):.0f} MB",
                f"<= {READ_S:g} s: {verdict(sorted(wall)[len(wall) // 2] <= READ_S)}",
            ]
        )
    paper.table(["search", "trials", "rows", "metrics", "metrics, trials", "CPU time", "memory", "target"], found)
    paper.say(
        f"\nA report of four metrics costs the driver {1e3 * report_s:.3f} ms of CPU time, "
        f"target <= {REPORT_MS:g} ms: {verdict(1e3 * report_s <= REPORT_MS)}"
    )


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        return read(Path(sys.argv[2]))
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=10_000, help="trials per search (default 10000)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is read (default 5)")
    perform(measure, parser.parse_args(), name="result", title="Results of many trials")


if __name__ == "__main__":
    main()
