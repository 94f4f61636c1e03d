"""The part of bench/gpu.py that needs Ray, in its dry run; tests/test_gpu_bench.py has the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.harness import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]


def test_dry_run_measures_a_search_whose_trials_share_a_process(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--dry-run", "--parts", "trials-on-ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 completed, in 1 process(es)" in done.stdout
    assert "last batch to the next trial's first" in done.stdout
