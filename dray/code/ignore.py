"""Which files of a directory are code: those that an experiment copies and sends to its workers.

All files are code, unless they match ``NOT_CODE`` or the directory's own ``.drayignore``, which has the syntax of
``.gitignore``: ``!`` negates a pattern. Determined's ``.detignore`` is read too. Virtual environments of any name,
tagged caches (https://bford.info/cachedir/), and other experiments are always left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dray.errors import ConfigError
from dray.text import counted, size

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".detignore", ".drayignore")
NOT_CODE = (
    # Hidden: versions of the code, keys and passwords (.ssh, .aws, .netrc, .env), caches.
    ".*",
    "__pycache__/",
    "*.py[co]",
    "*.egg-info/",
    "venv/",
    "node_modules/",
    # Ray's launcher puts the key to a cluster's machines into the head's home directory.
    "ray_bootstrap_*",
)
"""Patterns that apply before the directory's own patterns, which can negate them."""
MAX_CODE_BYTES = 96 * 2**20  # Determined's limit
MAX_LINKED_BYTES = 1 << 20
"""A link out of the directory to a larger file is copied as a link: the file is not code."""
MAX_ENTRIES = 200_000  # if a directory is too large, at most this many entries are read to find the largest ones

# A directory that has all files of one of these sets is not code.
_FOREIGN = ({"pyvenv.cfg"}, {"conda-meta"}, {"CACHEDIR.TAG"}, {"experiment.yaml", "journal.jsonl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code in a directory, as relative paths with slashes.

    A link is followed only if it leads to a small file elsewhere, such as a module that several projects share.
    """

    root: Path
    folders: tuple[str, ...]  # each before its content
    files: tuple[str, ...]
    links: tuple[str, ...]
    sizes: Counter[str]  # bytes by entry of the directory

    @property
    def size(self) -> int:
        return self.sizes.total()

    @property
    def summary(self) -> str:
        return f"{counted(len(self.files), 'file')}, {size(self.size)}"

    def targets(self) -> Iterator[tuple[str, str]]:
        """The target of each link, for a copy of the directory: relative if it is within, else absolute."""
        root = os.path.realpath(self.root)
        for name in self.links:
            link = self.root / name
            end = os.path.realpath(link)
            if Path(end).is_relative_to(root):
                yield name, os.path.relpath(end, os.path.realpath(link.parent))
            else:
                yield name, os.path.abspath(link.parent / os.readlink(link))

    def digest(self) -> str:
        """A hash of the files and links, by name and content."""
        found = hashlib.sha256(repr((self.folders, self.files, [*self.targets()])).encode())
        for name in self.files:
            found.update(hashlib.sha256((self.root / name).read_bytes()).digest())
        return found.hexdigest()

    def copy(self, to: Path) -> None:
        """Copy the code into a directory, which is created; other files in it stay."""
        for name in ("", *self.folders):
            (to / name).mkdir(parents=True, exist_ok=True)
        for name in self.files:
            shutil.copy2(self.root / name, to / name)
        make_links(to, self.targets())


def make_links(directory: Path, targets: Iterable[tuple[str, str]]) -> None:
    """Make links, each given by its path in the directory and its target; existing ones stay."""
    for name, target in targets:
        place = directory / name
        with contextlib.suppress(FileExistsError):  # perhaps made by another process just now
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)


def code_of(root: Path, *, leave_out: Path | None = None, deep: bool = True, field: str = "model_dir") -> Code:
    """Find the code in a directory, without `leave_out`.

    Raises:
        ConfigError: the directory that `field` names is too large to be code, or can't be read, or one of its ignore
            files has an invalid pattern.
    """
    patterns = _patterns(root, field)
    try:
        found = _walk(root, patterns, leave_out.resolve() if leave_out is not None else None, deep=deep)
    except OSError as error:
        what = f"can't be read: {error}; make it readable, or exclude it in {root / IGNORE_FILES[-1]}"
        raise ConfigError([(field, what)]) from None
    if found.size > MAX_CODE_BYTES:
        raise ConfigError([(field, _too_large(found))])
    return found


def copied(root: Path) -> Code:
    """All files of a directory that `Code.copy` made."""
    from pathspec import GitIgnoreSpec

    return _walk(root, GitIgnoreSpec.from_lines([]))


def _patterns(root: Path, field: str) -> GitIgnoreSpec:
    # Imported here: commands that only read experiments need not wait for it.
    from pathspec import GitIgnoreSpec

    lines = list(NOT_CODE)
    for name in IGNORE_FILES:
        if (root / name).is_file():
            own = (root / name).read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(own, 1):
                try:
                    GitIgnoreSpec.from_lines([line])
                except ValueError as error:
                    what = f"line {number} of {root / name} is not a valid .gitignore pattern: {error}"
                    raise ConfigError([(field, what)]) from None
            lines += own
    return GitIgnoreSpec.from_lines(lines)


def _walk(root: Path, ignored: GitIgnoreSpec, leave_out: Path | None = None, *, deep: bool = True) -> Code:
    folders: list[str] = []
    files: list[str] = []
    links: list[str] = []
    sizes: Counter[str] = Counter()
    entries = 0

    def into(folder: str) -> None:
        nonlocal entries
        with os.scandir(root / folder) as found:
            inside = sorted(found, key=lambda entry: entry.name)
        names = {entry.name for entry in inside}
        if folder:
            if any(marks <= names for marks in _FOREIGN):
                return
            folders.append(folder.rstrip("/"))
        for entry in inside:
            # Once the directory is too large, this goes on only to find the largest entries, so it is bounded.
            entries += 1
            if entries > MAX_ENTRIES and sizes.total() > MAX_CODE_BYTES:
                return
            # `isdir` is also true for a link to a directory.
            name, is_folder = f"{folder}{entry.name}", os.path.isdir(entry.path)
            if ignored.match_file(f"{name}/" if is_folder else name):
                continue
            if entry.is_symlink() and not leads_to_code(Path(entry.path), root):
                links.append(name)
            elif is_folder:
                if deep and Path(entry.path).resolve() != leave_out:
                    into(f"{name}/")
            elif os.path.isfile(entry.path):  # not a socket or a pipe
                files.append(name)
                first, slash, _ = name.partition("/")
                sizes[f"{first}{slash}"] += entry.stat().st_size

    into("")
    return Code(root=root, folders=tuple(folders), files=tuple(files), links=tuple(links), sizes=sizes)


def leads_to_code(link: Path, root: Path) -> bool:
    """Whether a link leads to code outside of a directory, and so is followed."""
    return (
        link.is_file()
        and link.stat().st_size <= MAX_LINKED_BYTES
        and not Path(os.path.realpath(link)).is_relative_to(os.path.realpath(root))
    )


def _too_large(code: Code) -> str:
    largest = ", ".join(f"{name} ({size(taken)})" for name, taken in code.sizes.most_common(3))
    return (
        f"{code.root} has at least {size(code.size)} of files, more than the {MAX_CODE_BYTES >> 20} MiB that an "
        f"experiment copies and sends to its workers; the largest are {largest}; exclude what is not code in "
        f"{code.root / IGNORE_FILES[-1]} (.gitignore syntax), or give a directory with only the model's code"
    )
