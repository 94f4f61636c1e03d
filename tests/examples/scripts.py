"""Run an example as its user does: as a script, on one process or under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.forks import process as forks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(script: Path, *arguments: str, home: Path, processes: int = 1) -> tuple[str, list[dict[str, Any]]]:
    """Returns what it printed and the reports of its run, which is the only one below `home`."""
    # From another directory: it must find its own files, and it is not this one's code that is copied.
    home.mkdir()
    if processes == 1:
        printed = forks.run_script(script, *arguments, directory=home, DRAY_HOME=str(home))
    else:
        printed = forks.torchrun(script, *arguments, directory=home, processes=processes, DRAY_HOME=str(home))
    [run] = (home / "local").iterdir()
    assert list(run.glob("checkpoint_*/manifest.json"))
    return printed, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
