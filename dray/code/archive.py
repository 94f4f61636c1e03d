"""A model's code as a ``.tar.gz``: on its way from a client to the server, and on to workers that run already."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from dray import private
from dray.code.ignore import IGNORE_FILES, MAX_CODE_BYTES, MAX_ENTRIES, Code, code_of, copied, make_links

MAX_ARCHIVE_BYTES = MAX_CODE_BYTES + (16 << 20)
"""Of an archive, compressed."""
_MAX_READ = MAX_CODE_BYTES + 1024 * MAX_ENTRIES
"""Of an archive, decompressed: its files, and a header and padding for each."""


class BadArchive(ValueError):
    """An archive that can't be unpacked; the message is one line."""


def pack(directory: Path) -> bytes:
    """The code in a directory as a ``.tar.gz``.

    Raises:
        ConfigError: it is too large, or can't be read; see `code_of`.
    """
    return _pack(code_of(directory))


def _pack(code: Code) -> bytes:
    packed = io.BytesIO()
    # A network, or this machine, is faster than level 9; links to single files elsewhere are followed.
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1, dereference=True) as archive:
        for name in (*code.folders, *code.files):
            archive.add(code.root / name, name, recursive=False)
        for name, target in code.targets():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return packed.getvalue()


def unpack(packed: BinaryIO, to: Path) -> None:
    """Unpack code into an empty directory, so that `code_of` finds all of it there.

    Nothing is written outside of the directory. Links may lead out of it, as those of a model directory to its data
    do; they are made last, so that no file is written through them.

    Raises:
        BadArchive: it is none, is too large, or has something other than files, directories and links in it.
    """
    links: list[tuple[str, str]] = []
    size = 0
    try:
        with gzip.GzipFile(fileobj=packed) as plain, tarfile.open(fileobj=_Limited(plain), mode="r|") as archive:
            for number, member in enumerate(archive):
                size += member.size
                if size > MAX_CODE_BYTES or number >= MAX_ENTRIES:
                    raise BadArchive(_too_large())
                if member.issym():
                    links.append((_within(member, to), member.linkname))
                elif member.isfile() or member.isdir():
                    archive.extract(member, to, filter="data")
                else:
                    raise BadArchive(f"the code has {member.name!r}, which is no file, directory or link")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BadArchive(f"the code can't be unpacked: {error}; it must be a .tar.gz") from None
    root = to.resolve()
    for name, target in links:
        if not (to / name).parent.resolve().is_relative_to(root):
            raise BadArchive(f"the code has a link {name!r} below another link")
        make_links(to, [(name, target)])
    _keep_all(to)


def copy(code: Path, to: Path) -> None:
    """Copy an experiment's copy of its code into an empty directory, so that `code_of` finds all of it there."""
    found: Code = copied(code)
    found.copy(to)
    _keep_all(to)


@dataclass(frozen=True, slots=True)
class Archived:
    """Code for workers on other machines that may run before it exists."""

    packed: bytes

    @classmethod
    def of(cls, code: Path) -> Archived:
        """An experiment's copy of its code."""
        return cls(_pack(copied(code)))

    def place(self) -> Path:
        """Where it is on this node, which unpacks it once.

        It stays there until this process ends or places other code, and no process of this user needs it.
        """
        root = Path(tempfile.gettempdir(), f"dray-code-{os.getuid()}")
        private.make_directory(root)
        place = root / hashlib.sha256(self.packed).hexdigest()[:32]
        with _locked(root, fcntl.LOCK_EX):
            if not place.exists():
                _remove_unused(root)
                scratch = Path(tempfile.mkdtemp(dir=root))
                unpack(io.BytesIO(self.packed), scratch)
                scratch.rename(place)
            _use(place)
        return place


@contextlib.contextmanager
def _locked(directory: Path, lock: int) -> Iterator[None]:
    """Lock a directory as `flock` does, also against this process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, lock)
        yield
    finally:
        os.close(descriptor)


_used = contextlib.ExitStack()
"""Holds the lock of the code that this process has placed last."""


def _use(place: Path) -> None:
    before = _used.pop_all()
    _used.enter_context(_locked(place, fcntl.LOCK_SH))
    before.close()


def _remove_unused(root: Path) -> None:
    for place in list(root.iterdir()):
        with contextlib.suppress(BlockingIOError), _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
            doomed = Path(tempfile.mkdtemp(dir=root))
            place.rename(doomed)  # first: what is left by half is nobody's code
            shutil.rmtree(doomed, ignore_errors=True)


def _keep_all(directory: Path) -> None:
    """What is here has been chosen by the ignore files of the model directory, which are not here."""
    name = IGNORE_FILES[-1]
    (directory / name).write_text(f"!*\n/{name}\n")


def _within(member: tarfile.TarInfo, to: Path) -> str:
    """The name of a link, checked as that of a file."""
    as_file = tarfile.TarInfo(member.name)
    return tarfile.data_filter(as_file, str(to)).name


def _too_large() -> str:
    return f"the code has more than {MAX_CODE_BYTES >> 20} MiB or {MAX_ENTRIES:,} files"


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _Limited(io.RawIOBase):
    """A file of which only so much is read: little may decompress to very much."""

    def __init__(self, file: _Readable) -> None:
        self._file, self._left = file, _MAX_READ

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise BadArchive(_too_large())
        return data
