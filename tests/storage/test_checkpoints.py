"""Commits are atomic: a checkpoint is complete, or does not exist."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.storage import CheckpointError, CheckpointStore, verify
from dray.storage.disk import force_to_disk
from tests.storage.power import Disk


def save(store: CheckpointStore, batches: int, content: str = "state") -> Path:
    staging = store.stage(batches)
    (staging / "state-dict.pth").write_text(content)
    (staging / "rng").mkdir()
    (staging / "rng" / "rank_0.pth").write_text("rng")
    return Path(store.commit(staging, batches))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / "manifest.json").unlink(), "never completed"),
        (lambda path: (path / "manifest.json").write_text('{"format'), "is damaged"),
        (lambda path: (path / "state-dict.pth").unlink(), "state-dict.pth is missing"),
        (lambda path: (path / "state-dict.pth").write_text("states"), "has 6 bytes, but its manifest says 5"),
        (lambda path: (path / "state-dict.pth").write_text("stale"), "does not match its checksum"),
    ],
)
def test_damage_is_named_in_the_error(tmp_path: Path, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    damaged = save(CheckpointStore(tmp_path), 6)
    damage(damaged)
    with pytest.raises(CheckpointError, match=says):
        verify(damaged)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to(path)], ids=["a pipe", "a link to itself"])
def test_what_is_no_file_is_missing(tmp_path: Path, put: Callable[[Path], object]) -> None:
    store = CheckpointStore(tmp_path)
    before, damaged = save(store, 6, content=""), save(store, 7, content="")
    (damaged / "state-dict.pth").unlink()
    put(damaged / "state-dict.pth")
    assert store.latest() == str(before)


def test_a_checkpoint_just_found_is_not_verified_again_when_opened(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 5)
    latest = store.latest()
    assert latest is not None
    (path / "state-dict.pth").write_text("stale")
    assert store.open(latest) == path, "not read again"
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        store.open(latest)


def test_the_error_about_a_newer_format_asks_to_upgrade(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 5)
    (path / "manifest.json").write_text('{"format_version": 99, "files": {}}')
    with pytest.raises(CheckpointError, match="format version 99, but this version of dray reads 1; upgrade dray"):
        verify(path)


def test_temporary_files_of_a_killed_writer_are_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 5)
    store.stage(6)
    (tmp_path / ".replaced-checkpoint_4-x").mkdir()
    store.sweep()
    assert list(tmp_path.iterdir()) == [path]


def test_a_flushed_checkpoint_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = CheckpointStore(tmp_path / "trial")
    save(store, 5)
    save(store, 10)
    store.force_to_disk(5)
    left = disk.leaves(store.trial_dir, tmp_path / "left")
    assert CheckpointStore(left).latest() == str(left / "checkpoint_5")
    store.force_to_disk(10)
    left = disk.leaves(store.trial_dir, tmp_path / "later")
    assert CheckpointStore(left).latest() == str(left / "checkpoint_10")
    with pytest.raises(FileNotFoundError):
        store.force_to_disk(15)


def test_a_checkpoint_is_replaced_only_by_one_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = CheckpointStore(tmp_path / "trial")
    save(store, 5, "before")
    staging = store.stage(5)
    left: list[Path] = []

    def rename(path: Path, target: Path) -> Path:
        left.append(disk.leaves(staging, tmp_path / f"left{len(left)}"))
        os.rename(path, target)
        return target

    (staging / "state-dict.pth").write_text("after")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        store.commit(staging, 5)
    named, moved_away, moved = left
    assert not list(named.iterdir()), "the manifest gets its name"
    for path in (moved_away, moved):
        assert (verify(path) / "state-dict.pth").read_text() == "after"


def test_symbolic_links_are_not_followed_nor_pipes_opened(tmp_path: Path) -> None:
    """Code may have some links, also broken ones."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    force_to_disk(tmp_path)


def test_a_link_in_place_of_a_checkpoint_is_deleted_not_its_target(tmp_path: Path) -> None:
    """A trial can make one."""
    mine, theirs = CheckpointStore(tmp_path / "mine"), CheckpointStore(tmp_path / "theirs")
    checkpoint = save(theirs, 5)
    save(mine, 4)
    Path(mine.id_of(5)).symlink_to(checkpoint)
    mine.delete(5)
    assert theirs.latest() == str(checkpoint)
    assert [batches for batches, _ in mine.listed()] == [4]


def test_file_systems_without_fsync_of_directories_are_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failure = os.fsync, errno.EINVAL

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(failure, os.strerror(failure))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    force_to_disk(tmp_path)
    failure = errno.EIO
    with pytest.raises(OSError, match=os.strerror(failure)):
        force_to_disk(tmp_path)
