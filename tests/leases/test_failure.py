"""A trial's exception is classified by its type, message and causes, and located at the user's line."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
import torch

import dray
import searchers
from dray.leases.failure import Failure, failure_of, is_users_file, may_be_gpus_fault, users_line, with_users_line
from dray.script import Script, ScriptFailed
from dray.training.errors import PeerFailed


def caught(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return failure_of(raised, batches=3)


KINDS = {
    "MemoryError": (MemoryError(), "host_oom"),
    "of a GPU": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
    "of torch on the CPU": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "host_oom"),
    "of the system": (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
    "of a data loader's worker": (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "host_oom"),
    "illegal access": (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
    "of cuBLAS's": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
    "cuBLAS": (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), "device"),
    "NCCL": (
        torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error"),
        "collective",
    ),
    "NCCL, on a full GPU": (
        torch.distributed.DistBackendError("ncclUnhandledCudaError: Last error: Failed to CUDA calloc async 4 bytes"),
        "oom",
    ),
    "the store": (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes"), "collective"),
    "failure of another rank": (PeerFailed("rank 1 failed while training: ValueError()"), "collective"),
    "gloo": (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9"), "collective"),
    "any other": (RuntimeError("shapes (2, 3) and (4, 5) do not match"), "error"),
    "words alone": (ValueError("out of memory"), "error"),
}


@pytest.mark.parametrize("what", KINDS)
def test_kind_of_an_exception(what: str) -> None:
    error, kind = KINDS[what]
    assert caught(error).kind == kind


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="this torch raises a RuntimeError")
def test_torchs_accelerator_error_is_a_device_error() -> None:
    assert caught(torch.AcceleratorError("unspecified launch failure")).kind == "device"


HINT = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.mark.parametrize(
    ("what", "is_gpus"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: unknown error", True),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
        ("CUDA error: too many resources requested for launch", False),
        ("CUDA error: operation failed due to a previous error during capture", False),
        ("CUDA error: device kernel image is invalid", False),
        ("Caught RuntimeError in worker process 0.\nRuntimeError: CUDA error: device-side assert triggered", False),
        ("Caught RuntimeError in worker process 0.\nRuntimeError: CUDA error: unknown error", True),
        ("CUDA error: out of memory", False),
        ("shapes (2, 3) and (4, 5) do not match", False),
    ],
)
def test_a_gpu_is_suspected_only_of_errors_that_no_program_causes(what: str, is_gpus: bool) -> None:
    assert may_be_gpus_fault(RuntimeError(what + HINT)) == is_gpus


def test_an_error_after_an_assertion_on_the_device_is_the_programs() -> None:
    later = RuntimeError(f"CUDA error: unspecified launch failure{HINT}")
    later.__context__ = RuntimeError(f"CUDA error: device-side assert triggered{HINT}")
    assert not may_be_gpus_fault(later)


def test_the_cause_of_an_exception_counts() -> None:
    with pytest.raises(ValueError) as raised:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as cause:
            raise ValueError("the batch is too large") from cause
    assert failure_of(raised.value, batches=0).kind == "oom"


def test_a_failed_allocation_is_out_of_memory() -> None:
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert failure_of(raised.value, 0).kind == "host_oom"


def test_location_is_the_innermost_line_of_the_users_code() -> None:
    def train_batch() -> None:
        torch.ones(2, 3) @ torch.ones(4, 5)  # raised within torch

    line = train_batch.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError) as raised:
        train_batch()
    assert failure_of(raised.value, batches=3) == Failure(
        kind="error", where=f"RuntimeError at test_failure.py:{line} in train_batch", batches=3
    )


def test_exit_codes_of_programs_are_distinguished_by_the_message(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    with pytest.raises(ScriptFailed) as raised:
        Script(command="python3 train.py", file="train.py").run(tmp_path)
    # Where that line is none of theirs, only the code is known.
    assert failure_of(raised.value, 0).where == "ScriptFailed at train.py:1 in <module>"
    assert failure_of(raised.value.with_traceback(None), 0).where == "ScriptFailed: python3 train.py exited with code 3"
    assert str(tmp_path) not in sys.path


def report_of(tmp_path: Path, source: str, *, code: Path | None) -> list[str]:
    """The report on the error that this program raises."""
    (tmp_path / "model_def.py").write_text(source)
    script = Script(command="python3 model_def.py", file="model_def.py")
    with pytest.raises(Exception, match=r".") as raised:
        script.run(tmp_path)
    return with_users_line(raised.value, "Traceback (most recent call last):\n...", code).splitlines()


def test_the_users_line_comes_before_the_traceback(tmp_path: Path) -> None:
    source = "def make(hparams):\n    return hparams['lrr']\n\nmake({})\n"
    behind = ["", "Traceback (most recent call last):", "..."]
    assert report_of(tmp_path, source, code=tmp_path) == [
        "KeyError: 'lrr'",
        "  model_def.py:2, in make",
        "    return hparams['lrr']",
        *behind,
    ]
    assert report_of(tmp_path, source, code=None)[1] == f"  {tmp_path}/model_def.py:2, in make"


def test_the_users_line_is_found_if_a_library_raises(tmp_path: Path) -> None:
    source = "import torch\ntorch.zeros(2) @ torch.zeros(3)\n"
    what, where, line, *_ = report_of(tmp_path, source, code=tmp_path)
    assert what.startswith("RuntimeError: inconsistent tensor size")
    assert (where, line) == ("  model_def.py:2, in <module>", "    torch.zeros(2) @ torch.zeros(3)")


def test_the_users_error_is_shown_if_a_library_raises_because_of_it(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("raise KeyError('many\\nlines')\n")
    with pytest.raises(KeyError) as raised:
        Script(command="python3 model_def.py", file="model_def.py").run(tmp_path)
    outer = RuntimeError("no line of the user's is in my traceback")
    outer.__cause__ = raised.value
    what, where, *_ = with_users_line(outer, "trace", tmp_path).splitlines()
    assert (what, where) == (r"KeyError: 'many\nlines'", "  model_def.py:1, in <module>")


def test_a_syntax_error_is_located_in_the_broken_file(tmp_path: Path) -> None:
    (tmp_path / "my_broken.py").write_text("x = 1\ndef broken(:\n    pass\n")
    what, where, line, *_ = report_of(tmp_path, "import my_broken\n", code=tmp_path)
    assert what.startswith("SyntaxError: invalid syntax")
    assert (where, line) == ("  my_broken.py:2, in <module>", "    def broken(:")


def test_an_exit_is_located_at_the_line_that_exits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\ndef main():\n    sys.exit('no data')\nmain()\n")
    with pytest.raises(ScriptFailed) as raised:
        Script(command="python3 train.py", file="train.py").run(tmp_path)
    assert users_line(raised.value, tmp_path) == ["  train.py:3, in main", "    sys.exit('no data')"]
    assert users_line(RuntimeError("of dray's own"), tmp_path) == []


def test_an_error_outside_the_users_code_is_its_traceback() -> None:
    assert with_users_line(RuntimeError("of dray's own"), "trace", None) == "trace"


def test_files_of_dray_and_of_compiled_libraries_are_not_the_users(tmp_path: Path) -> None:
    assert is_users_file(str(tmp_path / "model_def.py"))
    assert not any(map(is_users_file, (dray.__file__, searchers.__file__, "python/ray/includes/common.pxi")))
