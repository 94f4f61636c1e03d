"""The loop needs the standard library, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["dray.training.loop", "dray.training.plan", "dray.training.host"])
def test_the_pure_floor_imports_neither_torch_nor_ray_nor_optuna(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'ray', 'optuna', 'numpy', 'pydantic'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
