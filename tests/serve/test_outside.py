"""What clients send is read in another process, which ends at limits of time and memory."""

from __future__ import annotations

import errno
import gzip
import io
import os
import pickle
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.errors import ConfigError, ExperimentError
from dray.serve import outside as limits
from dray.serve.answers import BadInput
from dray.serve.draft import Draft
from dray.serve.outside import _sendable, limited, outside
from dray.serve.processes import Create, create
from dray.serve.requests import unpack_code
from searchers.errors import DamagedFile, IllegalEvent
from tests.serve.conftest import Served
from tests.serve.test_api import CONFIG, submit

MIB = 1 << 20
LINES = b"".join(b"%d\n" % number for number in range(200_000))
MISPLACED = "--- a/model.py\n+++ b/model.py\n" + "".join(
    f"@@ -1 +1 @@\n-{number}\n+{number}\n" for number in range(180_000, 198_000)
)
"""Each hunk is looked for in the whole file: two minutes for the largest files that code may have."""


def bomb(size: int) -> bytes:
    """An archive of some kilobytes, with a header that unpacks to this many bytes."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size // MIB):
            file.write(bytes(MIB))
    return packed.getvalue()


def at_lower_limits(function: Callable[..., object], *given: object) -> object:
    """In the other process: call a function with limits that a test reaches in a second."""
    limits.CPU_S, limits.MEMORY_BYTES = 1, 64 * MIB
    with limited():
        return function(*given)


def apply(patch: str) -> object:
    from dray.code.patch import apply

    return apply(patch, {"model.py": LINES}.get)


def fail(error: Exception) -> None:
    raise error


def end() -> None:
    os._exit(3)


def used() -> tuple[int, tuple[int, int], tuple[int, int]]:
    return os.getpid(), resource.getrlimit(resource.RLIMIT_CPU), resource.getrlimit(resource.RLIMIT_DATA)


def test_a_patch_that_takes_too_long_is_given_up() -> None:
    assert len(MISPLACED) < 512 << 10
    with pytest.raises(BadInput, match="reading what was sent takes more than 1 s of CPU time"):
        outside(at_lower_limits, apply, MISPLACED)


def test_an_archive_that_grows_is_given_up(tmp_path: Path) -> None:
    packed = tmp_path / "code.tar.gz"
    packed.write_bytes(bomb(256 * MIB))
    assert packed.stat().st_size < MIB
    with pytest.raises(BadInput, match="reading what was sent takes more than 64 MiB of memory"):
        outside(at_lower_limits, unpack_code, tmp_path / "code")


def test_a_config_that_takes_too_long_is_a_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_S", 0)

    def read(draft: Draft, allowance: object) -> None:
        while True:
            pass

    monkeypatch.setattr(Draft, "read", read)
    with pytest.raises(ConfigError, match="config: reading what was sent takes more than 0 s of CPU time"):
        create(Create(draft=Draft(config=CONFIG), code=Path("code"), link=Path("link")))


def test_limits_end_with_the_block() -> None:
    before = used()
    with pytest.raises(BadInput, match="MiB of memory"), limited():
        now = used()
        raise MemoryError
    assert now != before
    assert used() == before


def test_errors_come_back_as_they_are() -> None:
    errors = [IllegalEvent("no trial 7"), DamagedFile("journal.jsonl, line 3"), ConfigError([("a.b", "must be 1")])]
    errors += [OSError(errno.ENOSPC, "No space left on device", "/full/x"), BadInput("x"), ExperimentError("y")]
    for error in errors:
        found = pickle.loads(pickle.dumps(_sendable(error)))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
        assert getattr(found, "errno", None) == getattr(error, "errno", None)

    class Local(Exception):
        """Another process can't have it."""

    assert str(_sendable(Local("two\nlines"))) == "two lines"
    with pytest.raises(IllegalEvent, match="no trial 7"):
        outside(fail, errors[0])


def test_a_process_that_ends_is_bad_input() -> None:
    with pytest.raises(BadInput, match="ended without an answer"):
        outside(end)


def test_an_archive_is_unpacked_in_another_process(served: Served) -> None:
    reply = submit(served, CONFIG, bomb(8 * MIB))
    assert (reply.status, "can't be unpacked" in reply.json["error"]) == (400, True), reply.body
