"""Each row of API.md has a test, which says so by `@pytest.mark.api("2.11")`.

But for 3.6, which is out of scope (Horovod, TensorFlow), and 10.4, which is `tests/pytorch/test_experimental.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

SECTIONS = {
    "1": 15,  # PyTorchTrial
    "2": 30,  # its context
    "3": 7,  # DistributedContext
    "4": 12,  # DataLoader and samplers
    "5": 6,  # LRScheduler
    "6": 7,  # metrics and reducers
    "7": 11,  # callbacks
    "8": 16,  # init, fit, units
    "9": 11,  # checkpoints and resuming
    "10": 5,  # TorchWriter, and the names of Determined
}
ROWS = {f"{section}.{row}" for section, rows in SECTIONS.items() for row in range(1, rows + 1)}


def test_each_row_has_a_test_and_tests_name_rows_that_there_are() -> None:
    texts = [file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py")]
    marks = [mark for text in texts for mark in re.findall(r"\bmark\.api\(([^)]*)\)", text)]
    tested = {row for mark in marks for row in re.findall(r'"([\d.]+b?)"', mark)}
    assert tested == ROWS - {"3.6", "10.4"} | {"8.3b", "8.4b", "9.3b"}
