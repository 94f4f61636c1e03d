"""Run an example as its user does: as a script, on one process or under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(script: Path, *arguments: str, home: Path, processes: int = 1) -> tuple[str, list[dict[str, Any]]]:
    """Returns what it printed and the reports of its run, which is the only one below `home`."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "DRAY_HOME": str(home), "OMP_NUM_THREADS": "1"}
    # From another directory: it must find its own files, and it is not this one's code that is copied.
    home.mkdir()
    done = subprocess.run(
        [*command, str(script), *arguments], env=environment, cwd=home, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    [run] = (home / "local").iterdir()
    assert list(run.glob("checkpoint_*/manifest.json"))
    return done.stdout, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
