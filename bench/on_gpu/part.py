"""Shared by the parts of bench/gpu.py, in their own processes. Needs only torch and dray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _measure import STAMPS, Stamp, of_kind, read_stamps, stamp

from dray.core import DistributedContext

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
LINES = 16
"""Lines that are kept from the end of a failure."""
CHILD_LIMIT_S = 35.0
"""The limit on a GPU; a dry run may be on a busy machine."""


def figure(what: str, value: str, *, goal: str = "", reached: bool | None = None) -> None:
    """Note a figure. A later value replaces an earlier one, so a part that is cut off keeps its figures so far."""
    stamp("figure", what=what, value=value, goal=goal, reached=reached)


def check(what: str, found: object, wanted: object) -> None:
    """Note an outcome that must be the same on any machine. Otherwise the part has failed, but continues."""
    figure(what, str(found), goal=str(wanted), reached=found == wanted)
    if found != wanted:
        stamp("failure", what=what, text=f"{found}, and not {wanted}")


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """One step of a part. If it raises, the part has failed, but continues with its next step.

    If a package is missing, the whole part is left out.
    """
    doing(what)
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception:
        lines = traceback.format_exc().splitlines()[-LINES:]
        stamp("failure", what=what, text="\n".join(line[:300] for line in lines))


def note(text: str) -> None:
    """Add a line below the figures."""
    stamp("note", text=text)


def doing(what: str) -> None:
    """Note the step that begins now, to be named if the part is cut off in it."""
    stamp("doing", what=what)


def clock() -> float:
    """The time in seconds, once the GPU has nothing left to do."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def allocated() -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if ON_GPU else 0


def peak(begin: bool = False) -> int:
    """The most bytes of tensors on the GPU since the last call that began to count; 0 on a CPU."""
    if not ON_GPU:
        return 0
    if begin:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def used() -> int:
    """Bytes of the GPU that all processes use, also outside of torch's allocator; 0 on a CPU."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def stamps(*kinds: str) -> list[Stamp]:
    """The stamps of all processes of this part so far."""
    return of_kind(read_stamps(Path(os.environ[STAMPS])), *kinds)


class Child:
    """A function of one of the parts' modules, in a process of its own: it may break CUDA there, hang or be killed."""

    def __init__(self, module: str, function: str, *arguments: object, **environment: str) -> None:
        call = "import importlib, sys; m, f, *a = sys.argv[1:]; getattr(importlib.import_module(m), f)(*a)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", call, module, function, *map(str, arguments)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def ended(self) -> tuple[str, str]:
        """How the child ended, within a time limit, and its output."""
        limit_s = CHILD_LIMIT_S if ON_GPU else 4 * CHILD_LIMIT_S
        try:
            output, _ = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            return f"hung for {limit_s:.0f} s", output
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}", output


def well(child: Child, what: str) -> None:
    """Wait for a child that must succeed."""
    how, output = child.ended()
    if how != "exited with 0":
        stamp("failure", what=what, text="\n".join([how, *output.splitlines()[-LINES:]]))


def on_ranks(size: int, module: str, function: str, *arguments: object, **environment: str) -> list[Child]:
    """A function in so many processes, the ranks of one trial."""
    store = Path(tempfile.mkdtemp(dir=Path.cwd())) / "store"
    usual = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    usual |= {"USE_TORCH_DISTRIBUTED": "true", "GLOO_SOCKET_IFNAME": "lo", "STORE": store}
    fixed = {name: str(value) for name, value in usual.items()} | environment
    return [Child(module, function, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **fixed) for rank in range(size)]


def joined() -> DistributedContext:
    """The process group of this rank: over NCCL, as in dray's workers, if each rank has a GPU of its own; else gloo."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.device("cuda", rank) if torch.cuda.device_count() >= size else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "gloo" if gpu is None else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(os.environ["STORE"], size),
        rank=rank,
        world_size=size,
        device_id=gpu if os.environ.get("DRAY_BIND_DEVICE") == "1" else None,
    )
    return DistributedContext.from_torch_distributed()


def several() -> int:
    """The number of ranks for a part that needs two GPUs or more; two on a CPU. If there is one GPU, 0, and the part is
    left out."""
    count = torch.cuda.device_count() if ON_GPU else 2
    if count < 2:
        stamp("left_out", why="this machine has one GPU")
        return 0
    return count - count % 2


def classified(what: str, error: BaseException | None, kind: str) -> None:
    """How dray classifies an error, with its text; `kind`: the expected class."""
    from dray.leases.failure import failure_of
    from dray.training.parallel.ddp import is_disconnected

    if error is None:
        check(f"{what}: kind", "no error", kind)
        return
    check(f"{what}: kind", failure_of(error, 0).kind, kind)
    disconnected = ", is_disconnected" if is_disconnected(error) else ""
    note(f"{what}: `{type(error).__name__}{disconnected}: {' '.join(str(error).split())[:300]}`")


def raised(run: Any) -> BaseException | None:
    """The error that a function raises."""
    try:
        run()
    except Exception as error:
        return error
    return None
