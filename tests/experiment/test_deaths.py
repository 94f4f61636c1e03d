"""The deaths of processes that NCCL's watchdog has aborted are explained by what these printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.desk.failure import Failure
from dray.desk.messages import TrialLeft
from dray.experiment.run import with_last_lines
from dray.worker.log.writer import ENDING

TRACE = [f"frame #{n}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{n} (0x7f libtorch_cuda.so)" for n in range(60)]
STACKS = ["Fatal Python error: Aborted", "", *(f'  File "/site/lib.py", line {n} in run' for n in range(200))]


def aborted(what: str) -> list[str]:
    """The output of a process that the watchdog of torch 2.x has aborted."""
    says = f"Process group watchdog thread terminated with exception: CUDA error: {what}"
    first = f"[rank1]:[E1128 05:00:00.1 ProcessGroupNCCL.cpp:2093] [PG ID 2 PG GUID 3 Rank 1] {says}"
    about = ["CUDA kernel errors might be asynchronously reported at some other API call.", *TRACE, ""]
    again = ["terminate called after throwing an instance of 'c10::DistBackendError'", f"  what():  [PG ID 2] {says}"]
    return ["loss 0.5", first, *about, *again, *about, *STACKS]


def printed(directory: Path, rank: int, *lines: str) -> None:
    text = "".join(f"2026-11-21T19:02:02.123Z {line}\n" for line in lines)
    (directory / f"rank_{rank}.log").write_text(text)


def death(*dead: int, kind: str = "died") -> TrialLeft:
    failure = Failure(kind=kind, batches=7)  # type: ignore[arg-type]
    nodes = [f"node-{rank}" for rank in dead]
    return TrialLeft(
        lease=1, group="g", trial=3, outcome="errored", error="it died", failure=failure, dead=dead, nodes=nodes
    )


@pytest.mark.parametrize(
    ("what", "node"),
    [
        ("uncorrectable ECC error encountered", "node-1"),
        ("unspecified launch failure", "node-1"),
        ("Invalid access of peer GPU memory over nvlink or a hardware error", "node-1"),
        ("an illegal memory access was encountered", ""),
        ("device-side assert triggered", ""),
    ],
)
def test_the_gpu_error_of_a_dead_rank_is_the_failure_with_its_node_if_it_may_be_broken(
    what: str, node: str, tmp_path: Path
) -> None:
    printed(tmp_path, 0, "loss 0.5")
    printed(tmp_path, 1, *aborted(what))
    left = with_last_lines(death(0, 1), tmp_path)
    assert left.failure is not None
    assert (left.failure.kind, left.failure.node, left.failure.batches) == ("device", node, 7)
    assert left.failure.where == f"CUDA error: {what}"
    assert left.error.startswith(f"it died: rank 1: CUDA error: {what}: Aborted\n  lib.py:0, in run\n\n")
    assert f"({tmp_path}/rank_1.log)" in left.error


def test_a_lack_of_gpu_memory_is_one(tmp_path: Path) -> None:
    printed(tmp_path, 1, *aborted("out of memory"))
    left = with_last_lines(death(1), tmp_path)
    assert left.failure == Failure(kind="oom", where="CUDA error: out of memory", batches=7)


def test_what_another_process_or_a_program_has_printed_is_not_the_cause(tmp_path: Path) -> None:
    ecc = "uncorrectable ECC error encountered"
    of_earlier = [*aborted(ecc), f"{ENDING}killed by SIGABRT", "loss 0.4"]
    of_program = ["caught RuntimeError: CUDA error: unknown error; trying again", "loss 0.4"]
    for lines in (of_earlier, of_program, []):
        printed(tmp_path, 1, *lines)
        assert with_last_lines(death(1), tmp_path).failure == Failure(kind="died", batches=7)
    printed(tmp_path, 1, *aborted(ecc))
    assert with_last_lines(death(1, kind="host_oom"), tmp_path).failure == Failure(kind="host_oom", batches=7)


def test_logs_of_other_machines_are_not_read(tmp_path: Path) -> None:
    printed(tmp_path, 1, *aborted("unknown error"))
    left = with_last_lines(death(1), tmp_path, can_read=False)
    assert (left.failure, left.error) == (Failure(kind="died", batches=7), f"it died; what it printed is in {tmp_path}")
