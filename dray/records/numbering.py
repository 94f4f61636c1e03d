"""Numbers of experiments: short names to type, counted up in each results directory.

A number is a symbolic link, ``DRAY_HOME/.numbers/12 -> ../digits-asha-20261121-175912-ab9a``. Making the link takes the
number and assigns it to an experiment in one atomic step, on NFS too, where locks may not work. The link outlives a
deleted experiment, so numbers are never reused. Directories keep their unique names, because machines that share an
object store each count for themselves.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from itertools import count
from pathlib import Path

from dray.records.root import results_root

LINKS = ".numbers"


def paths_by_number() -> dict[int, Path]:
    """The path of each number's experiment, oldest first; the experiment may have been deleted."""
    found = {}
    with suppress(OSError):
        for link in (results_root() / LINKS).iterdir():
            if link.name.isdecimal() and link.is_symlink():
                found[int(link.name)] = results_root().joinpath(*link.readlink().parts[1:])
    return dict(sorted(found.items()))


def number_of(path: Path) -> int | None:
    """The number of an experiment, or None."""
    place = _place(path)
    return next((number for number, each in paths_by_number().items() if each == place), None)


def typed(path: Path) -> str:
    """What is shortest to type for an experiment or local run in a command on this machine: its number, else its name
    in the results directory, else its path; quoted for a shell."""
    number = number_of(path)
    if number is not None:
        return str(number)
    is_found = (results_root() / path.name).resolve() == path.resolve()
    return shlex.quote(path.name if is_found else str(path))


def take_number(path: Path) -> int | None:
    """The number of an experiment, taken now if it has none yet. None if the results directory has neither the
    experiment nor a link to it, or is not writable."""
    place, mine = _place(path), number_of(path)
    if place is None or mine is not None:
        return mine
    links, target = results_root() / LINKS, ".." / place.relative_to(results_root())
    with suppress(OSError):
        links.mkdir(exist_ok=True)
        for number in count(max(paths_by_number(), default=0) + 1):
            with suppress(FileExistsError):  # another driver has just taken this number
                (links / str(number)).symlink_to(target)
                return number
    return None


def numbers_by_path() -> dict[Path, int]:
    """The numbers of all experiments, by resolved path."""
    return {path.resolve(): number for number, path in reversed(paths_by_number().items())}


def _place(path: Path) -> Path | None:
    """The path of an experiment in the results directory: itself, or a link to it."""
    root, path = results_root(), path.resolve()
    if path.is_relative_to(root.resolve()):
        return root / path.relative_to(root.resolve())
    link = root / path.name
    return link if link.resolve() == path else None
