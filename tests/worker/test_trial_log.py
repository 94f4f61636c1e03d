"""All output of a trial is in its log file; output before and after it is not."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.worker.children import children
from dray.worker.log import tail, trial_log
from dray.worker.log.tail import log_tail, with_log_tail
from dray.worker.log.trial_log import LogWriter, log_to_stderr, redirect_output, reset_logging
from dray.worker.log.writer import ENDING, partial_secret

STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ")


def printed(path: Path) -> list[str]:
    """The lines of a log without their stamps, which each of them has."""
    lines = path.read_text().splitlines()
    assert all(STAMP.match(line) for line in lines), lines
    return [STAMP.sub("", line, count=1) for line in lines]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


def test_all_output_of_a_trial_is_in_its_file_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trial_3" / "logs" / "rank_0.log"
    print("before")
    for turn in range(2):
        with redirect_output(path):
            print("printed", turn)
            print("to stderr", file=sys.stderr)
            os.write(1, b"by the system\n")
            subprocess.run(["echo", "by a child"], check=True)
    print("after")
    sys.stdout.flush()
    lines = ["printed {}", "to stderr", "by the system", "by a child"]
    assert printed(path) == [line.format(turn) for turn in range(2) for line in lines]
    assert capfd.readouterr().out == "before\nafter\n"


def test_secrets_are_masked_even_if_printed_in_pieces(tmp_path: Path) -> None:
    secrets = ["c4n4ry-t0k3n", "c4n4ry-t0k3n-and-more", 'with "quotes"']
    with redirect_output(tmp_path / "log", secrets) as log:
        print("one c4n4ry-t0k3n, two c4n4ry-t0k3n, and c4n4ry")
        subprocess.run(["echo", "c4n4ry-t0k3n-and-more"], check=True)
        print(repr('with "quotes"'), '{"a": "with \\"quotes\\""}')
        for piece in ("pieces: c4n4", "ry-t0", "k3n\n", "none: c4n4", "bis\n", "no end: c4n4ry"):
            os.write(1, piece.encode())
            time.sleep(0.01)  # so each is probably read alone; the result does not depend on it
        assert log.tail().endswith("    | no end: c4n4ry")
    assert printed(tmp_path / "log") == [
        f"one {'x' * 12}, two {'x' * 12}, and c4n4ry",
        "x" * 21,
        f'\'{"x" * 13}\' {{"a": "{"x" * 15}"}}',
        f"pieces: {'x' * 12}",
        "none: c4n4bis",
        "no end: c4n4ry",
    ]


@pytest.mark.parametrize(
    ("data", "held"), [(b"", 0), (b"none", 0), (b"a", 1), (b"xaab", 3), (b"aabaab", 3), (b"aabaabc", 0), (b"aa", 2)]
)
def test_a_possible_beginning_of_a_secret_is_held_back(data: bytes, held: int) -> None:
    assert partial_secret(b"aabc", data) == held


def test_tail_shows_only_lines_of_this_redirection(tmp_path: Path) -> None:
    with redirect_output(tmp_path / "log") as log:
        print("an earlier attempt")
    with redirect_output(tmp_path / "log") as log:
        assert log.tail() == "    | (nothing)"
        for number in range(100):
            print("line", number)
        assert log.tail().splitlines() == [f"    | line {number}" for number in range(80, 100)]


def test_streams_are_restored_after_an_error_and_after_being_closed(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), redirect_output(tmp_path / "log"):
        sys.stdout.close()
        raise KeyError
    assert before == (sys.stdout, sys.stderr)


def test_a_programs_own_logging_config_takes_effect(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        with redirect_output(tmp_path / "log"):
            reset_logging()
            logging.basicConfig(level=logging.DEBUG, format="mine: %(message)s")
            logging.debug("small")
            log_to_stderr("%(levelname)s: %(message)s")
            logging.info("large")
            logging.debug("not shown")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    assert printed(tmp_path / "log") == ["mine: small", "INFO: large"]


KILLED = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from dray.worker.log.trial_log import appending, redirect_output

with redirect_output(Path(sys.argv[1])), appending(Path(sys.argv[1] + ".before")) as before:
    print("the trial before still writes", file=before)
    for number in range(20_000):
        print("line", number)
    os.write(2, b"by the system\\n")
    subprocess.run(["echo", "by a child"])
    print("the last word", end="", flush=True)
    exec(sys.argv[2])
"""


@pytest.mark.slow
def test_output_of_a_process_that_ends_in_its_trial_is_complete_and_tells_how_it_ended(tmp_path: Path) -> None:
    lines = [*(f"line {number}" for number in range(20_000)), "by the system", "by a child", "the last word"]
    ends = {"os._exit(3)": "exited with code 3", "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL"}
    for number, (end, ending) in enumerate(ends.items()):
        log = tmp_path / f"{number}.log"
        # Nobody waits for it meanwhile: an older kernel forgets an exit code then.
        with subprocess.Popen([sys.executable, "-c", KILLED, log, end]):
            wait_for(lambda: log.exists() and ENDING.encode() in log.read_bytes(), "its end")  # noqa: B023
        assert printed(log) == [*lines, f"{ENDING}{ending}"]
        assert printed(Path(f"{log}.before")) == ["the trial before still writes"]
        assert log_tail(log).endswith("    | the last word")
        assert with_log_tail("it died", log).startswith(f"it died: {ending}\n\n")
        assert with_log_tail("it died: no memory", log).startswith("it died: no memory\n\n")
        with redirect_output(log):
            print("another process")
        assert with_log_tail("it died", log).startswith("it died\n\n"), "how is not known of that one"


def test_each_line_has_the_time_when_it_was_printed(tmp_path: Path) -> None:
    times = []
    with redirect_output(tmp_path / "log") as log:
        for part in ("one\ntw", "o\n", "\n", "three"):
            before = time.time()
            os.write(1, part.encode())
            log.tail()  # waits until it is written
            times.append((before, time.time()))
    assert printed(tmp_path / "log") == ["one", "two", "", "three"]
    stamps = [
        datetime.datetime.fromisoformat(f"{line[:23]}+00:00").timestamp()
        for line in (tmp_path / "log").read_text().splitlines()
    ]
    within = [times[0], times[0], times[2], times[3]]
    assert all(before - 0.001 <= stamp <= after for stamp, (before, after) in zip(stamps, within, strict=True))


def test_the_writer_is_not_a_child_process(tmp_path: Path) -> None:
    with redirect_output(tmp_path / "log"):
        assert children() == {}


def test_a_killed_writer_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Distinguishes it from writers of other tests on this machine.
    mark = f"DRAY_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    log_writer = LogWriter()
    monkeypatch.setattr(trial_log, "log_writer", log_writer)

    def writers() -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    found.append(int(process.name))
        return found

    with redirect_output(tmp_path / "first"):
        print("one")
    [writer] = writers()
    # A killed process has no environment any more before its sockets are closed; this waits for both.
    end = os.pidfd_open(writer)
    os.kill(writer, signal.SIGKILL)
    assert select.select([end], [], [], 60)[0]
    os.close(end)
    for name in ("second", "third"):
        with redirect_output(tmp_path / name):
            print(name)
    assert [printed(tmp_path / name) for name in ("first", "second", "third")] == [["one"], ["second"], ["third"]]
    assert len(writers()) == 1
    log_writer.close()
    wait_for(lambda: not writers(), "the end of the writer that is no longer needed")


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
