"""A model's code as a ``.tar.gz``: on its way from a client to the server, and to workers on other machines."""

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
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from dray import private
from dray.code.ignore import IGNORE_FILES, MAX_CODE_BYTES, Code, code_of, copied, make_links
from dray.errors import ConfigError
from dray.storage.disk import locked
from dray.text import cut, one_line

MAX_ARCHIVE_BYTES = MAX_CODE_BYTES + (16 << 20)  # the compressed size of an archive
SINCE = 1_000_000_000  # the modification time of all files in an archive; zip files allow none before 1980
MAX_FILES = 20_000  # files, links and directories in an archive; creating one takes up to a millisecond


class BadArchive(ValueError):
    """An archive that can't be unpacked; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, 400))  # an archive may have names of any length


def pack(directory: Path) -> bytes:
    return _pack(code_of(directory))


def _pack(code: Code) -> bytes:
    if len(code.folders) + len(code.files) + len(code.links) >= MAX_FILES:
        what = f"{_too_large()}; exclude what is not code in {code.root / IGNORE_FILES[-1]} (.gitignore syntax)"
        raise ConfigError([("model_dir", what)])
    packed = io.BytesIO()
    # Compression at level 9 would be slower than most networks. Links to single files elsewhere are followed. The
    # archive has no times and owners, not even in gzip's header: equal code has equal archives, so a node unpacks once.
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", dereference=True) as archive,
    ):
        for name in (*code.folders, *code.files):
            archive.add(code.root / name, name, recursive=False, filter=_anonymous)
        for name, target in code.targets():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return packed.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname = SINCE, 0, 0, "", ""
    return member


def unpack(packed: BinaryIO, to: Path) -> list[str]:
    """Unpack code into an empty directory, so that `code_of` finds all of it there.

    Nothing is written outside of the directory. Links may lead out of it, for example from a model directory to its
    data. They are created last, and never in place of a file, so that nothing is written through them.

    Returns:
        The names of the links.

    Raises:
        BadArchive: this is not an archive, or is too large, or has members other than files, directories and links.
    """
    links: dict[str, str] = {}
    size = count = 0
    try:
        with tarfile.open(fileobj=packed, mode="r|gz") as archive:
            for member in archive:
                count += 1
                size += member.size
                if not 0 <= member.size <= size <= MAX_CODE_BYTES or count > MAX_FILES:
                    raise BadArchive(_too_large())
                if member.issym():
                    links[_within(member.name)] = member.linkname
                elif member.isfile() or member.isdir():
                    archive.extract(member, to, filter="data")
                else:
                    raise BadArchive(f"the code has {member.name!r}, which is not a file, directory or link")
        _keep_all(to)
        make_links(to, links.items())
    except BadArchive:
        raise
    except tarfile.OutsideDestinationError as error:
        raise BadArchive(f"the code has {error.tarinfo.name!r:.100}, which is outside of its directory") from None
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError, zlib.error) as error:
        what = one_line(error).replace(f"{to}/", "")
        raise BadArchive(f"the code can't be unpacked: {what}; it must be a .tar.gz") from None
    return list(links)


def copy(code: Path, to: Path) -> None:
    """Copy an experiment's copy of its code into an empty directory, so that `code_of` finds all of it there."""
    found: Code = copied(code)
    found.copy(to)
    _keep_all(to)


@dataclass(frozen=True, slots=True)
class Archived:
    """Code on its way to workers on other machines, which may run before it exists."""

    packed: bytes = field(repr=False)

    @classmethod
    def of(cls, code: Path) -> Archived:
        return cls(_pack(copied(code)))

    def place(self) -> Path:
        """Unpack the code on this node, unless it is there already, and return its directory.

        The directory stays until this process ends or places other code, and no other process of this user needs it.
        """
        root = Path(tempfile.gettempdir(), f"dray-code-{os.getuid()}")
        private.make_directory(root)
        place = root / hashlib.sha256(self.packed).hexdigest()[:32]
        with locked(root, fcntl.LOCK_EX):
            if not place.exists():
                _remove_unused(root)
                scratch = Path(tempfile.mkdtemp(dir=root))
                unpack(io.BytesIO(self.packed), scratch)
                scratch.rename(place)
            before = _used.pop_all()
            _used.enter_context(locked(place, fcntl.LOCK_SH))
            before.close()
        return place


_used = contextlib.ExitStack()  # holds the lock of the code that this process has placed last


def _remove_unused(root: Path) -> None:
    for place in list(root.iterdir()):
        with contextlib.suppress(BlockingIOError), locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
            doomed = Path(tempfile.mkdtemp(dir=root))
            place.rename(doomed)  # first, so that nobody takes a half-deleted directory for code
            shutil.rmtree(doomed, ignore_errors=True)


def _keep_all(directory: Path) -> None:
    """Have no file here ignored: the ignore files of the model directory, which are not here, were applied before."""
    name = IGNORE_FILES[-1]
    (directory / name).write_text(f"!*\n/{name}\n")


def _within(name: str) -> str:
    path = PurePosixPath(name.lstrip("/"))
    if ".." in path.parts:
        raise BadArchive(f"the code has {name!r}, which is outside of its directory")
    return path.as_posix()


def _too_large() -> str:
    return f"the code has more than {MAX_CODE_BYTES >> 20} MiB or {MAX_FILES:,} files"
