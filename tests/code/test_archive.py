"""A model's code arrives as it was chosen, and an archive can't write anywhere else."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dray.code.archive import MAX_DEPTH, MAX_HEADERS, MAX_NAME, Archived, BadArchive, _Archive, copy, pack, unpack
from dray.code.ignore import code_of
from dray.errors import ConfigError


@pytest.fixture
def to(tmp_path: Path) -> Path:
    place = tmp_path / "to"
    place.mkdir()
    return place


def chosen(root: Path) -> dict[str, str]:
    """What `code_of` finds: files with their text, links with their targets."""
    code = code_of(root)
    return {name: (root / name).read_text() for name in code.files} | dict(code.targets())


def archive(*members: tarfile.TarInfo) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as made:
        for member in members:
            made.addfile(member, io.BytesIO(bytes(member.size)))
    packed.seek(0)
    return packed


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, size
    return made


def test_what_the_ignore_files_choose_arrives_and_nothing_else(tmp_path: Path, to: Path) -> None:
    root, data = tmp_path / "model", tmp_path / "data"
    (root / "parts").mkdir(parents=True)
    (root / "empty").mkdir()
    data.mkdir()
    (data / "big").write_bytes(bytes(2 << 20))
    (root / "model_def.py").write_text("import parts\n")
    (root / "parts" / "__init__.py").write_text("")
    (root / "startup-hook.sh").write_text("#!/bin/sh\n")
    (root / "startup-hook.sh").chmod(0o755)
    (root / ".drayignore").write_text("*.csv\n!.settings\n")
    (root / ".settings").write_text("a = 1\n")
    (root / ".env").write_text("PASSWORD=horse\n")
    (root / "table.csv").write_text("1\n")
    (tmp_path / "shared.py").write_text("shared = 1\n")
    (root / "shared.py").symlink_to(tmp_path / "shared.py")
    (root / "data").symlink_to(data)
    (root / "again.py").symlink_to("model_def.py")
    before = chosen(root)
    unpack(io.BytesIO(pack(root)), to)
    assert chosen(to) == before
    assert sorted(before) == [
        ".settings", "again.py", "data", "model_def.py", "parts/__init__.py", "shared.py", "startup-hook.sh",
    ]  # fmt: skip
    assert before["data"] == str(data)
    assert not (to / "shared.py").is_symlink()
    assert os.access(to / "startup-hook.sh", os.X_OK)
    assert (to / "empty").is_dir()
    # An experiment's own copy, for another one.
    code_of(to).copy(tmp_path / "code")
    copy(tmp_path / "code", tmp_path / "fork")
    assert chosen(tmp_path / "fork") == before


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: archive(member("../out")), "outside"),
        (lambda: archive(member("a/../../out")), "outside"),
        (lambda: archive(member("../out", tarfile.SYMTYPE, "/etc")), "outside"),
        (lambda: archive(member("hard", tarfile.LNKTYPE, "/etc/passwd")), "no file, directory or link"),
        (lambda: archive(member("pipe", tarfile.FIFOTYPE)), "no file, directory or link"),
        (lambda: archive(member("device", tarfile.CHRTYPE)), "no file, directory or link"),
        (lambda: archive(member("big", size=97 << 20)), "more than 96 MiB"),
        (lambda: io.BytesIO(b"nothing"), r"must be a .tar.gz"),
        (lambda: io.BytesIO(b""), r"must be a .tar.gz"),
        (lambda: io.BytesIO(gzip.compress(b"x" * 5000)), r"must be a .tar.gz"),
        (lambda: io.BytesIO(archive(member("a", size=9999)).getvalue()[:60]), r"must be a .tar.gz"),
    ],
)
def test_a_bad_archive_is_refused(tmp_path: Path, to: Path, make: Callable[[], io.BytesIO], why: str) -> None:
    with pytest.raises(BadArchive, match=why) as error:
        unpack(make(), to)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["to"]


def test_a_file_is_not_written_through_a_link(tmp_path: Path, to: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = member("d", tarfile.SYMTYPE, str(outside))
    unpack(archive(link, member("d/out"), member("d/x/y"), member("d/link", tarfile.SYMTYPE, "x")), to)
    assert list(outside.iterdir()) == []
    assert (to / "d" / "out").exists()


def test_an_absolute_name_stays_within(to: Path) -> None:
    unpack(archive(member("/tmp/dray-absolute.py")), to)
    assert not Path("/tmp/dray-absolute.py").exists()
    assert (to / "tmp" / "dray-absolute.py").exists()


def test_little_does_not_unpack_to_very_much(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dray.code.archive._MAX_READ", 1 << 20)
    with pytest.raises(BadArchive, match="more than 96 MiB"):
        unpack(archive(member("zeros", size=2 << 20)), to)
    monkeypatch.setattr("dray.code.archive.MAX_FILES", 10)
    with pytest.raises(BadArchive, match="or 10 files"):
        unpack(archive(*(member(f"f{number}") for number in range(11))), to)
    with pytest.raises(BadArchive, match="or 10 files"):
        unpack(archive(member("/".join("abcdefghijk"))), to)
    for number in range(10):
        (to / f"f{number}").touch()
    with pytest.raises(ConfigError, match=r"or 10 files; exclude .* in .*\.drayignore"):
        pack(to)


def with_headers(**headers: str) -> tarfile.TarInfo:
    made = member("file")
    made.pax_headers = headers
    return made


@pytest.mark.parametrize(
    "large",
    [
        with_headers(comment="x" * (1 << 17)),
        with_headers(path="x" * (1 << 17)),
        member("name", tarfile.GNUTYPE_LONGNAME, size=1 << 17),
        member("link", tarfile.GNUTYPE_LONGLINK, size=1 << 17),
        member("global", tarfile.XGLTYPE, size=1 << 17),
        member("sparse", tarfile.GNUTYPE_SPARSE, size=1 << 17),
        with_headers(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "file"}),
        with_headers(**{"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0"}),
        with_headers(**{"GNU.sparse.size": "1"}),
        member("old sparse", tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda info: info.name,
)
def test_what_tarfile_would_read_into_memory_at_once_is_refused(large: tarfile.TarInfo, to: Path) -> None:
    with pytest.raises(BadArchive, match=r"a member of type|a sparse file"):
        unpack(archive(large, member("next")), to)


@pytest.mark.parametrize("size", [-1, -(1 << 50), 1 << 50])
def test_a_size_in_a_header_does_not_undo_the_limit(size: int, to: Path) -> None:
    with pytest.raises(BadArchive, match="more than 96 MiB"):
        unpack(archive(with_headers(size=str(size)), member("next")), to)


def test_headers_in_a_long_chain_are_refused(to: Path) -> None:
    for count in (MAX_HEADERS, 2000):
        with pytest.raises(BadArchive, match="headers before one file"):
            unpack(archive(*(member("global", tarfile.XGLTYPE) for _ in range(count)), member("file")), to)


def test_headers_for_all_files_are_not_kept(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file would copy those of all before it."""
    most = 0

    def forget(self: _Archive) -> None:
        nonlocal most
        most = max(most, len(self.pax_headers))
        original(self)

    original = _Archive.forget
    monkeypatch.setattr(_Archive, "forget", forget)
    packed = io.BytesIO()
    with gzip.open(packed, "w") as made:
        for number in range(50):
            made.write(tarfile.TarInfo.create_pax_global_header({f"key{number}": "x"}))
            made.write(member("file").tobuf())
    packed.seek(0)
    unpack(packed, to)
    assert most == 1


@pytest.mark.parametrize("name", ["a/" * 32_000, "a/" * (MAX_DEPTH + 1), "a" * (MAX_NAME + 1)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_a_name_that_is_too_deep_is_refused(name: str, kind: bytes, to: Path) -> None:
    """Its parents' names together take gigabytes, and what is so deep can't be removed either."""
    with pytest.raises(BadArchive, match="nested too deeply") as error:
        unpack(archive(member(name.rstrip("/"), kind, "target")), to)
    assert len(str(error.value)) < 300
    assert list(to.iterdir()) == []


def test_too_much_code_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(97 << 20)
    with pytest.raises(ConfigError, match="more than the 96 MiB"):
        pack(tmp_path)


def test_workers_of_a_node_share_one_copy_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    (code / "package" / "module.py").write_text("x = 1\n")
    archived = Archived.of(code)
    place = archived.place()
    assert (place / "package" / "module.py").read_text() == "x = 1\n"
    assert Archived.of(code).place() == place
    (code / "package" / "module.py").write_text("x = 2\n")
    assert Archived.of(code).place() != place


def test_a_node_keeps_the_code_that_its_processes_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))

    def archived(number: int) -> Archived:
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / "model_def.py").write_text(f"x = {number}\n")
        return Archived.of(tmp_path / "code")

    def kept() -> set[str]:
        return {file.read_text() for file in (tmp_path / "node").glob("*/*/model_def.py")}

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:
        assert another.submit(_placed, archived(1), tmp_path / "node").result().is_dir()
        for number in (2, 3, 4):  # each of this process replaces the one before
            archived(number).place()
        assert kept() == {"x = 1\n", "x = 3\n", "x = 4\n"}, "the last but one was in use as the last was placed"
    archived(5).place()
    assert kept() == {"x = 4\n", "x = 5\n"}, "the other process has ended"


def test_code_that_was_being_removed_when_the_process_was_killed_is_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = tmp_path / "code"
    code.mkdir()

    def archived(number: int) -> Archived:
        (code / "model_def.py").write_text(f"x = {number}\n")
        (code / "other.py").write_text("y = 1\n")
        return Archived.of(code)

    class Killed(BaseException):
        """The process has ended here."""

    def remove_one_file(directory: Path, **_: object) -> None:
        (directory / "other.py").unlink()
        raise Killed

    first, *others = (archived(number) for number in range(3))
    first.place()
    others[0].place()  # from now on nobody uses the first
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(shutil, "rmtree", remove_one_file)
        others[1].place()
    assert (first.place() / "other.py").read_text() == "y = 1\n"


def _placed(archived: Archived, temporary: Path) -> Path:
    tempfile.tempdir = str(temporary)
    return archived.place()
