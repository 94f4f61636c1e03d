"""``dray serve``: runs the experiments submitted to it, lends them its worker groups, and answers HTTP."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

from dray import private
from dray.cluster.connection import connect
from dray.config.notify import ServerNotify
from dray.errors import ExperimentError
from dray.experiment.interrupts import restore_handlers, set_handlers
from dray.experiment.notify import SERVED_AT
from dray.groups.on_ray import OnRay
from dray.records.directory import results_root
from dray.serve import address as addresses
from dray.serve.app import AT_ROOT, listening
from dray.serve.manager import Manager, why_full
from dray.serve.root_path import RootPath
from dray.serve.tokens import STATE, Tokens

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


IDLE_S = 600.0  # how long a worker group may be idle before it ends, by default


class RayDied(Exception):
    """A process of the Ray that was started for this server has died."""


def serve(
    host: str,
    port: int,
    address: str | None,
    idle_s: float,
    say: Callable[[str], None],
    notify: ServerNotify | None = None,
    root: RootPath = AT_ROOT,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP: then running trials save, and the queue is kept for the next server.

    If a process of the Ray that it has started dies, the same command replaces this process, once in five minutes.

    Args:
        host, port: the HTTP server's; ports in use are skipped.
        address: the Ray cluster's; None: ``RAY_ADDRESS``, or a new cluster on this machine.
        idle_s: how long a worker group may be idle before it ends.
        notify: who is told what about all experiments and about idle slots.
        root: the path below which a proxy serves it.

    Raises:
        ConfigError: other machines can reach the host, and there is no token; or the file of tokens can't be read.
        JournalError: another server uses the results directory.
        ConnectionError: there is no cluster at the address.
        ExperimentError: no port is free, or the disk is full, or Ray has died again.
    """
    environment = dict(os.environ)
    results = results_root().resolve()
    results.mkdir(parents=True, exist_ok=True)
    private.make_directory(results / STATE)  # can't be written to: said before Ray starts
    if full := why_full(results):
        raise ExperimentError(full)
    token = addresses.token_for(host, results)
    tokens = Tokens(results, token)
    tokens.all()  # refused before Ray starts
    over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        restore_handlers(before)  # a second signal ends the process at once
        over.set()

    before = set_handlers(stop)
    try:
        with connect(address) as cluster:
            manager = Manager(OnRay(cluster), tokens, idle_s=idle_s, say=say, notify=notify)
            with listening(manager, results, host, port, tokens, root) as url:
                addresses.write(results, url, token)
                os.environ[SERVED_AT] = root.address or url  # of the processes that it starts, too
                say(f"serving {results} on {cluster.description}")
                say(f"open {root.address or url}/login?token={token}")
                try:
                    manager.run(over.is_set)
                    if not manager.ray_died.is_set():
                        say("running trials save a checkpoint; press Ctrl-C again to end at once")
                    manager.stop()
                finally:
                    with contextlib.suppress(OSError):  # a full disk: the file's process is gone anyway
                        addresses.remove(results)
            manager.close()  # only now: HTTP requests wait for its event loop
            if manager.ray_died.is_set():
                raise RayDied  # ends what is left of Ray
    except RayDied:
        leave_soon(0 if over.is_set() else 1)
        if not over.is_set():
            restart(environment, say)
    finally:
        restore_handlers(before)
