"""Redirects what Ray prints and logs in the driver's process to a file, apart from the experiment's own output.

Ray tells every driver when a worker dies ("(raylet) A worker died ..."); dray reports it itself, with the trial. To a
connection made with `log_to_driver`, as by `ray.init()`, Ray also forwards what all its processes print.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.cluster import internals

FILE = "ray.log"


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop what can't be written, as on a full disk: logging would print a traceback."""


@contextlib.contextmanager
def redirect_ray_output(path: Path) -> Iterator[None]:
    """Append to ``path`` what Ray prints and logs in this process within the block."""
    handler = _File(path, encoding="utf-8", delay=True)
    handler.setFormatter(formatter := logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    formatter.converter = time.gmtime
    file_log = logging.Logger("ray's prints")
    file_log.addHandler(handler)

    def write(data: Mapping[str, Any]) -> None:
        for line in data["lines"]:
            file_log.info("(%s) %s", data.get("actor_name") or data.get("pid"), str(line).rstrip())

    log = logging.getLogger("ray")
    handlers = list(log.handlers)
    log.handlers[:] = [handler]
    try:
        with internals.print_to(write):
            yield
    finally:
        log.handlers[:] = handlers
        with contextlib.suppress(OSError):  # a full disk
            handler.close()
