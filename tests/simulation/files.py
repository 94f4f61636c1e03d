"""The files of simulated processes: real ones, in which a process may be killed at each operation.

A write may be torn by the kill. A disk may be full. When the power fails, a disk loses what was not synced: of the
changes to directories, in order, those after some point, which is not before the last sync of a directory; of the
contents of files, any part that was written after the file's last sync.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import functools
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.simulation.kernel import SIGKILL, Kernel, Killed, Process

_DIRECTORIES = ("rename", "replace", "remove", "unlink", "mkdir", "rmdir", "link", "symlink")
_real = {name: getattr(os, name) for name in ("open", "close", "write", "pwrite", "fsync", "ftruncate", *_DIRECTORIES)}
_real_open, _real_flock = builtins.open, fcntl.flock
SLOW_SYNC, SYNC_S = 0.25, 0.01
"""How many syncs take time, and how long at most."""


class _Change(NamedTuple):
    """A change of directories that is not yet on the disk."""

    directories: frozenset[str]
    undo: Callable[[], None]


class Disk:
    """The files below a directory.

    Args:
        changed: called after each change, with its name and paths, in the thread that has made it.
        synced: called with the path of each file or directory that was synced.
        forgets: whether the power may fail.
    """

    def __init__(
        self,
        kernel: Kernel,
        root: Path,
        *,
        changed: Callable[..., None] = lambda *_: None,
        synced: Callable[[str], None] = lambda path: None,
        forgets: bool = False,
    ) -> None:
        self.kernel, self.root, self.changed, self.synced, self.forgets = kernel, str(root), changed, synced, forgets
        self.kept = Path(f"{root}.unsynced")
        self._changes: list[_Change] = []
        self._dirty: dict[int, tuple[str, bytes]] = {}  # by inode: a link to the file, and its content on the disk
        self._links = 0
        self.descriptors: dict[int, _Descriptor | _File] = {}

    def has(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ operations
    def begin(self, what: str, path: object, *, grows: bool = False) -> bool:
        """Begin an operation of the running process. Returns whether it is killed within."""
        kernel = self.kernel
        assert kernel.current is not None
        process = kernel.current.process
        kernel.pause()
        if grows and process.machine.full_until > kernel.now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        process.file_operations += 1
        if process.file_operations != process.kill_at:
            return False
        kernel.note(f"killed at file operation {process.file_operations}: {what} {path}")
        return True

    def kill(self) -> None:
        """Kill the running process."""
        assert self.kernel.current is not None
        self.kernel.end(self.kernel.current.process, SIGKILL)
        raise Killed

    def operate(self, what: str, *paths: str, grows: bool = False) -> None:
        """Change directories: rename, remove, mkdir, rmdir, link, symlink."""
        is_last = self.begin(what, paths[-1], grows=grows)
        if is_last and self.kernel.random.random() < 0.5:
            self.kill()
        undo = self._undo_of(what, *paths) if self.forgets else None
        _real[what](*paths)
        if undo is not None:
            self._changes.append(_Change(frozenset(map(os.path.dirname, paths)), undo))
        self.changed(what, *paths)
        if is_last:
            self.kill()

    def write(self, write: Callable[[Any], int], descriptor: int, data: Any) -> int:
        """Write data; part of it, if the process is killed meanwhile, or the disk becomes full."""
        kernel = self.kernel
        if self.begin("write", f"{len(data)} bytes", grows=True):
            self.touch(descriptor)
            write(bytes(data)[: int(kernel.random.random() * (len(data) + 1))])  # as many draws whatever the length
            self.kill()
        self.touch(descriptor)
        return write(data)

    def sync(self, descriptor: int) -> None:
        if self.begin("fsync", descriptor):
            self.kill()
        if self.kernel.random.random() < SLOW_SYNC:
            self.kernel.park(SYNC_S * self.kernel.random.random())  # meanwhile, other threads run
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.forgets:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                last = max((n for n, each in enumerate(self._changes, 1) if path in each.directories), default=0)
                del self._changes[:last]
            elif (dirty := self._dirty.pop(status.st_ino, None)) is not None:
                _real["unlink"](dirty[0])
        self.synced(path)

    def opened(self, path: str, *, existed: bool, truncates: bool, before: bytes) -> None:
        """Note that a file is open for writing."""
        if not existed:
            if self.forgets:
                self._changes.append(_Change(frozenset([os.path.dirname(path)]), lambda: _real["unlink"](path)))
                self._remember(path, b"")
            self.changed("create", path)
        elif truncates and self.forgets:
            self._remember(path, before)

    # ------------------------------------------------------------------ power
    def _link(self, path: str) -> str:
        self._links += 1
        link = f"{self.kept}/{self._links}"
        os_link(path, link, follow_symlinks=False)
        return link

    def touch(self, descriptor: int) -> None:
        """Remember a file's content on the disk before it changes."""
        if self.forgets and os.fstat(descriptor).st_ino not in self._dirty:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            with contextlib.suppress(OSError):  # it was removed
                self._remember(path, Path(path).read_bytes())

    def _remember(self, path: str, content: bytes) -> None:
        if (inode := os.stat(path).st_ino) not in self._dirty:
            self._dirty[inode] = self._link(path), content

    def _undo_of(self, what: str, *paths: str) -> Callable[[], None] | None:
        path = paths[-1]
        match what:
            case "rename" | "replace":
                replaced = self._link(path) if os.path.isfile(path) else None

                def undo() -> None:
                    _real["rename"](path, paths[0])
                    if replaced is not None:
                        os_link(replaced, path)

                return undo
            case "remove" | "unlink":
                if not os.path.lexists(path):
                    return None
                link = self._link(path)
                return lambda: os_link(link, path, follow_symlinks=False)
            case "mkdir":
                return lambda: shutil.rmtree(path)
            case "rmdir":
                return lambda: _real["mkdir"](path)
            case _:
                return lambda: _real["unlink"](path)

    def lose_power(self) -> None:
        """Lose what was not synced. All processes that use the disk have been killed."""
        assert self.forgets
        random = self.kernel.random
        kept = random.randrange(len(self._changes) + 1)
        self.kernel.note(f"the power fails: {kept} of {len(self._changes)} changes of directories are on the disk")
        for change in reversed(self._changes[kept:]):
            change.undo()
        for link, synced in self._dirty.values():
            now = Path(link).read_bytes()
            match random.randrange(3):
                case 0:
                    content = synced
                case 1 if now.startswith(synced):
                    content = now[: random.randrange(len(synced), len(now) + 1)]
                case 1:
                    content = bytes(random.randrange(len(now) + 1))
                case _:
                    content = now
            with _real_open(link, "r+b") as file:  # the file itself, under whatever name
                file.truncate(0)
                file.write(content)
        self._changes.clear()
        self._dirty.clear()
        shutil.rmtree(self.kept)
        _real["mkdir"](self.kept)


os_link = _real["link"]
_disk: Disk | None = None


def _of_process(path: object) -> Disk | None:
    """The disk, if a simulated process uses it under this path."""
    disk = _disk
    return disk if disk is not None and disk.kernel.current is not None and disk.has(path) else None


class _Descriptor:
    """A number from `os.open`."""

    def __init__(self, disk: Disk, number: int, process: Process) -> None:
        self._disk, self._number, self._process = disk, number, process
        disk.descriptors[number] = process.files[self] = self

    def forget(self) -> None:
        """Let another object own the number."""
        self._process.files.pop(self, None)
        self._disk.descriptors.pop(self._number, None)

    def abandon(self) -> None:
        """Close it, because its process has ended."""
        if self._disk.descriptors.get(self._number) is self:  # else it was closed in C, and is another's by now
            del self._disk.descriptors[self._number]
            with contextlib.suppress(OSError):
                _real["close"](self._number)

    def close(self) -> None:
        del self._process.files[self]
        self.abandon()


class _File(io.FileIO):
    """A file that is open for writing."""

    def __init__(self, disk: Disk, path: str | int, mode: str) -> None:
        super().__init__(path, mode)
        assert disk.kernel.current is not None
        self._disk, self._process, self._number = disk, disk.kernel.current.process, self.fileno()
        disk.descriptors[self._number] = self._process.files[self] = self

    def write(self, data: Any) -> int:
        if not self._process.is_alive:
            raise Killed
        return self._disk.write(super().write, self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        if not self._process.is_alive:
            raise Killed
        if self._disk.begin("truncate", self.name):
            self._disk.kill()
        self._disk.touch(self.fileno())
        return super().truncate(size)

    def forget(self) -> None:
        """It was closed."""
        self._process.files.pop(self, None)
        self._disk.descriptors.pop(self._number, None)

    def abandon(self) -> None:
        """Close it, because its process has ended."""
        self._disk.descriptors.pop(self._number, None)
        super().close()

    def close(self) -> None:
        if self._process.is_alive and self in self._process.files:
            self.forget()
        super().close()


def open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> IO[Any]:
    """In place of `open`."""
    if isinstance(file, int) and (owner := _of_descriptor(file)) is not None:
        owner.descriptors[file].forget()
        if mode[0] == "r":
            return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        return _wrapped(_File(owner, file, mode.replace("b", "")), mode, buffering, encoding, errors, newline)
    if mode in ("r", "rb", "rt", "br") or (disk := _of_process(file)) is None:
        return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    path, raw_mode = os.fspath(file), mode.replace("b", "").replace("t", "")
    is_last, existed = disk.begin("open", path, grows="r" not in mode), os.path.exists(path)
    before = Path(path).read_bytes() if existed and "w" in mode and disk.forgets else b""
    raw = _File(disk, path, raw_mode)
    disk.opened(path, existed=existed, truncates="w" in mode, before=before)
    if is_last:
        disk.kill()
    return _wrapped(raw, mode, buffering, encoding, errors, newline)


def _wrapped(
    raw: _File, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> IO[Any]:
    if "b" in mode and buffering == 0:
        return raw  # type: ignore[return-value]
    buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    if "b" in mode:
        return buffered  # type: ignore[no-any-return]
    text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode
    return text


def _open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    disk = _of_process(path)
    if disk is None or dir_fd is not None:
        number: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
        return number
    assert disk.kernel.current is not None
    writes, path = bool(flags & (os.O_WRONLY | os.O_RDWR)), os.fspath(path)
    is_last = writes and disk.begin("open", path, grows=bool(flags & os.O_CREAT))
    existed = not writes or os.path.exists(path)
    number = _real["open"](path, flags, mode)
    _Descriptor(disk, number, disk.kernel.current.process)
    if writes:
        disk.opened(path, existed=existed, truncates=False, before=b"")
    if is_last:
        disk.kill()
    return number


def _of_descriptor(number: int) -> Disk | None:
    """The disk, if the running process has opened this there."""
    if (disk := _disk) is None or disk.kernel.current is None:
        return None
    if not disk.kernel.current.process.is_alive:
        raise Killed  # its number may be another file's by now
    return disk if number in disk.descriptors else None


def _close(number: int) -> None:
    if (disk := _of_descriptor(number)) is None:
        _real["close"](number)
    else:
        disk.descriptors[number].close()


def _write(number: int, data: Any) -> int:
    if (disk := _of_descriptor(number)) is None:
        written: int = _real["write"](number, data)
        return written
    return disk.write(lambda part: _real["write"](number, part), number, data)


def _pwrite(number: int, data: Any, offset: int) -> int:
    if (disk := _of_descriptor(number)) is None:
        written: int = _real["pwrite"](number, data, offset)
        return written
    return disk.write(lambda part: _real["pwrite"](number, part, offset), number, data)


def _fsync(number: int) -> None:
    """Of any descriptor: one that was opened for reading will do."""
    _of_descriptor(number)  # raises in a process that has ended
    if (disk := _of_process(os.readlink(f"/proc/self/fd/{number}"))) is None:
        _real["fsync"](number)
    else:
        disk.sync(number)


def _ftruncate(number: int, size: int) -> None:
    if (disk := _of_descriptor(number)) is not None:
        if disk.begin("ftruncate", number):
            disk.kill()
        disk.touch(number)
    _real["ftruncate"](number, size)


def _operation(what: str, *given: Any, **options: Any) -> None:
    paths = given[:2]  # `symlink` may get a third argument, which only Windows uses
    disk = _of_process(paths[-1]) or _of_process(paths[0])
    if disk is None or any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
        _real[what](*given, **options)
    else:
        disk.operate(what, *map(os.fspath, paths), grows=what in ("link", "symlink"))


def _mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    disk = _of_process(path)
    if disk is None or dir_fd is not None:
        _real["mkdir"](path, mode, dir_fd=dir_fd)
    else:
        disk.operate("mkdir", os.fspath(path), grows=True)


def flock(file: Any, operation: int) -> None:
    """In place of `fcntl.flock`: waiting for a lock must not keep the baton."""
    while True:
        try:
            return _real_flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if _disk is None or _disk.kernel.current is None or operation & fcntl.LOCK_NB:
                raise
        _disk.kernel.park(0.01)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "open": _open_descriptor,
    "close": _close,
    "write": _write,
    "pwrite": _pwrite,
    "fsync": _fsync,
    "ftruncate": _ftruncate,
    **{name: functools.partial(_operation, name) for name in _DIRECTORIES if name != "mkdir"},
    "mkdir": _mkdir,
}
"""In place of functions of `os`."""


@contextlib.contextmanager
def in_use(kernel: Kernel, disk: Disk | None) -> Iterator[None]:
    """Let simulated processes use the disk in the block."""
    global _disk
    _disk = disk
    if disk is not None and disk.forgets:
        shutil.rmtree(disk.kept, ignore_errors=True)
        _real["mkdir"](disk.kept)
    try:
        yield
    finally:
        _disk = None
        if disk is not None:
            shutil.rmtree(disk.kept, ignore_errors=True)
