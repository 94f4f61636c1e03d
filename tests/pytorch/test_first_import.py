"""What the import of dray.pytorch costs."""

from __future__ import annotations

import subprocess
import sys

COLLECTIONS = """
import gc, sys
full = []
gc.callbacks.append(lambda phase, info: full.append(info) if info["generation"] == 2 else None)
import dray.pytorch
assert gc.isenabled() and "torch" in sys.modules
print(len(full))
"""


def test_torch_is_imported_without_full_collections() -> None:
    ran = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True)
    assert ran.stdout == "0\n", ran.stderr
