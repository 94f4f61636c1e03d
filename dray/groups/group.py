"""The worker groups that run trials, on a Ray cluster.

The driver owns the groups directly: their processes and resource requests end with it, however it ends, and no process
in between can die. They don't belong to a Tune trainable, because Tune ends cached actors when nothing is queued, and
their groups would end with them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from dray.cluster.node_check import kills_of_kernel
from dray.cluster.nodes import on_node
from dray.groups.effects import GroupPlaced
from dray.groups.slots import Slots
from dray.groups.train_workers import start_workers
from dray.leases.failure import LOST_NODE, LOW_MEMORY
from dray.leases.messages import GroupEnded
from dray.text import one_line
from dray.worker.entry import ended, serve_leases
from dray.worker.spec import WorkerSpec

WAIT_S = 60.0
"""How often a group that waits for its slots checks whether it has been ended."""
SURVIVORS_S = 0.1
"""How long the surviving processes of a group have to report their trial's progress after a death."""
LEAVE_S = 5.0
"""How long the other processes of a group have to end after the first one has ended."""
NODE_DIED = "node has died"
"""Ray's words about a process whose node it has lost."""
ANSWER_TIMEOUT_S = 5.0
"""How long a node may take to report its kernel's OOM kills."""
TITLE = "RayTrainWorker"
"""The name of a group's processes in `ps`."""


class WorkerGroup:
    """Processes that serve leases, from the request for their slots to their end.

    A group starts once: after its end another one replaces it. `report` is called, in any thread, when it has got its
    slots, and when its processes have ended or could not start.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        slots: Slots,
        report: Callable[[GroupPlaced | GroupEnded], None],
    ) -> None:
        self.name, self.start = spec.group, spec.start
        self._spec, self._slots, self._report = spec, slots, report
        # Until it is ready, the autoscaler sees it as demand. It ends with this process, and the workers end with it.
        self._placement = placement_group(
            [slots.resources] * slots.per_trial,
            strategy=slots.placement_strategy,
            bundle_label_selector=[dict(slots.labels)] * slots.per_trial if slots.labels else None,
            name=f"{spec.owner}/{self.name}/{self.start}",
        )
        # By rank, after the processes have started: their nodes, their `ended` calls, and earlier OOM kills there.
        self._nodes: list[str] = []
        self._ends: list[Any] = []
        self._oom_kills_before: list[Any] = []
        self._lock = threading.Lock()
        self._is_ending = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._start_workers, name=f"dray-{self.name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End its processes at once, and free its slots. Idempotent."""
        first = self._claim_end()
        remove_placement_group(self._placement)
        if first:
            self._report_end({}, "")

    def ended(self, by: float) -> bool:
        """Wait for its end until the time `by` (``time.monotonic()``). Returns whether it has ended."""
        return self._ended.wait(max(0.0, by - time.monotonic()))

    def join(self, by: float) -> None:
        """Wait for its thread until the time `by`; call `end` first."""
        self._thread.join(max(0.0, by - time.monotonic()))

    def _start_workers(self) -> None:
        try:
            while not self._placement.wait(WAIT_S):
                if self._is_ending or not ray.is_initialized():
                    return
            self._report(GroupPlaced(group=self.name, start=self.start))
            workers = start_workers(
                functools.partial(serve_leases, self._spec),
                self._placement,
                name=f"{self._spec.owner}-{self.name}",
                resources=self._slots.resources,
                runtime_env=self._slots.env_for_ray,
                is_ending=lambda: self._is_ending,
            )
        except Exception as error:  # reported to the driver, unless the group was ended, which may raise anything here
            if self._claim_end():
                self._report_end({}, one_line(error) or repr(error))
            return
        self._nodes = [worker.node for worker in workers]
        self._oom_kills_before = [worker.actor.execute.remote(oom_kills) for worker in workers]
        self._ends = [worker.actor.execute.options(name=TITLE).remote(ended) for worker in workers]
        for end in self._ends:
            end.future().add_done_callback(self._on_first_end)

    def _on_first_end(self, _: object) -> None:
        """Handle the end or death of the first process."""
        with self._lock:
            if not self._is_ending:
                self._is_ending = True
                # Ray calls this in its own thread, which must not make blocking calls to Ray.
                self._thread = threading.Thread(target=self._collect_ends, name=f"dray-{self.name}-ends", daemon=True)
                self._thread.start()

    def _collect_ends(self) -> None:
        """Find out how the other processes end, and report all ends."""
        try:
            dead, error = self._all_ends()
        except Exception as unexpected:  # as where Ray ends in this process meanwhile, because its head has died
            dead, error = {}, one_line(unexpected) or repr(unexpected)
        self._report_end(dead, error)

    def _all_ends(self) -> tuple[dict[int, str], str]:
        """Why each rank died that did, and else the first error of the others."""
        ends = self._ends_of_ranks(within_s=0.0)
        died = any(isinstance(end, Exception) for end in ends.values())
        ends = self._ends_of_ranks(SURVIVORS_S if died else LEAVE_S)
        # Each node is asked once: a lost one costs seconds until the timeout.
        kills_of = functools.cache(lambda node: oom_kills_of(node, self._slots.env_for_ray))
        dead, error = dict[int, str](), ""
        for rank, end in ends.items():
            if isinstance(end, Exception):
                dead[rank] = why_it_died(end) or self._killed_by_kernel(rank, kills_of)
            else:
                error = error or end
        return dead, "" if dead else error

    def _ends_of_ranks(self, within_s: float) -> dict[int, str | Exception]:
        """For each rank that has ended: its own error or "", or Ray's exception for its death."""
        if not ray.is_initialized():  # a call would start a new Ray
            return {}
        ready, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=within_s)
        found: dict[int, str | Exception] = {}
        for rank, end in enumerate(self._ends):
            if end in ready:
                try:
                    found[rank] = ray.get(end)
                except ray.exceptions.RayError as error:
                    found[rank] = error
        return found

    def _killed_by_kernel(self, rank: int, kills_of: Callable[[str], int | None]) -> str:
        try:
            node, before = ray.get(self._oom_kills_before[rank], timeout=0)
        except ray.exceptions.RayError:  # it died before it could answer
            return ""
        if (now := kills_of(self._nodes[rank])) is None:
            return f"{LOST_NODE}, or it does not answer"
        if now <= before:
            return ""
        return f"meanwhile the kernel has killed a process of {node}, which was {LOW_MEMORY}"

    def _claim_end(self) -> bool:
        """Whether the caller must report the end: True once."""
        with self._lock:
            first, self._is_ending = not self._is_ending, True
        return first

    def _report_end(self, dead: Mapping[int, str], error: str) -> None:
        nodes = {rank: self._nodes[rank] for rank in dead}
        self._report(GroupEnded(group=self.name, start=self.start, dead=dead, nodes=nodes, error=error))
        self._ended.set()


def why_it_died(error: Exception) -> str:
    """The cause of a worker's death, as far as Ray's error of a call to it tells; or "".

    Ray's own message is long, and names neither the exit code nor the signal.
    """
    if LOW_MEMORY in str(error):
        return f"Ray killed it, because its node was {LOW_MEMORY}"
    return LOST_NODE if NODE_DIED in str(error) else ""


def oom_kills() -> tuple[str, int]:
    """The name of this node, and the number of its kernel's OOM kills, in this container or on the machine."""
    return os.uname().nodename, kills_of_kernel()


def oom_kills_of(node: str, runtime_env: Mapping[str, Any]) -> int | None:
    """The number of OOM kills on a node, given by Ray's id; None if it does not answer."""
    if node == ray.get_runtime_context().get_node_id():
        return kills_of_kernel()  # needs no other process
    task = on_node(oom_kills, node, runtime_env=dict(runtime_env) or None)
    try:
        _, kills = ray.get(task.remote(), timeout=ANSWER_TIMEOUT_S)
        return int(kills)
    except ray.exceptions.RayError:
        return None
