"""Importing code on trial: whatever it does, there is an answer in time, and nothing of it runs on."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from dray.code.trial_import import import_in_new_process
from dray.config.entrypoint import ClassName
from tests.code import imports
from tests.forks.process import run_script

pytestmark = pytest.mark.slow

TRIAL = "from dray import pytorch\nclass Trial(pytorch.PyTorchTrial): pass\n"
FORKS = """
import os, time
for leaves in (False, True):
    if os.fork() == 0:
        if leaves:
            os.setsid()
            if os.fork(): os._exit(0)
        with open({pids!r}, "a") as file: print(os.getpid(), file=file, flush=True)
        time.sleep(1000)
        os._exit(0)
while len(open({pids!r}).readlines() if os.path.exists({pids!r}) else []) < 2: time.sleep(0.01)
"""
WRITES = """
import contextlib, os
while True:
    for file in range(3, 64):
        with contextlib.suppress(OSError): os.write(file, bytes(1 << 16))
"""
FLOODS = """
import os
with open(f"/proc/{os.getppid()}/fd/1", "wb", buffering=0) as answers:
    while True: answers.write(bytes(1 << 16))
"""
MODULES = {
    "good": TRIAL,
    "raises": "1 / 0",
    "exits": "raise SystemExit('no')",
    "leaves": "import os; os._exit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "lacks": TRIAL.replace("Trial(", "Other("),
    "prints": TRIAL + "print('x' * 1_000_000)",
    "forked": TRIAL + "import os\nos.fork()",
    "interrupts": "raise KeyboardInterrupt",
    "long": "raise ValueError('x' * 1_000_000)",
    "writes": WRITES,
    "loops": "while True: pass",
}


def test_an_import_on_trial_is_answered_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    for name, text in {**MODULES, "forks": FORKS.format(pids=str(pids)) + TRIAL}.items():
        (tmp_path / f"{name}.py").write_text(text)
    said = json.loads(run_script(Path(imports.__file__), str(tmp_path), *MODULES, "forks", directory=tmp_path))
    faults = said["faults"]
    assert [name for name in faults if not faults[name]] == ["good", "prints", "forked", "forks"]
    assert "ZeroDivisionError" in faults["raises"]
    assert "SystemExit" in faults["exits"]
    assert "ended its process (exit code 3)" in faults["leaves"]
    assert "ended its process (killed by signal 9)" in faults["killed"]
    assert re.search(r"lacks has no class Trial; its trials are Other", faults["lacks"])
    assert faults["interrupts"] == "importing interrupts raised KeyboardInterrupt"
    assert len(faults["long"]) < 10_000
    assert faults["writes"] == "importing writes writes to files that it has not opened"
    assert faults["loops"] == f"importing loops takes longer than {imports.LIMIT_S:g} s"
    assert said["children"] == ""
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.long
def test_a_process_without_torch_can_start_another_one_for_it(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(MODULES["good"])
    assert import_in_new_process(ClassName("good", "Trial"), tmp_path) == ""
    assert not list(tmp_path.rglob("*.pyc"))
    (tmp_path / "floods.py").write_text(FLOODS)
    assert import_in_new_process(ClassName("floods", "Trial"), tmp_path).endswith("without an answer, or gave none")
