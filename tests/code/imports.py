"""Imports classes on trial, in a process of its own: `test_trial_import` reads what it prints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dray.code.trial_import import IMPORT_S, fault_of_import
from dray.config.entrypoint import ClassName

LIMIT_S = 1.0  # for a loop

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    limits = {"loops": LIMIT_S}
    faults = {
        name: fault_of_import(ClassName(name, "Trial"), directory, limits.get(name, IMPORT_S)) for name in sys.argv[2:]
    }
    print(json.dumps({"faults": faults, "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text()}))
