"""Connects to the Ray cluster that an experiment runs on: joins one, or starts one.

Starting Ray without needless processes takes internal APIs of Ray, which are used in this file alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from dray import private
from dray.cluster import token
from dray.environment import variables_set
from dray.text import one_line

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0  # how long a cluster may take to accept a TCP connection
NODE_S = 15.0  # how long a new cluster's node may take, until it is left to Ray to wait for it
NODE_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A connection to Ray, for a ``with`` block.

    A cluster that was started here is kept for this process's next `connect`, unless the block raises. It ends with
    this process. A joined one, and the connection to it, stay.
    """

    own: bool  # started by this process, for its own experiments alone
    local: bool = False  # all its nodes are this machine: workers have the driver's files and packages
    description: str

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        global _kept
        if self.own and kind is None:
            _kept = ray.get_runtime_context().gcs_address, _inherited()
        elif self.own:
            ray.shutdown()


_kept: tuple[str, object] | None = None
"""The kept cluster's address, and what its processes have inherited from this process; None: no cluster is kept."""


def _inherited() -> object:
    return dict(os.environ), os.getcwd()


def _all_live() -> bool:
    """Whether all processes of the cluster that was started here live. Without its head, Ray would end this process."""
    node = ray._private.worker.global_worker.node
    return node is not None and not node.dead_processes()


def connect(address: str | None) -> Cluster:
    """Connect to Ray.

    In this order: this process's existing connection; ``address``; ``RAY_ADDRESS`` in the environment; the cluster that
    this process has kept, unless environment variables or the working directory have changed, or one of its processes
    has died; a new cluster on this machine. Never the cluster in Ray's address file, which may have died long ago.

    Raises:
        ConnectionError: there is no cluster at the address, or a new one does not start, or another user may know the
            token that it would require.
    """
    global _kept
    address = address or os.environ.get("RAY_ADDRESS")
    is_local = not address or address == "local"
    kept, _kept = _kept, None
    # Another one, if it was shut down and Ray started by the user's code.
    if ray.is_initialized() and kept is not None and ray.get_runtime_context().gcs_address == kept[0]:
        if is_local and kept[1] == _inherited() and _all_live():
            return _own("the Ray cluster of the run before")
        ray.shutdown()
    if ray.is_initialized():
        return Cluster(
            own=False, description=f"the Ray cluster at {ray.get_runtime_context().gcs_address} (already connected)"
        )
    if address and not is_local:
        join(address)
        return Cluster(own=False, description=f"the Ray cluster at {address}")
    token.secure()
    directory = _ray_directory()
    try:
        _start(directory)
    except Exception:
        # Ray's node gives up after 15 s, in which it has to import much: the next time, it is in memory.
        try:
            _start(directory)
        except Exception as error:
            raise ConnectionError(
                f"Ray did not start on this machine, tried twice: {one_line(error)} Its logs are in "
                f"{directory}/session_latest/logs; start Ray yourself (ray start --head), and set RAY_ADDRESS"
            ) from error
    return _own("a new Ray cluster on this machine")


def _ray_directory() -> Path:
    """Where Ray's sockets, logs and code are on a cluster that dray starts; no other user gets there.

    Ray lets all users of the machine write into its own directory, `/tmp/ray`: they could put their sockets and their
    code in place of those that its processes use.
    """
    from ray._common.utils import get_default_system_temp_dir

    place = Path(get_default_system_temp_dir(), f"dray-{os.getuid()}")
    try:
        private.make_directory(place)
    except OSError as error:
        raise ConnectionError(f"Ray can't start on this machine: {error}") from None
    return place / "ray"


def _start(directory: Path) -> None:
    """Start a cluster that only this machine can reach, and connect to it."""
    # No dashboard: a user who wants one starts Ray first. No worker for each CPU, before it is known what they run.
    prestarts = {"RAY_prestart_worker_first_driver": "0"}
    with _without_needless_processes(), _keep_signal_handlers(), _keep_loopback(), variables_set(prestarts):
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


def join(address: str) -> None:
    refused = ""
    try:
        # If nothing listens there, Ray tries for minutes and then ends the process.
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit() and "://" not in address:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            refused = token.auth_error(address)
        if not refused:
            with _keep_signal_handlers(), _keep_loopback():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        refused = token.local_auth_error() if address == "auto" else ""
        if not refused:
            raise ConnectionError(
                f"no Ray cluster answers at {address}: {one_line(error)}; check the address, or RAY_ADDRESS"
            ) from None
    if refused:
        raise ConnectionError(f"the Ray cluster at {address} refuses this process: {refused}")


@contextlib.contextmanager
def _replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """In the block these attributes, (owner, name, value), of Ray's modules have other values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for attribute in attributes:
        setattr(*attribute)
    try:
        yield
    finally:
        for attribute in before:
            setattr(*attribute)


def _without_needless_processes() -> contextlib.AbstractContextManager[None]:
    """Ray that is started within the block has no autoscaler, no log monitor and no dashboard process, and its other
    processes each have their own session.

    On one machine these three do nothing (without a dashboard, its process only counts usage), and `ray.init()` has no
    option to leave them out. Ray's start waits for the dashboard's process, and its shutdown for the autoscaler: with
    them, a start and shutdown take about 3 s longer and 2 s more of CPU. To see whether all that the dashboard needs is
    installed, which it is with dray, Ray would import it.

    A signal to the driver's process group (from `timeout`, or a terminal that is closed) must not end Ray before the
    trials have saved. The kernel still kills Ray's processes when the driver dies.
    """
    from ray._private import node, parameter, services, utils

    def start_api_server(self: Any, **_: Any) -> None:
        self._webui_url = ""

    parameters = functools.partial(
        parameter.RayParams,
        no_monitor=True,
        include_log_monitor=False,
        dashboard_agent_listen_port=0,  # else a second Ray on this machine tries for 3 s to get the first one's port
    )
    return _replaced(
        (parameter, "RayParams", parameters),
        (node.Node, "start_api_server", start_api_server),
        (utils, "get_dashboard_dependency_error", lambda: None),
        (services, "get_node", _get_node),
        (services, "ConsolePopen", functools.partial(services.ConsolePopen, start_new_session=True)),
    )


def _get_node(gcs_address: str, node_id: str) -> Any:
    """As Ray's, which looks once a second whether a new node is up."""
    from ray._private import services
    from ray._private.state import GlobalState

    state = GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(gcs_address))
    deadline = time.monotonic() + NODE_S
    while not state.node_table() and time.monotonic() < deadline:
        time.sleep(NODE_POLL_S)
    return state.get_node(node_id)


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """``ray.init()`` in the block leaves the process its own handler of SIGTERM.

    Ray would replace it by one that ends Ray immediately, and, in C++, by one that prints a stack trace.
    """
    from ray._private import utils

    try:
        with _replaced((utils, "set_sigterm_handler", lambda handler: None)):
            yield
    finally:
        if threading.current_thread() is threading.main_thread() and (own := signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, own)


def _keep_loopback() -> contextlib.AbstractContextManager[None]:
    """``ray.init()`` in the block uses a loopback address as it is given.

    On Linux, Ray would replace it by an address that other machines reach; on macOS it does not either.
    """
    from ray._private import services

    return _replaced((services, "resolve_ip_for_localhost", lambda host: host))


def _own(what: str) -> Cluster:
    resources = ray.cluster_resources()
    gpus = f", {int(resources['GPU'])} GPUs" if resources.get("GPU") else ""
    return Cluster(own=True, local=True, description=f"{what}, {int(resources.get('CPU', 0))} CPUs{gpus}")
