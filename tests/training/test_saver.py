"""Checkpoints are written one after another, while their caller goes on; what fails is heard of."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.storage import CheckpointStore, verify
from dray.storage.manifest import Listed
from dray.training.checkpoint import checkpointer, snapshot
from dray.training.checkpoint import files as checkpoint
from dray.training.checkpoint.checkpointer import Saver
from dray.training.checkpoint.files import Contents, Description
from dray.training.host import Report
from dray.training.progress import Progress


class NextTrial:
    """Implements `dray.training.host.Behind`."""

    def __init__(self, *, waits: bool = True) -> None:
        self.waits = waits
        self.calls: list[str] = []
        self.finish: Callable[[], None] | None = None

    def is_wanted(self, *, returns: bool) -> bool:
        self.calls.append(f"is wanted{' if it returns' * returns}")
        return self.waits

    def wait(self) -> None:
        self.calls.append("wait")

    def take(self, finish: Callable[[], None], nbytes: int, *, goes_on: bool) -> None:
        self.calls.append(f"take {nbytes} {goes_on}")
        self.finish = finish


class SlowHost:
    """The part of a host that a saver speaks to: it commits when it is let.

    Args:
        directory: of the checkpoints.
        free: from the beginning.
    """

    is_remote = False
    behind: NextTrial | None = None

    def __init__(self, directory: Path, *, free: bool = True) -> None:
        self.store = CheckpointStore(directory)
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.committed: list[int] = []
        self.published: list[Report] = []
        self.threads: list[threading.Thread] = []
        self.fault: BaseException | None = None
        self.stops = False
        if free:
            self.gate.set()

    def new_checkpoint(self, batches: int) -> Path:
        return self.store.stage(batches)

    def publish(self, report: Report) -> bool:
        self.published.append(report)
        return self.stops

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.gate.wait(30)
        if self.fault is not None:
            raise self.fault
        self.committed.append(report.batches)
        return self.store.commit(staging, report.batches, known)


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "AT_ONCE_BYTES", 0)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SlowHost]:
    host = SlowHost(tmp_path / "slow", free=False)
    yield host
    host.gate.set()


def of(state: dict[str, Any], batches: int = 1) -> Contents:
    return checkpoint.contents(
        state=state, progress=Progress(batches=batches), ranks=[], description=Description(metadata={})
    )


def save(saver: Saver, state: dict[str, Any], batches: int = 1, *, at_once: bool = False, **kwargs: Any) -> str | None:
    return saver.save(of(state, batches), Report(batches=batches, final=at_once), **kwargs)


def until(call: Callable[[], object]) -> None:
    """Call this until it raises."""
    for _ in range(10_000):
        call()
        time.sleep(0.001)


def files(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*.*")}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_saved_is_the_state_of_the_call_to_the_last_byte(
    device: str, on_gpu: bool, host: SlowHost, tmp_path: Path
) -> None:
    weights = torch.randn(1000, device=device)
    state = {"models_state_dict": [{"w": weights, "row": weights[3:7]}], "lr": {"epochs": [1, 2]}}
    there = SlowHost(tmp_path / "at once")
    at_once = save(Saver(there, on_gpu=on_gpu), state, at_once=True)
    background = Saver(host)
    assert save(background, state) is None
    weights.zero_()
    state["lr"]["epochs"].append(3)
    host.gate.set()
    background.finish()
    [(_, path)] = host.store.listed()
    assert at_once is not None
    assert files(verify(Path(path))) == files(verify(Path(at_once)))
    found = torch.load(Path(at_once) / checkpoint.STATE)
    assert found["models_state_dict"][0]["w"].device.type == "cpu", "also without map_location"


@pytest.mark.gpu
def test_a_last_checkpoint_from_a_gpu_is_written_from_memory_that_training_has_pinned(
    host: SlowHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, write, written = torch.randn(20_000_000, device="cuda"), torch.save, []

    def noting(value: Any, file: Any) -> None:
        written.extend(value.values())
        write(value, file)

    host.gate.set()
    mine = Saver(host, on_gpu=True)
    mine.snapshots.reserve({"w": weights})
    monkeypatch.setattr(torch, "save", noting)
    path = save(mine, {"w": weights}, at_once=True)
    [copy] = written
    assert copy.is_pinned()
    assert path is not None
    assert torch.equal(torch.load(Path(path) / checkpoint.STATE)["w"], weights.cpu())


def test_the_next_one_waits_for_the_last(host: SlowHost) -> None:
    mine = Saver(host)
    save(mine, {"x": torch.zeros(3)}, 1)
    assert host.begun.wait(30)
    threading.Timer(0.05, host.gate.set).start()
    save(mine, {"x": torch.ones(3)}, 2)
    assert host.committed[:1] == [1], "the first is there when the second begins"
    mine.finish()
    assert host.committed == [1, 2]
    assert threading.main_thread() not in host.threads


def test_a_stop_that_comes_after_a_background_write_is_heard(host: SlowHost) -> None:
    mine, host.stops = Saver(host), True
    save(mine, {"x": torch.zeros(3)})
    assert not mine.publish(Report(batches=1, decides=True))
    host.gate.set()
    assert mine.answer()
    assert not mine.answer()


@pytest.mark.parametrize("is_final", [False, True])
def test_a_trial_for_whose_slots_another_waits_leaves_before_its_checkpoint_is_written(
    host: SlowHost, is_final: bool
) -> None:
    host.behind = NextTrial()
    mine = Saver(host, on_gpu=True)
    report = Report(batches=1, decides=True, final=is_final)
    assert mine.save(of({"x": torch.zeros(3)}), report) is None
    assert mine.publish(report), "it leaves"
    mine.finish()
    asks = "is wanted" if is_final else "is wanted if it returns"
    assert host.behind.calls == [asks, "wait", asks, "wait", "take 12 True"]
    assert host.committed == host.published == []
    host.gate.set()
    assert host.behind.finish is not None
    host.behind.finish()
    assert (host.committed, [each.checkpoint for each in host.published]) == ([1], [host.store.id_of(1)])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_checkpoint_that_was_left_behind_and_fails_is_not_reported(host: SlowHost, code: int) -> None:
    """Not even if the disk is full: nothing is trained after it, which could be saved later."""
    host.behind = NextTrial()
    mine = Saver(host, on_gpu=True)
    host.fault = OSError(code, "no")
    host.gate.set()
    report = Report(batches=1, decides=True)
    mine.save(of({"x": torch.zeros(3)}), report)
    mine.publish(report)
    mine.finish()
    assert host.behind.finish is not None
    with pytest.raises(OSError, match="no"):
        host.behind.finish()
    assert host.published == []


def test_a_trial_for_whose_slots_none_waits_stays(host: SlowHost) -> None:
    host.gate.set()
    host.behind = NextTrial(waits=False)
    mine = Saver(host, on_gpu=True)
    report = Report(batches=1, decides=True, final=True)
    assert mine.save(of({"x": torch.zeros(3)}), report) == host.store.id_of(1)
    assert not mine.publish(report)
    mine.finish()
    assert host.behind.finish is None


def test_a_trial_stays_if_none_waits_any_more_once_the_earlier_copy_is_written(host: SlowHost) -> None:
    host.gate.set()
    host.behind = behind = NextTrial()

    def wait() -> None:
        behind.waits = False

    behind.wait = wait  # type: ignore[method-assign]
    report = Report(batches=1, decides=True, final=True)
    assert Saver(host, on_gpu=True).save(of({"x": torch.zeros(3)}), report) == host.store.id_of(1)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_trial_with_a_small_state_leaves_only_for_an_upload(host: SlowHost, is_remote: bool) -> None:
    checkpointer.AT_ONCE_BYTES = 13  # put back by the fixture
    host.gate.set()
    host.behind, host.is_remote = NextTrial(), is_remote
    report = Report(batches=1, decides=True)
    saved = Saver(host, on_gpu=True).save(of({"x": torch.zeros(3)}), report)
    assert (saved is None) == is_remote


def test_callers_that_ask_for_it_wait(host: SlowHost) -> None:
    """Small ones wait, too, unless the store is far away; and whoever looks at the files."""
    host.gate.set()
    seen: list[list[str]] = []
    mine = Saver(host)
    state = {"x": torch.zeros(3)}
    assert save(mine, state, 1, at_once=True) == host.store.id_of(1)
    assert save(mine, state, 2, written=lambda path: seen.append(sorted(p.name for p in path.iterdir()))) is not None
    assert seen == [["metadata.json", "progress.json", "state-dict.pth"]]
    checkpointer.AT_ONCE_BYTES = 13  # put back by the fixture
    assert save(mine, state, 3) == host.store.id_of(3)
    host.is_remote = True
    assert save(mine, state, 4) is None
    mine.finish()
    assert [thread is threading.main_thread() for thread in host.threads] == [True, True, True, False]


@pytest.mark.parametrize("method", ["wait", "finish", "save", "publish"])
def test_an_error_is_raised_by_whatever_comes_next_and_once(host: SlowHost, method: str) -> None:
    mine = Saver(host)
    host.fault = LookupError("fenced")
    host.gate.set()
    save(mine, {"x": torch.zeros(3)})
    assert host.begun.wait(30)
    calls: dict[str, Callable[[], object]] = {
        "wait": mine.wait,
        "finish": mine.finish,
        "save": lambda: save(mine, {}, 2),
        "publish": lambda: until(lambda: mine.publish(Report(batches=1))),
    }
    with pytest.raises(LookupError, match="fenced"):
        calls[method]()
    assert host.store.listed() == []
    assert list(host.store.trial_dir.iterdir()) == [], "what was written of it is gone"
    host.fault = None
    save(mine, {"x": torch.zeros(3)}, 3)
    mine.finish()
    assert host.committed == [3]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_full_disk_is_logged_and_training_continues(
    host: SlowHost, at_once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's own: the state's file is /dev/full for a while."""
    host.gate.set()
    mine = Saver(host)
    state = {"x": torch.zeros(100_000)}
    save(mine, state, 1, at_once=at_once)

    def no_room(batches: int) -> Path:
        staging = host.store.stage(batches)
        (staging / "state-dict.pth").symlink_to("/dev/full")
        return staging

    with monkeypatch.context() as full:
        full.setattr(host, "new_checkpoint", no_room)
        assert save(mine, state, 2, at_once=at_once) is None
        mine.wait()
        with pytest.raises(
            OSError,
            match=r"no room for a checkpoint in .*slow on .*; free some space \(the last checkpoint is intact\)",
        ):
            save(mine, state, 3, at_once=at_once)
            mine.finish()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(":")[0] for line in told] == [
        f"the checkpoint at batch {batches} was not saved; training continues" for batches in (2, 3)
    ]
    assert [batches for batches, _ in host.store.listed()] == [1], "the old one stands"
    assert len(list(host.store.trial_dir.iterdir())) == 1, "what was written of the others makes room"
    # With room again all is well, and nothing is said of before.
    save(mine, state, 4, at_once=at_once)
    mine.finish()
    assert [batches for batches, _ in host.store.listed()] == [4, 1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=["disk", "quota", "limit on files"])
def test_a_disk_that_has_no_room_for_a_directory_is_full_too(
    host: SlowHost, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_room(batches: int) -> Path:
        raise OSError(code, "No space left on device")

    monkeypatch.setattr(host, "new_checkpoint", no_room)
    mine = Saver(host)
    assert save(mine, {}) is None
    mine.wait()
    with pytest.raises(OSError, match="No space left"):
        mine.finish()


def test_other_errors_of_files_are_not_taken_for_a_full_disk(host: SlowHost) -> None:
    host.fault = OSError(errno.EIO, "input/output error")
    host.gate.set()
    with pytest.raises(OSError, match="input/output"):
        save(Saver(host), {}, at_once=True)


def test_after_another_error_what_is_being_written_is_completed(
    host: SlowHost, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Saver(host)
    save(mine, {"x": torch.zeros(3)}, 1)
    threading.Timer(0.05, host.gate.set).start()
    mine.abandon()
    assert host.committed == [1]
    host.fault = LookupError("fenced")
    save(mine, {"x": torch.zeros(3)}, 2)
    mine.abandon()
    assert "the last checkpoint was not saved: fenced" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux alone")
def test_the_writer_gives_way_to_those_that_train(host: SlowHost) -> None:
    nice: dict[str, int] = {}
    host.gate.set()
    commit = host.commit

    def noting(*args: Any) -> str:
        nice["writer"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return commit(*args)

    host.commit = noting  # type: ignore[method-assign]
    mine, before = Saver(host), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    save(mine, {"x": torch.zeros(3)})
    mine.finish()
    assert nice == {"writer": min(19, before + checkpointer.NICE)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_what_can_not_be_copied_is_written_at_once(host: SlowHost) -> None:
    host.gate.set()
    path = save(Saver(host), {"x": torch.eye(3).to_sparse()})
    assert path is not None
    assert torch.equal(checkpoint.read_state(Path(path), [])["x"].to_dense(), torch.eye(3))


def test_a_copy_that_there_is_no_memory_for_is_done_without(
    host: SlowHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(nbytes: int, pinned: bool) -> torch.UntypedStorage:
        raise RuntimeError("can't allocate memory")

    host.gate.set()
    monkeypatch.setattr(snapshot, "new_buffer", no_memory)
    assert save(Saver(host), {"x": torch.zeros(3)}) == host.store.id_of(1)
    assert "its state can't be copied: RuntimeError(\"can't allocate memory\")" in caplog.text
