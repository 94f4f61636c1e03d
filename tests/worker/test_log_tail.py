"""The end of a trial's log, in the error of a process that can't say itself what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.worker.log import tail as last_words
from dray.worker.log.tail import last_printed, with_last_words

CRASH = [
    "Fatal Python error: Segmentation fault",
    "",
    "Stack (most recent call first):",
    f'  File "{Path(last_words.__file__).parents[1]}/training/executor.py", line 281 in _train_until',
    '  File "/elsewhere/_ray_pkg/dray/training/executor.py", line 281 in _train_until',
    f'  File "{pytest.__file__}", line 1 in raises',
    '  File "/elsewhere/_ray_pkg/code/dray/model_def.py", line 12 in train_batch',
    '  File "/elsewhere/_ray_pkg/code/train.py", line 3 in <module>',
    *(f'  File "/elsewhere/code/deep.py", line {n} in f' for n in range(40)),
    "",
    "Extension modules: numpy, torch (total: 2)",
]


def log(directory: Path, *lines: str) -> Path:
    path = directory / "rank_1.log"
    path.write_text("".join(f"2026-11-21T19:02:02.123Z {line}\n" for line in lines))
    return path


def test_last_lines_are_shown_without_their_times(tmp_path: Path) -> None:
    printed = log(tmp_path, *(f"line {n}" for n in range(30)))
    assert last_printed(printed).splitlines() == [f"    | line {n}" for n in range(10, 30)]
    assert last_printed(printed, since=printed.stat().st_size) == "    | (nothing)"
    assert last_printed(tmp_path / "none") == "    | (nothing)"
    assert with_last_words("it died", printed).startswith(
        f"it died\n\nthe end of what it printed ({printed}):\n    | line 10\n"
    )


def test_of_a_crash_its_beginning_is_shown_and_the_users_own_line_is_found(tmp_path: Path) -> None:
    printed = log(tmp_path, "before", *CRASH)
    assert last_printed(printed).splitlines() == [f"    | {line}" for line in CRASH[:20]]
    assert with_last_words("it died", printed).splitlines()[:4] == [
        "it died: Segmentation fault",
        "  model_def.py:12, in train_batch",
        "",
        f"the end of what it printed ({printed}):",
    ]


def test_crash_of_an_earlier_process_is_not_that_of_the_last(tmp_path: Path) -> None:
    printed = log(tmp_path, *CRASH, "the next one prints this")
    assert with_last_words("it died", printed).startswith("it died\n\n")
    assert last_printed(printed).splitlines()[-1] == "    | the next one prints this"
