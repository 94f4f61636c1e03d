"""What a trial's exception is: told by its type, its words, what led to it, and the user's line."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
import torch

from dray.desk.failure import Failure, failure_of, told_first, users_line
from dray.script import Script, ScriptFailed
from dray.training.errors import PeerFailed


def caught(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return failure_of(raised, batches=3)


KINDS = {
    "MemoryError": (MemoryError(), "oom"),
    "of a GPU": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
    "of torch on the CPU": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "oom"),
    "of the system": (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
    "of a data loader's worker": (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "oom"),
    "illegal access": (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
    "cuBLAS": (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), "device"),
    "NCCL": (
        torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error"),
        "collective",
    ),
    "the store": (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes"), "collective"),
    "what another rank has told": (PeerFailed("training failed on rank 1: ValueError()"), "collective"),
    "gloo": (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9"), "collective"),
    "any other": (RuntimeError("shapes (2, 3) and (4, 5) do not match"), "error"),
    "words alone": (ValueError("out of memory"), "error"),
}


@pytest.mark.parametrize("what", KINDS)
def test_kind_of_an_exception(what: str) -> None:
    error, kind = KINDS[what]
    assert caught(error).kind == kind


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="this torch raises a RuntimeError")
def test_torchs_own_type_for_errors_of_devices() -> None:
    assert caught(torch.AcceleratorError("unspecified launch failure")).kind == "device"


def test_what_led_to_an_exception_counts() -> None:
    with pytest.raises(ValueError) as told:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as cause:
            raise ValueError("the batch is too large") from cause
    assert failure_of(told.value, batches=0).kind == "oom"


def test_real_errors_of_memory_are_known() -> None:
    with pytest.raises((MemoryError, RuntimeError)) as told:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert failure_of(told.value, 0).kind == "oom"


def test_place_is_the_innermost_line_of_the_users_code() -> None:
    def train_batch() -> None:
        torch.ones(2, 3) @ torch.ones(4, 5)  # raised within torch

    line = train_batch.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError) as told:
        train_batch()
    assert failure_of(told.value, batches=3) == Failure(
        kind="error", where=f"RuntimeError at test_failure.py:{line} in train_batch", batches=3
    )


def test_programs_that_exit_with_codes_differ_by_their_message(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    with pytest.raises(ScriptFailed) as told:
        Script(command="python3 train.py", file="train.py").run(tmp_path)
    # Where that line is none of theirs, only the code is known.
    assert failure_of(told.value, 0).where == "ScriptFailed at train.py:1 in <module>"
    assert failure_of(told.value.with_traceback(None), 0).where == "ScriptFailed: python3 train.py exited with code 3"
    assert str(tmp_path) not in sys.path


def told_of(tmp_path: Path, source: str, *, code: Path | None) -> list[str]:
    """What is told of an error of this program of the user's."""
    (tmp_path / "model_def.py").write_text(source)
    script = Script(command="python3 model_def.py", file="model_def.py")
    with pytest.raises(Exception, match="") as raised:
        script.run(tmp_path)
    return told_first(raised.value, "Traceback (most recent call last):\n...", code).splitlines()


def test_users_own_line_is_told_first(tmp_path: Path) -> None:
    source = "def make(hparams):\n    return hparams['lrr']\n\nmake({})\n"
    behind = ["", "Traceback (most recent call last):", "..."]
    assert told_of(tmp_path, source, code=tmp_path) == [
        "KeyError: 'lrr'",
        "  model_def.py:2, in make",
        "    return hparams['lrr']",
        *behind,
    ]
    assert told_of(tmp_path, source, code=None)[1] == f"  {tmp_path}/model_def.py:2, in make"


def test_users_own_line_is_told_first_where_a_library_raises(tmp_path: Path) -> None:
    source = "import torch\ntorch.zeros(2) @ torch.zeros(3)\n"
    what, where, line, *_ = told_of(tmp_path, source, code=tmp_path)
    assert what.startswith("RuntimeError: inconsistent tensor size")
    assert (where, line) == ("  model_def.py:2, in <module>", "    torch.zeros(2) @ torch.zeros(3)")


def test_where_a_library_raises_for_an_error_of_the_users_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("raise KeyError('many\\nlines')\n")
    with pytest.raises(KeyError) as raised:
        Script(command="python3 model_def.py", file="model_def.py").run(tmp_path)
    outer = RuntimeError("no line of the user's is in my traceback")
    outer.__cause__ = raised.value
    what, where, *_ = told_first(outer, "trace", tmp_path).splitlines()
    assert (what, where) == (r"KeyError: 'many\nlines'", "  model_def.py:1, in <module>")


def test_a_line_that_is_no_python_is_told_not_the_one_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "my_broken.py").write_text("x = 1\ndef broken(:\n    pass\n")
    what, where, line, *_ = told_of(tmp_path, "import my_broken\n", code=tmp_path)
    assert what.startswith("SyntaxError: invalid syntax")
    assert (where, line) == ("  my_broken.py:2, in <module>", "    def broken(:")


def test_an_exit_is_told_by_the_line_that_exits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\ndef main():\n    sys.exit('no data')\nmain()\n")
    with pytest.raises(ScriptFailed) as raised:
        Script(command="python3 train.py", file="train.py").run(tmp_path)
    assert users_line(raised.value, tmp_path) == ["  train.py:3, in main", "    sys.exit('no data')"]
    assert users_line(RuntimeError("of dray's own"), tmp_path) == []


def test_an_error_that_no_line_of_the_users_led_to_is_its_traceback() -> None:
    assert told_first(RuntimeError("of dray's own"), "trace", None) == "trace"
