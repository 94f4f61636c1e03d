"""A model's code arrives as it was chosen, an archive can't write anywhere else, and code is listed for people."""

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

from dray.code import listing
from dray.code.archive import Archived, BadArchive, copy, pack, unpack
from dray.code.ignore import code_of
from dray.code.listing import CodeFile, code_files, code_text
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


def _of_no_time() -> tarfile.TarInfo:
    found = tarfile.TarInfo("late")
    found.pax_headers = {"mtime": "1e400"}
    return found


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: archive(member("../out")), "outside"),
        (lambda: archive(member("a/../../out")), "outside"),
        (lambda: archive(member("../out", tarfile.SYMTYPE, "/etc")), "outside"),
        (lambda: archive(member("hard", tarfile.LNKTYPE, "/etc/passwd")), "not a file, directory or link"),
        (lambda: archive(member("pipe", tarfile.FIFOTYPE)), "not a file, directory or link"),
        (lambda: archive(member("device", tarfile.CHRTYPE)), "not a file, directory or link"),
        (lambda: archive(member("a/" * 32_000 + "b")), "can't be unpacked"),
        (lambda: archive(member("b" * 5000)), "can't be unpacked"),
        (lambda: archive(_of_no_time()), "can't be unpacked"),
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
    assert len(str(error.value)) < 500
    assert str(tmp_path) not in str(error.value)
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
    monkeypatch.setattr("dray.code.archive.MAX_CODE_BYTES", 1 << 20)
    with pytest.raises(BadArchive, match="more than 1 MiB"):
        unpack(archive(*(member(name, size=400 << 10) for name in "abc")), to)
    monkeypatch.setattr("dray.code.archive.MAX_FILES", 10)
    with pytest.raises(BadArchive, match="or 10 files"):
        unpack(archive(*(member(f"f{number}") for number in range(11))), to)
    for number in range(10):
        (to / f"f{number}").touch()
    with pytest.raises(ConfigError, match=r"or 10 files; exclude .* in .*\.drayignore"):
        pack(to)


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
    again = shutil.copytree(code, tmp_path / "again")
    os.utime(again / "package" / "module.py", (1, 1))
    assert Archived.of(again) == archived
    assert Archived.of(again).place() == place
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


def _placed(archived: Archived, temporary: Path) -> Path:
    tempfile.tempdir = str(temporary)
    return archived.place()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    (code / "net" / "__pycache__").mkdir(parents=True)
    (code / "model_def.py").write_text("x = 'é'\n")
    (code / "net" / "layers.py").write_text("")
    (code / "net" / "__pycache__" / "layers.pyc").write_bytes(b"\0")
    (code / "weights.bin").write_bytes(b"\0\1")
    (tmp_path / "secret").write_text("secret")
    (code / "link").symlink_to(tmp_path / "secret")
    (code / "links").symlink_to(tmp_path)
    return code


def test_files_are_listed_and_links_are_not_followed(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, is_all = code_files(code)
    assert [(each.path, each.is_link) for each in files] == [
        ("link", True),
        ("links", True),
        ("model_def.py", False),
        ("net/layers.py", False),
        ("weights.bin", False),
    ]
    assert files[2] == CodeFile("model_def.py", 9)
    assert is_all
    monkeypatch.setattr(listing, "MAX_FILES", 5)
    assert code_files(code) == (files, True)
    monkeypatch.setattr(listing, "MAX_FILES", 4)
    assert code_files(code) == (files[:4], False)
    assert code_files(code / "none") == ([], True)


def test_the_text_of_a_file_is_bounded_and_a_binary_one_has_none(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_text(code, "model_def.py") == ("x = 'é'\n", 9)
    assert code_text(code, "net/layers.py") == ("", 0)
    assert code_text(code, "weights.bin") == (None, 2)
    (code / "latin.py").write_bytes(b"caf\xe9")
    assert code_text(code, "latin.py") == (None, 4)
    monkeypatch.setattr(listing, "MAX_BYTES", 6)
    assert code_text(code, "model_def.py") == ("x = '", 9), "not half a letter"


@pytest.mark.parametrize(
    "path",
    [
        "link",
        "links/secret",
        "links/code/model_def.py",
        "../secret",
        "net/../../secret",
        "/etc/passwd",
        "",
        ".",
        "net",
        "no",
    ],
)
def test_nothing_outside_of_the_code_is_read(code: Path, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        code_text(code, path)
