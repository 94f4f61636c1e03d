"""Where a worker group's processes enter: told to the desk before the long imports begin."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ray.util import get_current_placement_group


def serve_leases(work: dict[str, Any]) -> None:
    """What Ray Train runs on each worker: serve leases until the desk has no more.

    Args:
        work: ``desk`` (actor handle), ``group`` (name), ``run`` (a name of this run of the experiment), ``experiment``
            (``hosts.ray_worker.Experiment``), ``load_trial`` (a callable that returns the PyTorchTrial class or the
            ``Script`` to run; its ``place()`` is the directory of the code, or None: where trials run), ``log_format``
            (of what trials log).
    """
    work["desk"].arrived.remote(work["group"], get_current_placement_group(), (os.uname().nodename, _oom_kills()))
    from dray.cluster.worker import serve

    serve(work)


def _oom_kills() -> int:
    """How many processes the kernel has killed because memory ran out: of this container, or of the machine."""
    for place in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (line.split() for line in Path(place).read_text().splitlines())
            return next(int(value) for name, value in lines if name == "oom_kill")
    return 0
