"""What clients send is read in another process, which ends at limits of time and memory."""

from __future__ import annotations

import errno
import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path

import pytest

from dray.code.archive import pack
from dray.code.trial_import import fault_of_import
from dray.config.entrypoint import ClassName
from dray.errors import ConfigError, ExperimentError, Invalid
from dray.serve import outside as limits
from dray.serve.draft import Draft
from dray.serve.outside import outside
from searchers.errors import DamagedFile, IllegalEvent
from tests.serve.conftest import Served
from tests.serve.test_api import CONFIG, model, submit

__all__ = ["model"]

MIB = 1 << 20


def bomb(size: int) -> bytes:
    """An archive of some kilobytes, with a header that unpacks to this many bytes."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size // MIB):
            file.write(bytes(MIB))
    return packed.getvalue()


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_S", 0.1)
    with pytest.raises(Invalid, match=r"what was sent can't be read within 0.1 s of CPU time and 4,096 MiB of memory"):
        outside(sum, range(10**12))


@pytest.mark.slow
def test_an_archive_that_grows_is_refused(served: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", 512 * MIB)
    assert submit(served, CONFIG, pack(model)).status == 201
    reply = submit(served, CONFIG, bomb(512 * MIB))
    assert (reply.status, "30 s of CPU time and 512 MiB of memory" in reply.json["error"]) == (400, True), reply.body


@pytest.mark.long
@pytest.mark.slow
def test_limits_are_not_those_of_a_model_that_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2 << 30)
    text = "import signal\nheld = bytearray(2 << 30)\nraise ValueError(signal.getitimer(signal.ITIMER_PROF))"
    (tmp_path / "model_def.py").write_text(text)
    told = outside(fault_of_import, ClassName("model_def", "Trial"), tmp_path)
    assert told.endswith("ValueError: (0.0, 0.0)"), told


@pytest.mark.parametrize(
    "error",
    [
        IllegalEvent("no trial 7"),
        DamagedFile("journal.jsonl, line 3"),
        ConfigError([("a.b", "must be 1")]),
        OSError(errno.ENOSPC, "No space left on device", "/full/x"),
        Invalid("x"),
        ExperimentError("y"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_back_as_they_are(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    assert getattr(found, "errno", None) == getattr(error, "errno", None)


def test_a_fault_of_a_config_is_told() -> None:
    with pytest.raises(ConfigError, match="searcher: missing required field"):
        outside(Draft(config="name: x").read)


def test_a_process_that_ends_is_bad_input() -> None:
    with pytest.raises(Invalid, match="can't be read"):
        outside(os._exit, 3)
