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
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn, Protocol

from typing_extensions import Self

from dray import private
from dray.code.ignore import IGNORE_FILES, MAX_CODE_BYTES, Code, code_of, copied, make_links
from dray.errors import ConfigError
from dray.text import one_line

MAX_ARCHIVE_BYTES = MAX_CODE_BYTES + (16 << 20)
"""Of an archive, compressed."""
MAX_FILES = 20_000
"""Files, links and directories in an archive. Making one takes up to a millisecond."""
_MAX_READ = MAX_CODE_BYTES + 1024 * MAX_FILES
"""The most bytes of a decompressed archive: its files, and a header and padding for each."""
MAX_HEADER = 1 << 16
"""The most bytes before a file in an archive, for its name and attributes."""
MAX_HEADERS = 8
"""How many of them may be before one file; `tarfile` keeps them all until it has the file's own."""
MAX_NAME, MAX_DEPTH = 4096, 100
"""Characters of a name in an archive, and directories in it: what goes through all of them needs time for each."""


class BadArchive(ValueError):
    """An archive that can't be unpacked; the message is one line."""


def pack(directory: Path) -> bytes:
    """The code in a directory as a ``.tar.gz``.

    Raises:
        ConfigError: it is too large, or can't be read; see `code_of`.
    """
    return _pack(code_of(directory))


def _pack(code: Code) -> bytes:
    if len(code.folders) + len(code.files) + len(code.links) >= MAX_FILES:
        what = f"{_too_large()}; exclude what is not code in {code.root / IGNORE_FILES[-1]} (.gitignore syntax)"
        raise ConfigError([("model_dir", what)])
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


def unpack(packed: BinaryIO, to: Path) -> list[str]:
    """Unpack code into an empty directory, so that `code_of` finds all of it there.

    Nothing is written outside of the directory. Links may lead out of it, as those of a model directory to its data
    do; they are made last, and not where there is something, so that nothing is written through them.

    Returns:
        The names of the links.

    Raises:
        BadArchive: it is none, is too large, or has something other than files, directories and links in it.
    """
    links: dict[str, str] = {}
    folders = {PurePosixPath()}
    size = count = 0
    try:
        with (
            gzip.GzipFile(fileobj=packed) as plain,
            _Archive.open(fileobj=_Limited(plain), mode="r|", tarinfo=_Member) as archive,
        ):
            while (member := archive.next()) is not None:
                archive.forget()
                count += 1
                size += member.size
                path = _within(member.name)
                for folder in reversed((path, *path.parents) if member.isdir() else path.parents):
                    if folder not in folders:
                        (to / folder).mkdir(exist_ok=True)
                        folders.add(folder)
                if not 0 <= member.size <= MAX_CODE_BYTES or size > MAX_CODE_BYTES or count + len(folders) > MAX_FILES:
                    raise BadArchive(_too_large())
                if member.issym():
                    links[path.as_posix()] = member.linkname
                elif member.isfile():
                    _write(archive, member, to / path)
                elif not member.isdir():
                    raise BadArchive(f"the code has {member.name!r}, which is no file, directory or link")
    except BadArchive:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
        raise BadArchive(f"the code can't be unpacked: {one_line(error)}; it must be a .tar.gz") from None
    make_links(to, links.items())
    _keep_all(to)
    return list(links)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    content = archive.extractfile(member)
    assert content is not None, "a file has content"
    mode = 0o777 if member.mode & 0o100 else 0o666  # less the umask
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        shutil.copyfileobj(content, file)


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


def _within(name: str) -> PurePosixPath:
    """The path of a member in the directory."""
    path = PurePosixPath(name.lstrip("/")) if len(name) <= MAX_NAME else PurePosixPath()
    if len(name) > MAX_NAME or len(path.parts) > MAX_DEPTH:
        raise BadArchive(f"the code has a name that is too long, or nested too deeply: {name[:100]!r}...")
    if ".." in path.parts:
        raise BadArchive(f"the code has {name!r}, which is outside of its directory")
    return path


def _too_large() -> str:
    return f"the code has more than {MAX_CODE_BYTES >> 20} MiB or {MAX_FILES:,} files"


class _Archive(tarfile.TarFile):
    """An archive that is read from its beginning to its end."""

    headers = 0

    def forget(self) -> None:
        """Forget what has come so far, which `tarfile` keeps."""
        self.headers = 0
        self.members.clear()  # type: ignore[attr-defined]
        self.pax_headers.clear()  # type: ignore[attr-defined]


class _Member(tarfile.TarInfo):
    """A member of an archive. `tarfile` reads what is before a file, such as a long name, into memory at once."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        assert isinstance(tarfile, _Archive)
        tarfile.headers += 1
        if tarfile.headers > MAX_HEADERS:
            raise BadArchive(f"the code has more than {MAX_HEADERS} headers before one file")
        return super().fromtarfile(tarfile)

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        made = super().frombuf(buf, encoding, errors)
        if made.size < 0 or (made.size > MAX_HEADER and made.type not in (tarfile.REGTYPE, tarfile.AREGTYPE)):
            raise BadArchive(f"the code has a member of type {made.type!r} with {made.size:,} bytes")
        return made

    def _refuse_sparse(self, *_: object) -> NoReturn:
        # Its map may be as large as the archive, and it may say that a file has any size, also a negative one.
        raise BadArchive("the code has a sparse file")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


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
