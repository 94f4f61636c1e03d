"""The sizes of sdist and wheel, and the CPU time of imports, each in fresh processes.

python bench/package.py [--rounds 15] [--save]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from _measure import BENCH, Paper, arguments, machine, perform, quantile, spread, verdict

WHEEL_MB = 1.5
IMPORTS = {"dray": (60, ""), "dray.pytorch": (150, "import torch")}
"""How many milliseconds each may take, and what the process has done before."""


def import_ms(name: str, before: str) -> float:
    """The CPU time of an import in a process of its own."""
    code = f"{before}\nimport time\nbegan = time.process_time()\nimport {name}\nprint(time.process_time() - began)"
    return 1000 * float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Build both, import each."""
    paper.say(machine())
    paper.say("")
    build = [sys.executable, "-m", "hatchling", "build", "-d", directory]
    subprocess.run(build, cwd=BENCH.parent, check=True, capture_output=True)
    rows = []
    for kind, limit in (("*.whl", WHEEL_MB), ("*.tar.gz", float("inf"))):
        [file] = directory.glob(kind)
        megabytes = file.stat().st_size / 1e6
        target = f"<= {limit} MB: {verdict(megabytes <= limit)}" if limit < float("inf") else ""
        rows.append([file.name, f"{megabytes:.2f} MB", target])
    # The first round is not counted: in it Python compiles the modules.
    rounds = [[import_ms(name, before) for name, (_, before) in IMPORTS.items()] for _ in range(options.rounds + 1)]
    for (name, (limit, before)), taken in zip(IMPORTS.items(), zip(*rounds[1:], strict=True), strict=True):
        met = verdict(quantile(taken, 0.5) <= limit)
        label = f"import {name}, after {before}" if before else f"import {name}"
        rows.append([label, spread(taken, "ms", 0), f"<= {limit} ms: {met}"])
    paper.table(["", "size or CPU time", "target"], rows)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="processes of each kind")
    perform(measure, parser.parse_args(), name="package", title="The package")
