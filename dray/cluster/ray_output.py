"""Redirects what Ray prints and logs in the driver's process to a file, away from the experiment's own output.

Ray tells every driver when a worker dies ("(raylet) A worker died ..."); dray reports it itself, with the trial. A
connection made with `log_to_driver`, as by `ray.init()`, also gets the output of all of Ray's processes. Ray has no
public way to redirect either; the private interfaces used for it are in this file.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray._private.worker as rays

FILE = "ray.log"
_PRINTS = "ray_print_logs"


@contextlib.contextmanager
def redirect_ray_output(path: Path) -> Iterator[None]:
    """In the block, append to ``path`` what Ray prints and logs in this process."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(formatter := logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    formatter.converter = time.gmtime
    into = logging.Logger("ray's output")
    into.addHandler(handler)

    def note(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        for line in data["lines"]:
            into.info("(%s) %s", data.get("actor_name") or data.get("pid"), str(line).rstrip())

    dispatcher, printed, log = (
        rays.global_worker_stdstream_dispatcher,
        rays.print_to_stdstream,
        logging.getLogger("ray"),
    )
    prints = [print_them for name, print_them in dispatcher.handlers if name == _PRINTS]
    handlers = list(log.handlers)
    log.handlers[:] = [handler]
    # A connection made within the block registers the module's function; one made before has registered it already.
    rays.print_to_stdstream = note
    dispatcher.remove_handler(_PRINTS)
    if prints:
        dispatcher.add_handler(_PRINTS, note)
    try:
        yield
    finally:
        rays.print_to_stdstream = printed
        dispatcher.remove_handler(_PRINTS)
        for print_them in prints:
            dispatcher.add_handler(_PRINTS, print_them)
        log.handlers[:] = handlers
        handler.close()
