"""Checkpoint stores in a directory, in S3 and through fsspec; atomic commits, stored logs, temporary directories."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dray.storage import (
    CheckpointError,
    CheckpointStore,
    Location,
    RemoteDirectory,
    StorageError,
    checkpoints,
    logs,
    opened,
    remote,
    store_at,
    verify,
)
from dray.storage.checkpoints import RemoteStore
from dray.storage.disk import force_to_disk
from dray.storage.logs import LogUploader, fetch_logs, stored_as
from tests.storage.power import Disk
from tests.storage.s3 import LocalS3, Wire

STATE = bytes(range(256)) * 64


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    server = LocalS3()
    yield server
    server.stop()


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow), "fsspec"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty place for a trial."""
    match request.param:
        case "directory":
            return Location.of(tmp_path / "trial_7")
        case "s3":
            server: LocalS3 = request.getfixturevalue("s3")
            return server.place(tmp_path.name, "trial_7")
    return Location.of(f"memory://results/{tmp_path.name}/trial_7")


@pytest.fixture
def store(root: Location, tmp_path: Path) -> CheckpointStore:
    return store_at(root, tmp_path / "scratch")


def save(store: CheckpointStore, batches: int, state: bytes = STATE, *, keep: bool = False, **more: bytes) -> str:
    staging = store.stage(batches)
    (staging / "state-dict.pth").write_bytes(state)
    (staging / "progress.json").write_text(json.dumps({"batches": batches}))
    (staging / "rng").mkdir()
    (staging / "rng" / "rank_0.pth").write_bytes(b"rng of %d" % batches)
    for name, content in more.items():
        (staging / name).write_bytes(content)
    return store.commit(staging, batches, keep=keep)


FILES = ["manifest.json", "progress.json", "rng/rank_0.pth", "state-dict.pth"]


class Raw:
    """The files of a place as they are, to be damaged."""

    def __init__(self, place: Location) -> None:
        self.filesystem, self.path = place.filesystem()

    def read(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as file:
            return bytes(file.read())

    def write(self, name: str, content: bytes) -> None:
        with self.filesystem.open_output_stream(f"{self.path}/{name}") as file:
            file.write(content)

    def delete(self, name: str) -> None:
        self.filesystem.delete_file(f"{self.path}/{name}")


def test_a_committed_checkpoint_is_listed_found_and_opened(
    store: CheckpointStore, root: Location, tmp_path: Path
) -> None:
    assert (store.latest(), store.listed(), store.find(3)) == (None, [], None)
    ids = [save(store, batches) for batches in (9, 10)]
    assert ids == [str(root.child(f"checkpoint_{batches}")) for batches in (9, 10)]
    assert store.listed() == [(10, ids[1]), (9, ids[0])]
    assert store.latest() == store.find(10) == ids[1]
    directory = store.open(ids[0])
    assert sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()) == FILES
    assert (directory / "state-dict.pth").read_bytes() == STATE
    assert json.loads(store.read(9, "progress.json")) == {"batches": 9}
    store.close()
    assert list(tmp_path.rglob(".*")) == [], "nothing is left of staging and opening"


def test_a_store_can_be_pickled(store: CheckpointStore) -> None:
    save(store, 9)
    assert pickle.loads(pickle.dumps(store)).latest() == store.id_of(9)
    assert store.batches_of(store.id_of(9)) == 9


def test_a_checkpoint_of_the_same_name_is_replaced(store: CheckpointStore) -> None:
    save(store, 9, b"old", notes=b"of the old one")
    assert (store.open(store.id_of(9)) / "notes").exists()
    save(store, 9, b"new")
    assert (store.open(store.id_of(9)) / "state-dict.pth").read_bytes() == b"new"
    assert not (store.open(store.id_of(9)) / "notes").exists()


def test_committing_the_same_checkpoint_again_changes_nothing(store: CheckpointStore) -> None:
    assert save(store, 9) == save(store, 9) == store.latest()


def test_delete_removes_one_checkpoint_alone(store: CheckpointStore) -> None:
    for batches in (8, 9, 10):
        save(store, batches)
    store.delete(9)
    store.delete(9)
    assert [batches for batches, _ in store.listed()] == [10, 8]
    assert store.find(9) is None
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        store.open(store.id_of(9))


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[Raw, str], None]] = {
    "truncated": lambda raw, name: raw.write(name, raw.read(name)[:-1]),
    "emptied": lambda raw, name: raw.write(name, b""),
    "flipped": lambda raw, name: raw.write(name, flipped(raw.read(name))),
    "deleted": lambda raw, name: raw.delete(name),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_file_makes_readers_fall_back(
    store: CheckpointStore, root: Location, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, damaged = save(store, 9), save(store, 10)
    DAMAGES[damage](Raw(root.child("checkpoint_10")), name)
    for _ in range(2):
        assert store.latest() == before
        with pytest.raises(ValueError, match=r"damaged|never completed"):
            store.open(damaged)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"skipping a checkpoint: {damaged}")


@pytest.mark.parametrize("name", ["extra.pth", "gradients/rank_0.pth", "code/model_def.py", "state_dict.pth"])
def test_an_unlisted_file_is_damage(store: CheckpointStore, root: Location, name: str) -> None:
    before, damaged = save(store, 9), save(store, 10)
    raw = Raw(root.child("checkpoint_10"))
    raw.filesystem.create_dir(str(Path(raw.path, name).parent), recursive=True)
    raw.write(name, b"more")
    assert store.latest() == before
    with pytest.raises(ValueError, match=rf"{name} is not in its manifest"):
        store.open(damaged)


def test_a_manifest_of_another_checkpoint_is_damage(store: CheckpointStore, root: Location) -> None:
    before, _ = save(store, 9), save(store, 10)
    raw = Raw(root)
    raw.write("checkpoint_10/manifest.json", raw.read("checkpoint_9/manifest.json"))
    assert store.latest() == before


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"7",
        b"{}",
        b'{"format_version": 1}',
        b'{"format_version": 1, "files": []}',
        b'{"format_version": 1, "files": {"a": 3}}',
        b'{"format_version": 1, "files": {"a": {"size": "3", "sha256": ""}}}',
        b'{"format_version": 1, "files": {}}',
        b'{"format_version": null, "files": {}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=range(11),
)
def test_a_malformed_manifest_is_damage(tmp_path: Path, manifest: bytes) -> None:
    store = CheckpointStore(tmp_path)
    before, damaged = save(store, 9), save(store, 10)
    (Path(damaged) / "manifest.json").write_bytes(manifest)
    assert store.latest() == before


def test_a_flipped_bit_in_a_manifest_is_never_misread(tmp_path: Path) -> None:
    """Whichever bit is turned: the checkpoint is refused, or it reads as what was written."""
    store = CheckpointStore(tmp_path)
    staging = store.stage(9)
    (staging / "x").write_bytes(b"x")
    path = Path(store.commit(staging, 9)) / "manifest.json"
    whole = path.read_bytes()
    for index in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:index] + bytes([whole[index] ^ 1 << bit]) + whole[index + 1 :])
            if store.find(9) is not None:
                assert json.loads(path.read_bytes()) == json.loads(whole)


# ---------------------------------------------------------------------------------------------------- object stores


@pytest.mark.slow
def test_any_checkpoint_is_opened_by_its_uri(s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the environment's credentials."""
    store = RemoteStore(s3.place(tmp_path.name), tmp_path)
    checkpoint = save(store, 9)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with opened(checkpoint) as directory:
        assert (directory / "state-dict.pth").read_bytes() == STATE
    assert not directory.exists()
    assert (CheckpointStore(tmp_path / "trial").open(checkpoint) / "progress.json").exists()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    with opened(f"s3://{s3.bucket}/{tmp_path.name}/checkpoint_9") as directory:
        assert (directory / "state-dict.pth").read_bytes() == STATE


@pytest.mark.slow
def test_processes_of_a_machine_download_a_checkpoint_once(
    s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(s3.place(tmp_path.name), tmp_path / "scratch")
    checkpoint = save(store, 9)
    fetched: list[str] = []
    real = RemoteDirectory.download

    def download(remote: RemoteDirectory, directory: Path, names: Any) -> None:
        fetched.append(str(remote.location))
        real(remote, directory, names)

    monkeypatch.setattr(RemoteDirectory, "download", download)
    found: set[Path] = set()
    ranks = [threading.Thread(target=lambda: found.add(store.open(checkpoint))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert (len(found), fetched) == (1, [checkpoint])


@pytest.mark.slow
def test_an_interrupted_upload_is_not_a_checkpoint(s3: LocalS3, tmp_path: Path) -> None:
    """The connection breaks at some place of what travels, and does not come back."""
    store = RemoteStore(s3.place(tmp_path.name), tmp_path / "whole")
    before = save(store, 9)
    state = STATE * 64

    def upload(cut_after: float) -> tuple[str | None, int]:
        wire = Wire(s3.port, cut_after)
        place = s3.place(tmp_path.name, port=wire.port)
        try:
            return save(RemoteStore(place, tmp_path / "cut", patience_s=0), 10, state), wire.carried
        except StorageError:
            return None, wire.carried
        finally:
            wire.close()

    done, total = upload(float("inf"))
    assert done is not None
    assert store.latest() == store.id_of(10)
    assert total > len(state) == 1 << 20
    for cut in (0, total // 2, total - 2):
        store.delete(10)
        assert upload(cut) == (None, cut)
        assert store.find(10) is None, f"cut after {cut} bytes"
        assert store.latest() == before
    # And what such an upload has left is in nobody's way.
    assert save(store, 10, state) == store.latest()


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_writer_that_has_lost_its_trial_commits_nothing(store: CheckpointStore, allowed: int) -> None:
    """A long upload may outlast its permission."""
    before, asked, staging = save(store, 9), [], store.stage(10)
    (staging / "state-dict.pth").write_bytes(STATE)

    def confirm() -> None:
        asked.append(store.listed())
        if len(asked) > (allowed if store.is_remote else 0):
            raise LookupError("it runs elsewhere")

    with pytest.raises(LookupError):
        store.commit(staging, 10, confirm=confirm)
    assert store.latest() == before
    if store.is_remote and allowed:
        assert [batches for batches, _ in asked[-1]] == [10, 9], "it is asked again after the upload"


def test_a_process_resumes_from_what_it_has_uploaded_last_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [RemoteStore(Location.of(f"memory://kept{tmp_path}/{n}"), tmp_path / f"{n}") for n in range(2)]
    downloads, download = [], RemoteDirectory.download
    monkeypatch.setattr(RemoteDirectory, "download", lambda self, *to: (downloads.append(to), download(self, *to)))

    def resumed(store: RemoteStore) -> bool:
        """Whether a new lease of the trial needs no download."""
        downloads.clear()
        store.sweep()
        latest = store.open_latest()
        assert latest is not None
        assert (latest[1] / "state-dict.pth").read_bytes() == STATE
        store.close()
        return not downloads

    for store in stores:
        save(store, 8, keep=True)
        store.close()
    assert [resumed(store) for store in stores] == [False, True], "one copy is kept"
    assert [path for store in stores for path in store.trial_dir.iterdir() if path.is_dir()] == [], "until it is closed"
    save(stores[0], 9, keep=True)
    RemoteStore(stores[0].root, tmp_path / "another machine").delete(9)
    save(RemoteStore(stores[0].root, tmp_path / "another machine"), 9, progress=b"another one of this name")
    assert not resumed(stores[0])
    save(stores[1], 9, keep=True)
    checkpoints.forget_copy()
    assert not resumed(stores[1])


@pytest.mark.slow
def test_an_unreachable_store_is_retried_until_it_is_back(
    s3: LocalS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RemoteStore(s3.place(tmp_path.name), tmp_path / "scratch")
    before = save(store, 9)

    class Returns(logging.Handler):
        """Starts the store at the first warning that it can't be reached."""

        def emit(self, record: logging.LogRecord) -> None:
            s3.start()
            logging.getLogger("dray.storage").removeHandler(self)

    s3.stop()
    logging.getLogger("dray.storage").addHandler(Returns())
    assert save(store, 10) == store.latest()
    assert [batches for batches, _ in store.listed()] == [10, 9]
    assert (store.open(before) / "state-dict.pth").read_bytes() == STATE
    [warning] = [record.getMessage() for record in caplog.records]
    assert "; retrying for 600 s" in warning


def test_attempts_and_chunks_count_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(Location.of(f"memory://results{tmp_path}"), tmp_path / "scratch")
    real, seen = Location.filesystem, []

    def filesystem(place: Location) -> Any:
        seen.append(store.transferred)
        if len(seen) < 4:
            raise ConnectionError("away")
        return real(place)

    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(Location, "filesystem", filesystem)
    assert store.open(save(store, 10)).is_dir()
    assert seen == sorted(set(seen))
    assert store.transferred > len(seen) + 4


@pytest.mark.slow
def test_retries_end_with_an_error(s3: LocalS3, tmp_path: Path) -> None:
    s3.stop()
    try:
        store = RemoteStore(s3.place(tmp_path.name), tmp_path / "scratch", patience_s=0)
        with pytest.raises(StorageError, match=r"can't list s3://bucket/.*: .*connect"):
            save(store, 10)
    finally:
        s3.start()


@pytest.mark.slow
def test_a_missing_bucket_fails_at_once(s3: LocalS3) -> None:
    place = Location(Location.of(s3.uri("results", bucket="elsewhere")).uri, s3.place().secrets)
    with pytest.raises(StorageError, match=r"can't write to s3://elsewhere/results.*NO_SUCH_BUCKET"):
        RemoteDirectory(place).probe()


@pytest.mark.slow
def test_wrong_credentials_fail_at_once_and_are_not_shown(s3: LocalS3) -> None:
    place = Location(s3.place("results").uri, (("access_key", "WRONG"), ("secret_key", "S3CR3T")))
    s3.demand_keys(True)
    try:
        with pytest.raises(StorageError, match=r"can't write to s3://bucket/results.*INVALID_ACCESS_KEY_ID") as raised:
            RemoteDirectory(place).probe()
    finally:
        s3.demand_keys(False)
    assert "S3CR3T" not in str(raised.value)


def test_a_probe_leaves_nothing(root: Location) -> None:
    if not root.is_local:
        RemoteDirectory(root).probe()
        assert RemoteDirectory(root).sizes() == {}


@pytest.mark.slow
def test_a_download_writes_nothing_outside_its_directory(s3: LocalS3, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a valid name in a checkpoint"):
        RemoteDirectory(s3.place("x")).download(tmp_path / "in", ["../out"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "uri", "secrets"),
    [
        ("s3://bucket/a/", "s3://bucket/a", {}),
        ("S3://bucket", "s3://bucket", {}),
        ("s3://KEY:SEC@bucket/a", "s3://bucket/a", {"access_key": "KEY", "secret_key": "SEC"}),
        ("s3://bucket/a@b", "s3://bucket/a@b", {}),
        ("file:///mnt/a", "/mnt/a", {}),
        ("relative", "relative", {}),
    ],
)
def test_a_location_is_a_path_or_a_uri(given: str, uri: str, secrets: dict[str, str]) -> None:
    place = Location.of(given)
    assert (place.uri, dict(place.secrets)) == (uri, secrets)
    assert Location.of(place) is place


def test_child_locations_keep_the_query_and_the_secrets() -> None:
    place = Location("s3://bucket/a?region=x", (("secret_key", "S"),)).child("b", "c")
    assert (place.uri, place.secrets, place.name) == ("s3://bucket/a/b/c?region=x", (("secret_key", "S"),), "c")
    assert Location("s3://bucket/z?region=x").with_secrets_of(place).secrets == place.secrets
    for other in ("s3://other/z?region=x", "s3://bucket/z", "gs://bucket/z?region=x", "/bucket/z"):
        assert Location(other).with_secrets_of(place).secrets == ()


@pytest.mark.skipif(importlib.util.find_spec("adlfs") is not None, reason="it is installed")
def test_the_error_about_a_missing_filesystem_package_names_it() -> None:
    with pytest.raises(
        StorageError, match=r"az:// needs a package that is not installed: .*pip " r"install 'dray-train\[azure\]'"
    ):
        RemoteDirectory(Location.of("az://container/results")).probe()


MORNING, EVENING = "2026-11-21T09:02:02.123Z", "2026-11-21T19:02:02.456Z"


def log(directory: Path, *lines: str, rank: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{rank}.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def trial(tmp_path: Path) -> Location:
    return Location.of(f"memory://results/{tmp_path.name}/trial_3")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


def names(trial: Location) -> list[str]:
    return sorted(RemoteDirectory(trial).sizes())


def copied(path: Path, trial: Location) -> None:
    uploader = LogUploader()
    uploader.begin(path, trial)
    uploader.close()


def test_the_name_in_the_store_has_the_time_of_the_first_line(tmp_path: Path) -> None:
    assert stored_as(log(tmp_path, f"{MORNING} one", f"{EVENING} two")) == "rank_0.20261121T090202.123Z.log"
    assert stored_as(log(tmp_path, "of an older version", rank=12)) == "rank_12.log"


def test_logs_of_several_machines_are_stored_and_fetched_once_each(tmp_path: Path, trial: Location) -> None:
    first = log(tmp_path / "first", f"{MORNING} one")
    copied(first, trial)
    log(tmp_path / "first", f"{MORNING} one", f"{MORNING} two")
    copied(first, trial)
    copied(log(tmp_path / "second", f"{EVENING} three"), trial)
    assert names(trial) == ["logs/rank_0.20261121T090202.123Z.log", "logs/rank_0.20261121T190202.456Z.log"]
    fetch_logs(trial, tmp_path / "nowhere", tmp_path / "all")
    assert [path.read_text() for path in sorted((tmp_path / "all").iterdir())] == [
        f"{MORNING} one\n{MORNING} two\n",
        f"{EVENING} three\n",
    ]
    fetch_logs(trial, tmp_path / "first", tmp_path / "others")
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["rank_0.20261121T190202.456Z.log"]


def test_a_log_is_uploaded_while_its_trial_runs(
    tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "EVERY_S", 0.01)
    uploader = LogUploader()
    path = tmp_path / "rank_0.log"
    remote = RemoteDirectory(trial.child("logs"))
    uploader.begin(path, trial)  # there is no such file yet
    for lines in ([f"{MORNING} one"], [f"{MORNING} one", f"{EVENING} two"]):
        log(tmp_path, *lines)
        until(lambda: bool(remote.sizes()) and remote.read(stored_as(path)) == path.read_bytes())
    uploader.end(path)
    uploader.close()
    uploader.end(path)


def test_an_unreachable_store_is_one_warning_and_gets_the_log_later(
    tmp_path: Path, trial: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "EVERY_S", 0.01)
    write, tries = RemoteDirectory.write, []

    def refused(self: RemoteDirectory, name: str, content: bytes) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise StorageError("no store")
        write(self, name, content)

    monkeypatch.setattr(RemoteDirectory, "write", refused)
    uploader = LogUploader()
    path = log(tmp_path, f"{MORNING} one")
    with caplog.at_level(logging.WARNING):
        uploader.begin(path, trial)
        uploader.end(path)
        until(lambda: len(tries) == 3)
        uploader.close()
    assert names(trial) == ["logs/rank_0.20261121T090202.123Z.log"]
    assert [record.getMessage() for record in caplog.records] == [
        "can't upload the trials' logs to the checkpoint storage, will retry: no store",
        "the trials' logs are uploaded to the checkpoint storage again, and none is missing",
    ]


HOLD = """
from dray.storage.disk import scratch
with scratch("{name}") as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    input()
"""
MAKE = "from dray.storage.disk import scratch\nwith scratch('next') as directory: print(directory)"


def start(folder: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a directory, two minutes ago."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(name=name)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    made_at = directory.stat().st_mtime - 120
    os.utime(directory, (made_at, made_at))
    return process, directory


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    killed, left = start(tmp_path, "killed")
    living, used = start(tmp_path, "living")
    killed.kill()
    killed.wait()
    made = subprocess.check_output(
        [sys.executable, "-c", MAKE], env={**os.environ, "TMPDIR": str(tmp_path)}, text=True
    ).strip()
    assert Path(made).parent == tmp_path
    assert sorted(tmp_path.iterdir()) == [used, others], "its own was removed at the end"
    assert (used / "file").exists()
    living.communicate("\n")
    assert list(tmp_path.iterdir()) == [others]
    assert left != used


def saved_as(store: CheckpointStore, batches: int, content: str = "state") -> Path:
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
    damaged = saved_as(CheckpointStore(tmp_path), 6)
    damage(damaged)
    with pytest.raises(CheckpointError, match=says):
        verify(damaged)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to(path)], ids=["a pipe", "a link to itself"])
def test_what_is_no_file_is_missing(tmp_path: Path, put: Callable[[Path], object]) -> None:
    store = CheckpointStore(tmp_path)
    before, damaged = saved_as(store, 6, content=""), saved_as(store, 7, content="")
    (damaged / "state-dict.pth").unlink()
    put(damaged / "state-dict.pth")
    assert store.latest() == str(before)


def test_a_checkpoint_just_found_is_not_verified_again_when_opened(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = saved_as(store, 5)
    latest = store.latest()
    assert latest is not None
    (path / "state-dict.pth").write_text("stale")
    assert store.open(latest) == path, "not read again"
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        store.open(latest)


def test_the_error_about_a_newer_format_asks_to_upgrade(tmp_path: Path) -> None:
    path = saved_as(CheckpointStore(tmp_path), 5)
    (path / "manifest.json").write_text('{"format_version": 99, "files": {}}')
    with pytest.raises(CheckpointError, match="format version 99, but this version of dray reads 1; upgrade dray"):
        verify(path)


def test_temporary_files_of_a_killed_writer_are_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = saved_as(store, 5)
    store.stage(6)
    (tmp_path / ".replaced-checkpoint_4-x").mkdir()
    store.sweep()
    assert list(tmp_path.iterdir()) == [path]


def test_a_flushed_checkpoint_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = CheckpointStore(tmp_path / "trial")
    saved_as(store, 5)
    saved_as(store, 10)
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
    saved_as(store, 5, "before")
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
    checkpoint = saved_as(theirs, 5)
    saved_as(mine, 4)
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
