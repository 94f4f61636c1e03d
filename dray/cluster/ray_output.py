"""Redirects what Ray prints and logs in the driver's process to a file, apart from the experiment's own output.

Ray tells every driver when a worker dies ("(raylet) A worker died ..."); dray reports it itself, with the trial. To a
connection made with `log_to_driver`, as by `ray.init()`, Ray also forwards what all its processes print. Ray has no
public way to redirect either; the internal APIs that this takes are used in this file alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray._private.worker as ray_worker

FILE = "ray.log"
_PRINT_HANDLER = "ray_print_logs"  # Ray's name of the handler that prints


@contextlib.contextmanager
def redirect_ray_output(path: Path) -> Iterator[None]:
    """Append to ``path`` what Ray prints and logs in this process within the block."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(formatter := logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    formatter.converter = time.gmtime
    file_log = logging.Logger("ray's prints")
    file_log.addHandler(handler)

    def write(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        for line in data["lines"]:
            file_log.info("(%s) %s", data.get("actor_name") or data.get("pid"), str(line).rstrip())

    dispatcher, log = ray_worker.global_worker_stdstream_dispatcher, logging.getLogger("ray")
    print_function = ray_worker.print_to_stdstream
    printers = [printer for name, printer in dispatcher.handlers if name == _PRINT_HANDLER]
    handlers = list(log.handlers)
    log.handlers[:] = [handler]
    # A connection made within the block registers the module's function; one made before has registered it already.
    ray_worker.print_to_stdstream = write
    dispatcher.remove_handler(_PRINT_HANDLER)
    if printers:
        dispatcher.add_handler(_PRINT_HANDLER, write)
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = print_function
        dispatcher.remove_handler(_PRINT_HANDLER)
        for printer in printers:
            dispatcher.add_handler(_PRINT_HANDLER, printer)
        log.handlers[:] = handlers
        handler.close()
