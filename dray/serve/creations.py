"""Experiments that are being created: if they are not accepted, because the server dies, say, nothing is left of them.

Before a process creates an experiment's directory, it links to it from ``.server/creations``. The link is removed once
the experiment is in the queue, so a link that a starting server finds leads to what was made for a client that got no
answer.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dray import private
from dray.records.directory import ExperimentDirectory, unlink_from_results


class Creations:
    """The links in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        private.make_directory(directory)

    def discard_all(self, is_accepted: Callable[[str], bool]) -> None:
        """Remove what an earlier server has not accepted; `is_accepted` knows experiments by their names."""
        for link in self._directory.iterdir():
            if not is_accepted(link.readlink().name):
                _discard(link)
            link.unlink()

    @contextmanager
    def new(self) -> Iterator[Path]:
        """The path of a new link, for `begin`. If the block raises, what was created is removed."""
        link = self._directory / secrets.token_hex(8)
        try:
            yield link
        except BaseException:
            if link.is_symlink():
                _discard(link)
            raise
        finally:
            link.unlink(missing_ok=True)


def begin(link: Path, path: Path) -> None:
    """Note that an experiment's directory is about to be created."""
    link.symlink_to(path)  # in one atomic step: a cut path could be another directory's


def _discard(link: Path) -> None:
    path = link.readlink()
    if not ExperimentDirectory(path).journal.exists():  # otherwise it has run
        shutil.rmtree(path, ignore_errors=True)
        unlink_from_results(path)
