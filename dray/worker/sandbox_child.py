"""The process of a trial in its sandbox: `dray.worker.sandbox` runs this module as a program.

It gets pickles on its standard input: its environment variables, then, after they are set, an `Inside`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import resource
import sys
from typing import TYPE_CHECKING, Any

from dray.environment import set_variables

if TYPE_CHECKING:
    from dray.leases.messages import Departure
    from dray.rpc.connection import Connection
    from dray.worker.sandbox import Inside

MAX_PROCESSES = 8192
"""Processes and threads of a sandbox. Linux counts them for each sandbox since 5.14, and never for root."""


def main() -> None:
    """Run the trial, and end this process without exit handlers, as after a trial in a worker."""
    given = sys.stdin.buffer
    set_variables(pickle.load(given))  # before torch is imported, which reads some of them
    faulthandler.enable(all_threads=False)  # as in Ray's workers
    gc.disable()  # during the imports, of whose time collections would take a fifth
    with contextlib.suppress(ValueError):  # the limit is lower already
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    inside: Inside = pickle.load(given)

    from dray.rpc.connection import Connection
    from dray.worker.log.trial_log import text_stream

    sys.stdout, sys.stderr = text_stream(1), text_stream(2)
    calls = Connection(inside.calls)
    departure = run(inside, calls)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the trial has closed it
            stream.flush()
    calls.leave(inside.lease.number, 0, departure).result()
    os._exit(0)


def run(inside: Inside, calls: Connection) -> Departure:
    """Load the trial's code, and run its lease. `calls`: the connection to the worker, which passes calls on."""
    from dray import core
    from dray.leases.failure import Failure
    from dray.leases.messages import Departure
    from dray.training.rng import deterministic
    from dray.worker.hang import exit_if_hung
    from dray.worker.log.trial_log import TrialLog
    from dray.worker.process_group import joined
    from dray.worker.ranks import Ranks
    from dray.worker.trial import log_path, run_logged
    from dray.worker.unfit import unloaded

    lease, experiment, place = inside.lease, inside.experiment, inside.place
    settings = experiment.settings
    alone: dict[str, Any] = {"world_rank": 0, "local_rank": 0, "node_rank": 0}
    ranks = Ranks(world_size=1, local_world_size=1, num_nodes=1, gpus=place.gpus, **alone)
    log = TrialLog(log_path(lease, 0), 1, flush=lambda: calls.flush().result())

    def hung(what: str) -> None:
        error = f"{what} (while its code is imported); the stacks of all threads are in {log.path}"
        departure = Departure(outcome="errored", error=error, failure=Failure(kind="hung"))
        calls.leave(lease.number, 0, departure).result()

    with (
        deterministic(settings.deterministic),
        joined(ranks, place._replace(ip="127.0.0.1"), lambda mine: ("", 0)),
    ):
        distributed = core.DistributedContext.from_torch_distributed(os.environ["MASTER_ADDR"])
        try:
            with exit_if_hung(settings.hang_timeout_s, pulse=lambda: 0, log=log.descriptor, report=hung):
                program = experiment.load_trial()
        except Exception as error:
            return unloaded(calls, inside.group, lease, error, is_reused=False)
        gc.enable()
        return run_logged(program, inside.code, lease, calls, calls, experiment, distributed, place, log)


if __name__ == "__main__":
    main()
