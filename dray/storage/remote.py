"""A directory of files in an object store: list, upload, download, delete; with retries."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dray.storage.disk import files_in
from dray.storage.errors import CheckpointError, StorageError, is_full
from dray.storage.location import Location
from dray.text import one_line

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 600.0  # how long to retry while a store can't be reached
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 15.0
PARALLEL = 8  # files transferred at a time
CHUNK_BYTES = 8 << 20

# Errors of the AWS SDK, GCS and Azure that retries do not fix.
_REFUSED = re.compile(
    r"NO_SUCH_BUCKET|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|UNRECOGNIZED_"
    r"CLIENT|EXPIRED_TOKEN|MISSING_AUTHENTICATION|HTTP status: (?:401|403)|response code 40[13]|FORBIDDEN"
    r"|PERMISSION_DENIED|UNAUTHENTICATED|AuthenticationFailed|ContainerNotFound|bucket does not exist",
    re.IGNORECASE,
)


class RemoteDirectory:
    """The files below a location in an object store.

    `progressed` is called at each attempt and each chunk of a transfer, and `warn` when something is retried. A local
    directory works too.

    Raises:
        StorageError: in every method, if the store refuses a request or can't be reached for `patience_s`.
        FileNotFoundError: in methods that read, if a file does not exist.
    """

    def __init__(
        self,
        location: Location,
        *,
        patience_s: float = PATIENCE_S,
        progressed: Callable[[], object] = lambda: None,
        warn: Callable[[str], object] = log.warning,
    ) -> None:
        self.location = location
        self._patience_s = patience_s
        self._progressed, self._warn = progressed, warn

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file, by its name relative to this location."""

        def listing(filesystem: Any, path: str) -> dict[str, int]:
            from pyarrow.fs import FileSelector, FileType

            entries = filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
            files = {
                info.path.lstrip("/")[len(path) + 1 :]: info.size or 0 for info in entries if info.type == FileType.File
            }
            files.pop("", None)  # a marker object for a directory
            return files

        return self._tried("list", listing)

    def read(self, name: str) -> bytes:
        def fetch(filesystem: Any, path: str) -> bytes:
            with filesystem.open_input_stream(f"{path}/{name}") as file:
                return bytes(file.read())

        return self._tried("read", fetch)

    def write(self, name: str, content: bytes) -> None:
        def put(filesystem: Any, path: str) -> None:
            with filesystem.open_output_stream(f"{path}/{name}") as file:
                file.write(content)

        self._tried("write to", put)

    def upload(
        self,
        directory: Path,
        *,
        last: str,
        keep: Collection[str] = (),
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """Replace the files here, except those in `keep`, with a local directory's, the file `last` at the end, after
        `confirm` has been called.

        An earlier file of that name is removed first, which marks the directory as incomplete in the meantime.
        """
        before, names = self.sizes(), files_in(directory)
        if last in before:
            sizes = {name: (directory / name).stat().st_size for name in names}
            if before == sizes and self.read(last) == (directory / last).read_bytes():
                return  # uploaded before, but the response was lost
            self._remove(last)
        for name in before.keys() - set(names) - {last} - set(keep):
            self._remove(name)
        _in_parallel(lambda name: self._send(directory, name), [name for name in names if name != last])
        confirm()
        self._send(directory, last)

    def add(self, directory: Path, *, without: str) -> None:
        """Add a local directory's files. The file `without`, which marks a complete directory, is removed."""
        if without in self.sizes():
            self._remove(without)
        _in_parallel(lambda name: self._send(directory, name), files_in(directory))

    def download(self, directory: Path, names: Iterable[str]) -> None:
        """Download these files into a local directory, which is created."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            # The names come from the store, and must not escape the directory.
            if ".." in name.split("/") or name.startswith("/"):
                raise CheckpointError(f"{self.location} has a file {name!r}, which is not a valid name in a checkpoint")
        _in_parallel(lambda name: self._fetch(directory, name), names)

    def delete(self, *, first: str | None = None) -> None:
        names = sorted(self.sizes(), key=lambda name: name != first)
        if names and names[0] == first:
            self._remove(names.pop(0))
        _in_parallel(self._remove, names)

    def probe(self) -> None:
        """Check access: write a file here, read it, and remove it."""
        name, content = f".dray-probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        self.write(name, content)
        try:
            if self.read(name) != content:
                raise StorageError(f"{self.location} returned content that differs from what was written to it")
        finally:
            self._remove(name)

    def _send(self, directory: Path, name: str) -> None:
        def send(filesystem: Any, path: str) -> None:
            with (directory / name).open("rb") as source, filesystem.open_output_stream(f"{path}/{name}") as target:
                self._copy(source, target)

        self._tried("write to", send)

    def _fetch(self, directory: Path, name: str) -> None:
        def fetch(filesystem: Any, path: str) -> None:
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with filesystem.open_input_stream(f"{path}/{name}") as source, file.open("wb") as target:
                self._copy(source, target)

        self._tried("read", fetch)

    def _copy(self, source: Any, target: Any) -> None:
        while chunk := source.read(CHUNK_BYTES):
            target.write(chunk)
            self._progressed()

    def _remove(self, name: str) -> None:
        def remove(filesystem: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                filesystem.delete_file(f"{path}/{name}")

        self._tried("delete from", remove)

    def _tried(self, doing: str, work: Callable[[Any, str], T]) -> T:
        """Call `work` until it succeeds, is refused, or `patience_s` have passed."""
        deadline, wait = time.monotonic() + self._patience_s, FIRST_WAIT_S
        while True:
            self._progressed()
            try:
                return work(*self.location.filesystem())
            except FileNotFoundError:
                raise
            except (ValueError, TypeError, ImportError) as error:
                raise StorageError(f"can't {doing} {self.location}: {error}") from error
            except Exception as error:  # each filesystem of fsspec has its own exceptions
                if is_full(error):
                    raise
                why, failure = one_line(error), f"can't {doing} {self.location}"
                if _REFUSED.search(why) or time.monotonic() + wait > deadline:
                    raise StorageError(f"{failure}: {why}") from error
                if wait == FIRST_WAIT_S:
                    self._warn(f"{failure}; retrying for {self._patience_s:.0f} s: {why}")
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)


def _in_parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `work` on the names in parallel. After an error no more calls start, and the first error is raised."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(work, names):
            pass
