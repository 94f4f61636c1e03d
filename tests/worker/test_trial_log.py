"""What a trial prints, by whatever way, is in its own file; what is printed before and after is not."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.worker.children import children
from dray.worker.log import trial_log
from dray.worker.log.trial_log import Stamper, log_as_python_starts, log_as_the_command_line, printed_to
from dray.worker.log.writer import _begun

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


def test_all_that_a_trial_prints_is_in_its_file_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trial_3" / "logs" / "rank_0.log"
    print("before")
    for turn in range(2):
        with printed_to(path):
            print("printed", turn)
            print("to stderr", file=sys.stderr)
            os.write(1, b"by the system\n")
            subprocess.run(["echo", "by a child"], check=True)
    print("after")
    sys.stdout.flush()
    lines = ["printed {}", "to stderr", "by the system", "by a child"]
    assert printed(path) == [line.format(turn) for turn in range(2) for line in lines]
    assert capfd.readouterr().out == "before\nafter\n"


def test_secrets_are_crossed_out_also_where_they_come_in_pieces(tmp_path: Path) -> None:
    secrets = ["c4n4ry-t0k3n", "c4n4ry-t0k3n-and-more", 'with "quotes"']
    with printed_to(tmp_path / "log", secrets) as log:
        print("one c4n4ry-t0k3n, two c4n4ry-t0k3n, and c4n4ry")
        subprocess.run(["echo", "c4n4ry-t0k3n-and-more"], check=True)
        print(repr('with "quotes"'), '{"a": "with \\"quotes\\""}')
        for piece in ("pieces: c4n4", "ry-t0", "k3n\n", "none: c4n4", "bis\n", "no end: c4n4ry"):
            os.write(1, piece.encode())
            time.sleep(0.01)  # most probably each is read by itself; the outcome does not depend on it
        assert log.end().endswith("    | no end: c4n4ry")
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
def test_what_may_be_the_beginning_of_a_secret_waits(data: bytes, held: int) -> None:
    assert _begun(b"aabc", data) == held


def test_end_shows_the_last_lines_of_this_block_alone(tmp_path: Path) -> None:
    with printed_to(tmp_path / "log") as log:
        print("an earlier attempt")
    with printed_to(tmp_path / "log") as log:
        assert log.end() == "    | (nothing)"
        for number in range(100):
            print("line", number)
        assert log.end().splitlines() == [f"    | line {number}" for number in range(80, 100)]


def test_streams_are_put_back_after_an_error_and_after_being_closed(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), printed_to(tmp_path / "log"):
        sys.stdout.close()
        raise KeyError
    assert before == (sys.stdout, sys.stderr)


def test_a_programs_own_logging_config_has_its_effect(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        with printed_to(tmp_path / "log"):
            log_as_python_starts()
            logging.basicConfig(level=logging.DEBUG, format="mine: %(message)s")
            logging.debug("small")
            log_as_the_command_line("%(levelname)s: %(message)s")
            logging.info("large")
            logging.debug("not shown")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    assert printed(tmp_path / "log") == ["mine: small", "INFO: large"]


KILLED = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from dray.worker.log.trial_log import printed_to

with printed_to(Path(sys.argv[1])):
    for number in range(20_000):
        print("line", number)
    os.write(2, b"by the system\\n")
    subprocess.run(["echo", "by a child"])
    print("the last word", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_that_a_killed_process_printed_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", KILLED, log], check=False).returncode == -signal.SIGKILL
        wait_for(lambda: log.read_bytes().endswith(b"the last word"), "what was printed last")
    lines = [*(f"line {number}" for number in range(20_000)), "by the system", "by a child", "the last word"]
    assert printed(log) == 2 * lines


def test_each_line_has_the_time_at_which_it_was_printed(tmp_path: Path) -> None:
    times = []
    with printed_to(tmp_path / "log") as log:
        for part in ("one\ntw", "o\n", "\n", "three"):
            before = time.time()
            os.write(1, part.encode())
            log.end()  # waits until it is written
            times.append((before, time.time()))
    assert printed(tmp_path / "log") == ["one", "two", "", "three"]
    stamps = [
        datetime.datetime.fromisoformat(f"{line[:23]}+00:00").timestamp()
        for line in (tmp_path / "log").read_text().splitlines()
    ]
    within = [times[0], times[0], times[2], times[3]]
    assert all(before - 0.001 <= stamp <= after for stamp, (before, after) in zip(stamps, within, strict=True))


def test_what_a_daemon_of_the_trial_prints_later_is_in_its_log_too(tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    daemon = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('from a daemon')"
    with printed_to(log):
        process = subprocess.Popen([sys.executable, "-c", daemon, go])
        print("from the trial")
    with printed_to(tmp_path / "other"):
        go.touch()
        process.wait()
    assert (printed(log), (tmp_path / "other").read_text()) == (["from the trial", "from a daemon"], "")


def test_the_writer_is_no_child_which_the_end_of_a_trial_would_end(tmp_path: Path) -> None:
    with printed_to(tmp_path / "log"):
        assert children() == {}


def test_a_killed_writer_has_a_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By which it is told from those of others on this machine.
    mark = f"DRAY_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    stamper = Stamper()
    monkeypatch.setattr(trial_log, "_stamper", stamper)

    def writers() -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    found.append(int(process.name))
        return found

    with printed_to(tmp_path / "first"):
        print("one")
    [writer] = writers()
    os.kill(writer, signal.SIGKILL)
    wait_for(lambda: not writers(), "its end")
    for name in ("second", "third"):
        with printed_to(tmp_path / name):
            print(name)
    assert [printed(tmp_path / name) for name in ("first", "second", "third")] == [["one"], ["second"], ["third"]]
    assert len(writers()) == 1
    stamper.close()
    wait_for(lambda: not writers(), "the end of the one that is needed no more")
