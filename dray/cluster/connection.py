"""Connects to the Ray cluster that an experiment runs on: joins one, or starts one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import ray

from dray import private
from dray.cluster import internals, token
from dray.cluster.watch import knock
from dray.environment import variables_set
from dray.errors import RAY
from dray.text import counted, one_line

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0  # how long a cluster may take to accept a TCP connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A connection to Ray, for a ``with`` block.

    A cluster that was started here is kept for this process's next `connect`, unless the block raises, and ends with
    this process. A joined cluster, and the connection to it, stay.
    """

    own: bool  # started by this process, for its own experiments alone
    local: bool = False  # all its nodes are this machine: workers have the driver's files and packages
    description: str

    def addresses(self) -> list[str]:
        """Where it listens while it lives: its head, and, if it was started here, its node, which nobody replaces."""
        return [ray.get_runtime_context().gcs_address, *(_node_addresses() if self.own else ())]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        global _kept
        if self.own and kind is None:
            _kept = ray.get_runtime_context().gcs_address, _inherited()
        elif self.own:
            ray.shutdown()


_kept: tuple[str, object] | None = None
"""The kept cluster's address, and the environment that its processes inherited; None: no cluster is kept."""


def _inherited() -> object:
    return dict(os.environ), os.getcwd()


def _all_live() -> bool:
    """Whether the processes of the cluster that was started here answer. Without its head, Ray would end this one."""
    try:
        for address in (ray.get_runtime_context().gcs_address, *_node_addresses()):
            knock(address, CONNECT_S)
    except OSError:
        return False
    return True


def _node_addresses() -> list[str]:
    return [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes()]


def connect(address: str | None) -> Cluster:
    """Connect to Ray.

    The first of these is used: this process's existing connection; ``address``; ``RAY_ADDRESS`` in the environment; the
    cluster that this process has kept, unless environment variables or the working directory have changed, or one of
    the cluster's processes has died; a new cluster on this machine. The cluster in Ray's address file is never used,
    because it may have died long ago.

    Raises:
        ConnectionError: there is no cluster at the address, or a new one does not start, or another user may know the
            token that it would require, or this Ray is too old, or the working directory has another dray.
    """
    global _kept
    _check_version()
    address = address or os.environ.get("RAY_ADDRESS")
    is_local = not address or address == "local"
    kept, _kept = _kept, None
    # The user's code may have shut Ray down, and started another cluster.
    if ray.is_initialized() and kept is not None and ray.get_runtime_context().gcs_address == kept[0]:
        if is_local and kept[1] == _inherited() and _all_live():
            return _own("the Ray cluster of the run before")
        ray.shutdown()
    if ray.is_initialized():
        return Cluster(
            own=False, description=f"the Ray cluster at {ray.get_runtime_context().gcs_address} (already connected)"
        )
    if address and not is_local:
        join(address)  # the address may be "auto"
        return Cluster(own=False, description=f"the Ray cluster at {ray.get_runtime_context().gcs_address}")
    _check_working_directory()
    token.secure()
    directory = _ray_directory()
    # On a slow machine Ray's node gives up, 15 s into its imports (ray-project/ray#65983); the next time, these are
    # in memory. With a version of Ray that differs from those that dray knows, a start in Ray's own way may succeed.
    tries: list[AbstractContextManager[None]] = [internals.quick_start(token.own) for _ in range(2)]
    tries.append(contextlib.nullcontext())
    for quickly in tries:
        try:
            _start(directory, quickly)
            return _own("a new Ray cluster on this machine")
        except Exception as caught:
            error = caught
    raise ConnectionError(
        f"Ray did not start on this machine, tried three times: {one_line(error)} Its logs are in "
        f"{directory}/session_latest/logs; start Ray yourself (ray start --head), and set RAY_ADDRESS"
    ) from error


def _ray_directory() -> Path:
    """Where Ray's sockets, logs and code are on a cluster that dray starts; no other user gets there.

    Ray lets all users of the machine write into its own directory, `/tmp/ray`: they could put their sockets and their
    code in place of those that its processes use.
    """
    try:
        private.make_directory(place := _temporary_directory() / f"dray-{os.getuid()}")
    except OSError as error:
        raise ConnectionError(f"Ray can't start on this machine: {error}") from None
    return place / "ray"


def _temporary_directory() -> Path:
    """The one that Ray uses. On macOS, `TMPDIR` is too long for the paths of sockets."""
    on_linux = os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None
    return Path(os.environ.get("RAY_TMPDIR") or on_linux or "/tmp")


def _start(directory: Path, quickly: AbstractContextManager[None]) -> None:
    """Start a cluster that only this machine can reach, and connect to it."""
    # No dashboard: a user who wants one starts Ray first. No worker for each CPU, before it is known what they run.
    prestarts = {"RAY_prestart_worker_first_driver": "0"}
    with quickly, _keep_signals(), internals.keep_loopback(), variables_set(prestarts):
        try:
            ray.init(
                address="local",
                _node_ip_address=LOOPBACK,  # what all of Ray's processes then listen at
                _temp_dir=str(directory),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except BaseException:  # also Ctrl-C: no half of a cluster stays
            ray.shutdown()
            raise
    if not os.environ.get("RAY_AUTH_MODE"):  # versions of Ray that require one by default set it
        log.warning(
            "Ray %s on this machine requires no token: other users of the machine can run code as you; export "
            "RAY_AUTH_MODE=token to keep them out, or RAY_AUTH_MODE=disabled if there are none",
            ray.__version__,
        )


def _check_version() -> None:
    # Workers would fail without it; Ray 2.54 has brought it.
    if not hasattr(ray.runtime_context.RuntimeContext, "get_session_name"):
        raise ConnectionError(f"Ray {ray.__version__} is too old; dray needs {RAY}")


def _check_working_directory() -> None:
    # Ray's workers look there first, but the `dray` command does not: in a clone, they would run the clone's code.
    for name in ("dray", "searchers"):
        found, own = PathFinder.find_spec(name, [""]), Path(__file__).parents[2] / name / "__init__.py"
        if found and found.origin and not own.samefile(found.origin):
            raise ConnectionError(
                f"Ray's workers would import {name} from {found.origin}, since that is in the working directory, and "
                f"not from {own}: start in another directory"
            )


def join(address: str) -> None:
    """Connect to the cluster at this address; `ConnectionError` if none answers, or it refuses this process's token."""
    _check_version()
    _check_working_directory()
    refused = ""
    try:
        # If nothing listens there, Ray tries for minutes and then ends the process.
        if address.rpartition(":")[2].isdigit() and "://" not in address:
            knock(address, CONNECT_S)
            refused = token.auth_error(address)
        if not refused:
            with _keep_signals(), internals.keep_loopback():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        if not (refused := token.auth_error_in(error)):
            raise ConnectionError(
                f"no Ray cluster answers at {address}: {one_line(error)}; check the address, or RAY_ADDRESS"
            ) from None
    if refused:
        raise ConnectionError(f"the Ray cluster at {address} refuses this process: {refused}")


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """``ray.init()`` in the block leaves the process its own handler of SIGTERM, and each process that it starts gets
    its own session.

    Ray would replace the handler by one that ends Ray immediately, and, in C++, by one that prints a stack trace. A
    signal to the driver's process group (from `timeout`, or a terminal that is closed) must not end Ray before the
    trials have saved. The kernel still kills Ray's processes when the driver dies.
    """
    popen = functools.partialmethod(subprocess.Popen.__init__, start_new_session=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(internals.replaced(subprocess.Popen, "__init__", popen))
        if threading.current_thread() is threading.main_thread():  # only this thread can set handlers
            if (own := signal.getsignal(signal.SIGTERM)) is not None:
                stack.callback(signal.signal, signal.SIGTERM, own)
            stack.enter_context(internals.replaced(signal, "signal", lambda number, _: signal.getsignal(number)))
        yield


def _own(what: str) -> Cluster:
    resources = ray.cluster_resources()
    gpus = f", {counted(int(resources['GPU']), 'GPU')}" if resources.get("GPU") else ""
    return Cluster(own=True, local=True, description=f"{what}, {counted(int(resources.get('CPU', 0)), 'CPU')}{gpus}")
