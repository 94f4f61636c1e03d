"""Ends a process whose trial makes no progress, after writing the stacks of all its threads to the trial's log."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from dray.worker.children import end_children

CHECKS = 10
"""Number of checks of a trial within its timeout."""
SLACK = 1.5
"""Factor of the timeout for a process that can't even check its trial, because something holds the GIL."""
RECORD = "collectives_of_rank_"
"""Prefix of the files with the last collectives of a rank."""
REPORT_TIMEOUT_S = 5.0
"""How long reporting a hang may take."""


@contextlib.contextmanager
def exit_if_hung(
    timeout_s: float | None,
    *,
    pulse: Callable[[], object],
    log: int,
    report: Callable[[str], None],
    grace_s: float = 0.0,
) -> Iterator[None]:
    """End this process if ``pulse()`` stays the same for ``timeout_s`` seconds in the block.

    Python's watchdog (``faulthandler``) does so even if no Python thread can run; then ``report`` is not called.

    Args:
        timeout_s: seconds; None: never.
        pulse: its value changes with any progress.
        log: a file descriptor that the stacks are written to.
        report: called before the end, in another thread, with what happened.
        grace_s: seconds from writing the stacks to ending the process.
    """
    if timeout_s is None:
        yield
        return
    what = f"no batch trained or validated, and no checkpoint saved, for {timeout_s:g} s (hang_timeout_s)"
    done = threading.Event()

    def watch(timeout_s: float) -> None:
        last, since, dumped = pulse(), time.monotonic(), False
        faulthandler.dump_traceback_later(SLACK * timeout_s + grace_s, exit=True, file=log)
        while not done.wait(timeout_s / CHECKS):
            idle_s = time.monotonic() - since
            if (now := pulse()) != last:
                last, since, dumped = now, time.monotonic(), False
                faulthandler.dump_traceback_later(SLACK * timeout_s + grace_s, exit=True, file=log)
                continue
            if idle_s >= timeout_s and not dumped:
                os.write(log, f"dray: {what}; the stacks of all threads:\n".encode())
                faulthandler.dump_traceback(log, all_threads=True)
                dumped = True
            if idle_s >= timeout_s + grace_s:
                _exit(what, report)

    thread = threading.Thread(target=watch, args=(timeout_s,), name="dray-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def dump_collectives(log: Path, rank: int) -> None:
    """Write torch's record of this process's last collectives beside the trial's log, for `torchfrtrace`."""
    import torch
    import torch.distributed as dist

    name = "_dump_nccl_trace" if "nccl" in dist.get_backend_config() else "_dump_fr_trace"
    # Older versions of torch do not record gloo's collectives.
    if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
        Path(f"{log.parent}/{RECORD}{rank}").write_bytes(dump(True, True, False))


def _exit(what: str, report: Callable[[str], None]) -> NoReturn:
    reporting = threading.Thread(target=report, args=(what,), name="dray-hang-report", daemon=True)
    reporting.start()
    reporting.join(REPORT_TIMEOUT_S)
    end_children()
    # An exception would not reach the trial.
    os._exit(1)
