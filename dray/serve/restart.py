"""Starts a server again whose Ray has died, with the same command in the same process; or lets it end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from dray.errors import ExperimentError

RESTARTED = "_DRAY_SERVER_RESTARTED"  # Unix time of the last restart
AGAIN_S = 300.0  # the shortest time between two restarts
LEAVE_S = 2.0  # how long the process may take to end


def leave_soon(code: int) -> None:
    """End the process in a moment, with this exit code: threads that wait for the dead Ray would keep it for a minute,
    after which Ray ends it with an error of its own."""
    timer = threading.Timer(LEAVE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def restart(environment: Mapping[str, str], say: Callable[[str], None]) -> NoReturn:
    """Replace this process's program by itself, which finds its queue as after a kill. `environment`: as it was when
    this one started. A second time within five minutes, it is an `ExperimentError`."""
    died = "a process of Ray on this machine has died"
    if abs(time.time() - float(environment.get(RESTARTED) or 0)) < AGAIN_S:  # the clock may have been set back
        raise ExperimentError(
            f"{died} again within {AGAIN_S / 60:.0f} minutes, perhaps for want of memory; start the server again, "
            "which then continues its queue"
        )
    say(f"{died}; the server starts again, and continues its queue")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, RESTARTED: str(time.time())})
