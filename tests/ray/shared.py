"""The Ray cluster of all tests that need no particular one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
from ray.cluster_utils import Cluster

from tests.forks.process import forked_workers
from tests.ray.harness import descendants, wait_for

CPUS = 2
FREE_WITHIN_S = 60.0


class SharedCluster:
    """Starts when it is first used.

    A test must leave nothing on it, and those about that say so themselves. Here it is made sure that one module's
    tests do not wait for CPUs that another's have left in use, once in a hundred runs, for reasons of Ray's or ours:
    then it is replaced, and a warning tells what held them.
    """

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def when_free(self) -> str:
        """Its address, once all its CPUs are free."""
        if self._cluster is not None:
            state = self._state()
            try:
                wait_for(lambda: state.available_resources().get("CPU") == CPUS, "free CPUs", FREE_WITHIN_S)
            except TimeoutError:
                warnings.warn(f"the shared cluster is replaced, its CPUs are in use:\n{_users(state)}", stacklevel=1)
                self.shutdown()
        if self._cluster is None:
            only_what_is_needed = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
            node = {"num_cpus": CPUS, **only_what_is_needed, **forked_workers()}
            self._cluster = _started(node)
        return str(self._cluster.address)

    def shutdown(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None

    def _state(self) -> GlobalState:
        assert self._cluster is not None
        state, any_cluster = GlobalState(), {"allow_cluster_id_nil": True, "fetch_cluster_id_if_nil": True}
        # `ray.init` would do it, in a second.
        state._initialize_global_state(GcsClientOptions.create(self._cluster.address, None, **any_cluster))  # noqa: SLF001
        return state


def _started(node: dict[str, Any], tries: int = 3) -> Cluster:
    """A cluster with this head. On a busy machine Ray gives up after half a minute, without a setting for it."""
    try:
        return Cluster(initialize_head=True, head_node_args=node)
    except Exception as error:
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        return _started(node, tries - 1)


def _users(state: GlobalState) -> str:
    """What Ray knows of that runs, and where the processes of its workers are."""
    groups = {key: value for key, value in state.placement_group_table().items() if value["state"] != "REMOVED"}
    actors = {key: value for key, value in state.actor_table(None, None, None).items() if value["State"] != "DEAD"}
    said = [f"free: {state.available_resources()}", f"placement groups: {groups}", f"actors: {actors}"]
    for pid, name in descendants(os.getpid()).items():
        if name.startswith("ray::"):
            said.append(name)
            stack = [Path(sys.executable).with_name("py-spy"), "dump", "--pid", str(pid)]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it has ended, or can't be read
                said.append(subprocess.run(stack, capture_output=True, text=True, timeout=30, check=False).stdout)
    return "\n".join(said)
