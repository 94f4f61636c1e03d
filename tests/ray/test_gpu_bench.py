"""The parts of bench/gpu.py that need Ray, in a dry run; tests/test_gpu_bench.py has the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.harness import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]


def test_dry_run_of_the_searches_on_ray(tmp_path: Path) -> None:
    parts = ["failing", "quarters", "rung"]
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--dry-run", "--parts", *parts]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in (
        "a new process after the lack of memory",
        "batches a second of four",
        "stall at the rung",
    ):
        assert f"| {what}" in done.stdout
