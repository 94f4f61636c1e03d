"""The journal: complete lines, a single writer, recovery from SIGKILL, and those that released
versions have written."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from searchers import ASHA, AdaptiveASHA, Journal, JournalError, Method, PromotionASHA, RandomSearch, parse_space
from searchers.errors import DamagedFile
from searchers.search import Record
from searchers.testing import repeat
from tests.searchers.helpers import new_search

REPO = Path(__file__).parents[2]


def numbered(path: Path, count: int) -> list[dict[str, object]]:
    records: list[dict[str, object]] = [{"event": "reported", "n": n, "text": "é\n" * n} for n in range(count)]
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    return records


def test_appended_records_are_read_also_of_a_reopened_journal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "journal.jsonl"
    records = numbered(path, 5)
    assert Journal.read(path) == records
    with Journal(path) as journal:
        journal.append({"n": 3})
    assert Journal.read(path) == [*records, {"n": 3}]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    records = numbered(path, 2)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        assert Journal.read(path) == records[:kept]
        with Journal(path) as journal:
            assert path.read_bytes() == whole[: ends[kept - 1] if kept else 0], "the torn line is cut off"
            journal.append({"n": "next"})
        assert Journal.read(path) == [*records[:kept], {"n": "next"}]


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b'{"n":\0\0\0}\n', b"\xff\xfe\n", b"\n"])
def test_a_damaged_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "j"
    records = numbered(path, 3)
    before = path.read_bytes()
    path.write_bytes(before + tail)
    assert Journal.read(path) == records
    Journal(path).close()
    assert path.read_bytes() == before


def test_damage_in_the_middle_is_an_error_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    numbered(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"n"', b"'n'")
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        DamagedFile, match=rf"^{path}: line 2 is damaged: expected a JSON object, got .*; restore the file"
    ):
        Journal.read(path)


def test_opening_cuts_only_the_last_line_of_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"n":0}\nrubbish\n{"n":2}\n{"n":')
    Journal(path).close()
    assert path.read_bytes() == b'{"n":0}\nrubbish\n{"n":2}\n'


def test_records_that_are_not_strict_json_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for bad in ({"value": math.nan}, {"value": object()}):
            with pytest.raises((ValueError, TypeError)):
                journal.append(bad)
        journal.append({"n": 0})
    assert Journal.read(tmp_path / "j") == [{"n": 0}]


def test_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    journal.append({"n": 0})
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr("searchers.journal.os.write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append({"n": 1})
    journal.append({"n": 2})
    journal.close()
    assert Journal.read(tmp_path / "j") == [{"n": 0}, {"n": 2}]


def test_append_returns_after_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_write, real_fsync = os.write, os.fsync

    def write(descriptor: int, data: bytes) -> int:
        order.append("write")
        return real_write(descriptor, data)

    def fsync(descriptor: int) -> None:
        order.append("fsync")
        real_fsync(descriptor)

    with Journal(tmp_path / "j") as journal:
        monkeypatch.setattr("searchers.journal.os.write", write)
        monkeypatch.setattr("searchers.journal.os.fsync", fsync)
        journal.append({"n": 0})
    assert order == ["write", "fsync"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    def write(journal: Journal, who: int) -> None:
        for n in range(25):
            journal.append({"who": who, "n": n})

    with Journal(tmp_path / "j") as journal:
        threads = [threading.Thread(target=write, args=(journal, who)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = Journal.read(tmp_path / "j")
    assert len(read) == 100
    assert all([r["n"] for r in read if r["who"] == who] == list(range(25)) for who in range(4))


@pytest.mark.parametrize(("left", "lost"), [(0, 5), (3, 2), (4, 0), (5, 0), (9, 0)])
def test_records_that_were_on_disk_are_missed(tmp_path: Path, left: int, lost: int) -> None:
    """Not the last one alone: a line that is incomplete after a crash was never acknowledged."""
    path = tmp_path / "j"
    assert Journal.num_lost(path, left) is None, "there has been no writer"
    numbered(path, 5)
    assert Journal.num_lost(path, left) == lost


def test_a_loss_is_remembered_by_later_writers(tmp_path: Path) -> None:
    path = tmp_path / "j"
    numbered(path, 5)
    path.write_bytes(b"")
    numbered(path, 2)
    numbered(path, 1)
    assert Journal.num_lost(path, 3) == 5


def test_a_lost_last_record_is_not_counted_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for _ in range(3):
        numbered(path, 2)
        path.write_bytes(path.read_bytes()[:-3])
        Journal(path).close()
        assert Journal.num_lost(path, len(Journal.read(path))) == 0


# ---------------------------------------------------------------------------------------------------------------- locks


def test_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "j") as journal,
        pytest.raises(JournalError, match=f"is being written by another run, process {os.getpid()}"),
    ):
        Journal(tmp_path / "j")
    journal.close()  # a second time: nothing
    Journal(tmp_path / "j").close()


WRITER = """
import sys
from searchers import Journal
journal = Journal(sys.argv[1])
print("open", flush=True)
n = 0
while True:
    journal.append({"n": n, "text": "x" * (n * 97 % 20_000)})
    print(n, flush=True)                                         # acknowledged
    n += 1
"""


def spawn(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, cwd=REPO)


def test_another_process_is_locked_out_until_the_writer_is_killed(tmp_path: Path) -> None:
    with spawn(WRITER, tmp_path / "j") as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match=f"process {writer.pid}"):
            Journal(tmp_path / "j")
        writer.send_signal(signal.SIGKILL)
    Journal(tmp_path / "j").close()


@pytest.mark.parametrize("seed", range(3))
def test_writer_killed_at_any_moment_loses_nothing_it_acknowledged(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "j"
    with spawn(WRITER, path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        time.sleep(Random(seed).uniform(0.01, 0.15))
        writer.send_signal(signal.SIGKILL)
        acknowledged = writer.stdout.read().split("\n")[:-1]
    with Journal(path) as journal:
        read = Journal.read(path)
        assert [record["n"] for record in read] == list(range(len(read)))
        assert len(acknowledged) <= len(read) <= len(acknowledged) + 1
        journal.append({"n": len(read)})
    assert len(Journal.read(path)) == len(read) + 1


def test_records_without_wait_are_written_before_the_next_with_wait(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.append({"n": 0}, wait=False)
        journal.append({"n": 1}, wait=False)
        assert Journal.read(path) == []
        journal.append({"n": 2})
        assert Journal.read(path) == [{"n": 0}, {"n": 1}, {"n": 2}]
        journal.append({"n": 3}, wait=False)
    assert Journal.read(path) == [{"n": n} for n in range(4)]


def test_together_writes_once_at_its_end_and_other_threads_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    synced: list[int] = []
    with Journal(path) as journal:
        monkeypatch.setattr("os.fsync", synced.append)
        with journal.batch():
            journal.append({"n": 0})
            assert Journal.read(path) == []
            other = threading.Thread(target=journal.append, args=({"n": 1},))
            other.start()
            other.join()
            assert Journal.read(path) == [{"n": 0}, {"n": 1}]
            journal.append({"n": 2})
            journal.append({"n": 3})
            assert len(synced) == 1
        assert Journal.read(path) == [{"n": n} for n in range(4)]
        assert len(synced) == 2
        journal.append({"n": 4})
        assert len(synced) == 3


def test_writer_returns_the_process_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("searchers.journal._LOCK_TIMEOUT_S", 10.0)
    path = tmp_path / "j"
    assert Journal.writer(path) is None, "there is none yet"
    with Journal(path):
        assert Journal.writer(path) == os.getpid()
    assert Journal.writer(path) is None
    # `writer` holds the lock for a moment, here for longer than usual; opening the journal waits for it.
    asker = os.open(tmp_path / "j.lock", os.O_RDONLY)
    fcntl.flock(asker, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, [asker]).start()
    with Journal(path):
        assert Journal.writer(path) == os.getpid()


JOURNALS = Path(__file__).parent / "journals"
SGD = {"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}}
SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "opt": {"type": "categorical", "vals": [SGD, {"name": "adam"}]},
    }
)
METHODS: dict[str, Callable[[], Method]] = {
    "random": lambda: RandomSearch(max_trials=5, max_concurrent_trials=2, max_length=4),
    "asha": lambda: ASHA(max_trials=10, max_length=16, num_rungs=3, max_concurrent_trials=4),
    "promotion": lambda: PromotionASHA(max_trials=10, max_length=16, num_rungs=3, divisor=2, max_concurrent_trials=3),
    "adaptive": lambda: AdaptiveASHA(
        max_trials=12, max_length=16, divisor=2, variant="promotion", max_concurrent_trials=4
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_recorded_journal_replays(name: str) -> None:
    """`replay` compares every decision with the recorded one."""
    log: list[Record] = []
    search = new_search(METHODS[name](), SPACE, log, smaller_is_better=False)
    search.replay(Journal.read(JOURNALS / f"{name}.jsonl"))
    assert log == []
    assert search.done is not None
    assert search.progress() == 1


@pytest.mark.parametrize("name", METHODS)
def test_the_same_events_are_written_as_the_same_records(name: str) -> None:
    """Byte for byte, hyperparameters and their seeds included, but for the rungs, which the recorded ones had not."""
    lines = (JOURNALS / f"{name}.jsonl").read_text().splitlines()
    written: list[Record] = []
    search = new_search(METHODS[name](), SPACE, written, smaller_is_better=False)
    for line in lines:
        repeat(search, json.loads(line))
    for record in written:
        assert (record.pop("rungs", None) is None) == (record["event"] not in ("start", "extended"))
    assert [json.dumps(record, allow_nan=False, separators=(",", ":")) for record in written] == lines
