"""Private names of Ray: all that dray uses, besides those of Ray Train and Tune.

Each costs one feature where a version of Ray lacks it, and a line that says so, never the start.
``tests/cluster/test_ray_internals.py`` lists them, and checks that no other file uses any.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from dray.text import one_line

logger = logging.getLogger(__name__)

NODE_S = 15.0  # how long a new cluster's node may take to register before Ray itself waits for it
NODE_POLL_S = 0.05
NODES_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"  # a method of the head by its name on the wire
_CHANGED = (ImportError, AttributeError, TypeError, LookupError, ValueError, AssertionError, NotImplementedError)
"""The errors of a Ray with other names, arguments or results. Any other is raised, such as Ray's of a lost head."""
_reported: set[str] = set()  # costs that were logged


@contextlib.contextmanager
def optional(cost: str) -> Iterator[None]:
    """A block that uses private names of Ray. If one is missing or has changed, the block ends there.

    Args:
        cost: a sentence that says what does not work without them; logged once.
    """
    try:
        yield
    except _CHANGED as error:
        if cost not in _reported:
            _reported.add(cost)
            what = "%s, because Ray %s has changed an internal that dray uses: %s"
            logger.warning(what, cost, ray.__version__, one_line(error))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block the attribute ``name`` of ``owner`` has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _replaced_in_ray(module: str, name: str, by: Callable[[Any], Any], cost: str) -> Iterator[None]:
    """Within the block the attribute is replaced by what ``by`` makes of it, if this Ray has it."""
    with contextlib.ExitStack() as stack:
        with optional(cost):
            owner = importlib.import_module(module)
            stack.enter_context(replaced(owner, name, by(getattr(owner, name))))
        yield


# ----------------------------------------------------------------------------------------------------- starting Ray
@contextlib.contextmanager
def quick_start(token: Callable[[], str]) -> Iterator[None]:
    """Ray that is started within the block has no autoscaler, no log monitor and no dashboard process.

    On one machine these three do nothing (without a dashboard, its process only counts usage), and ``ray.init()`` has
    no option to leave them out. Ray's start waits for the dashboard's process, and its shutdown for the autoscaler:
    with them, a start and shutdown take about 3 s longer and 2 s more of CPU. Ray would also import everything that the
    dashboard needs, to see whether it is installed, and look only once a second whether the new node is up.

    Args:
        token: returns the token that the new cluster requires, or "".
    """

    def parameters(ray_params: Any) -> Callable[..., Any]:
        # With its default port, the agent of a second Ray on this machine tries for 3 s to get the first one's.
        changes = {"no_monitor": True, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
        inspect.signature(ray_params).bind_partial(**changes)  # a TypeError if it has no such parameter any more
        return functools.partial(ray_params, **changes)

    def get_node(original: Callable[..., Any]) -> Callable[..., Any]:
        def once_registered(gcs_address: str, node_id: str) -> Any:
            _wait_for_node(gcs_address, node_id, token())
            return original(gcs_address, node_id)

        return once_registered

    with contextlib.ExitStack() as stack:
        for module, name, by in (
            ("ray._private.parameter", "RayParams", parameters),
            ("ray._private.services", "start_api_server", lambda _: lambda *_, **__: ("", None)),
            ("ray._private.services", "get_node", get_node),
            ("ray._private.utils", "get_dashboard_dependency_error", lambda _: lambda: None),
        ):
            stack.enter_context(_replaced_in_ray(module, name, by, "starting Ray takes seconds longer"))
        yield


def keep_loopback() -> contextlib.AbstractContextManager[None]:
    """``ray.init()`` in the block uses a loopback address as it is given.

    On Linux, Ray would replace it by an address that other machines reach; on macOS it does not.
    """
    cost = "other machines can reach the Ray that dray starts on this one, and only its token keeps them out"
    return _replaced_in_ray(
        "ray._private.services", "resolve_ip_for_localhost", lambda _: lambda host, *_, **__: host, cost
    )


def _wait_for_node(gcs_address: str, node_id: str, token: str) -> None:
    import grpc

    deadline = time.monotonic() + NODE_S
    with contextlib.suppress(grpc.RpcError), nodes_of_head(gcs_address, token, NODE_S) as encoded_nodes:
        while bytes.fromhex(node_id) not in encoded_nodes() and time.monotonic() < deadline:
            time.sleep(NODE_POLL_S)


@contextlib.contextmanager
def nodes_of_head(gcs_address: str, token: str, timeout_s: float) -> Iterator[Callable[[], bytes]]:
    """Yields a function that returns the head's encoded reply about its nodes; ``grpc.RpcError`` if it refuses.

    Args:
        token: sent to the head; "" if there is none.
    """
    import grpc  # here: workers do not need it

    credentials = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(gcs_address) as channel:
        call = channel.unary_unary(NODES_METHOD)
        yield lambda: bytes(call(b"", timeout=timeout_s, metadata=credentials))


# ---------------------------------------------------------------------------------------------------- a running cluster
def draining_nodes() -> set[str]:
    """Ids of nodes that will be removed, such as spot instances shortly before their end.

    ``ray.train.get_preemption_info()`` has the same, but it is a barrier that all ranks must call equally often, so a
    separate thread can't use it. Ray has no other public way.
    """
    found: set[str] = set()
    with optional("trials do not save when their node is about to be removed"):
        found.update(ray._private.state.state.get_draining_nodes())
    return found


def cluster_status(gcs_address: str, timeout_s: int) -> Any:
    """Ray's ``ClusterStatus``; call it in a block that is `optional`."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    return get_cluster_status(gcs_address, timeout_s)


def print_to(write: Callable[[dict[str, Any]], None]) -> contextlib.AbstractContextManager[None]:
    """Within the block, ``write`` gets what Ray would print in this process of its own and of its workers' output."""
    return _replaced_in_ray(
        "ray._private.worker",
        "print_worker_logs",
        lambda _: lambda data, *_, **__: write(data),
        "Ray prints its messages among the experiment's",
    )


def upload(directory: Path, scratch: Path) -> str | None:
    """Put a directory into the cluster's store, once per content; returns a URI for ``py_modules``, or None."""
    uri = None
    with optional("dray itself is not sent to the workers, so their nodes need the driver's version of it"):
        from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

        uploaded = upload_working_dir_if_needed(
            {"working_dir": str(directory), "excludes": ["__pycache__"]},
            include_gitignore=False,
            scratch_dir=str(scratch),
            logger=logger,
        )
        uri = str(uploaded["working_dir"])
    return uri
