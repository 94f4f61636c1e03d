"""The last lines of a trial's log, in the error of a process that died."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from dray.worker.log import tail
from dray.worker.log.tail import log_tail, with_log_tail

CRASH = [
    "Fatal Python error: Segmentation fault",
    "",
    "Stack (most recent call first):",
    f'  File "{Path(tail.__file__).parents[1]}/training/executor.py", line 281 in _train_until',
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


def test_last_lines_are_shown_without_timestamps(tmp_path: Path) -> None:
    printed = log(tmp_path, *(f"line {n}" for n in range(30)))
    assert log_tail(printed).splitlines() == [f"    | line {n}" for n in range(10, 30)]
    assert log_tail(printed, start=printed.stat().st_size) == "    | (nothing)"
    assert log_tail(tmp_path / "none") == "    | (nothing)"
    assert with_log_tail("it died", printed).startswith(
        f"it died\n\nthe last lines of its log ({printed}):\n    | line 10\n"
    )


def test_a_crash_is_shown_from_its_beginning_with_the_users_line(tmp_path: Path) -> None:
    printed = log(tmp_path, "before", *CRASH)
    assert log_tail(printed).splitlines() == [f"    | {line}" for line in CRASH[:20]]
    assert with_log_tail("it died", printed).splitlines()[:4] == [
        "it died: Segmentation fault",
        "  model_def.py:12, in train_batch",
        "",
        f"the last lines of its log ({printed}):",
    ]


def test_a_crash_of_an_earlier_process_is_ignored(tmp_path: Path) -> None:
    printed = log(tmp_path, *CRASH, "the next one prints this")
    assert with_log_tail("it died", printed).startswith("it died\n\n")
    assert log_tail(printed).splitlines()[-1] == "    | the next one prints this"


def test_what_the_writer_has_still_to_write_is_awaited(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    with log.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_SH)

        def write() -> None:
            asked.wait(30)
            file.write(b"2026-11-21T19:02:02.123Z just before its end\n")
            fcntl.flock(file, fcntl.LOCK_UN)

        asked = threading.Event()
        writer = threading.Thread(target=write)
        writer.start()
        threading.Timer(0.05, asked.set).start()
        assert with_log_tail("it died", log).endswith("    | just before its end")
        writer.join()


def test_a_log_that_a_child_still_holds_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "AWAITED_S", 0.05)
    log = tmp_path / "rank_0.log"
    with log.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.write(b"2026-11-21T19:02:02.123Z so far\n")
        assert with_log_tail("it died", log).endswith("    | so far")
