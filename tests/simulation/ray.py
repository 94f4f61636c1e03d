"""A simulated Ray: its nodes, worker groups, and Tune's handle. `Ray` is what dray's shells get in place of `OnRay`."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

from dray.cluster.connection import Cluster
from dray.cluster.view import AutoscalerLimits, ClusterView, RayNode
from dray.groups.effects import GroupPlaced
from dray.groups.slots import Slots
from dray.leases.messages import GroupEnded
from dray.rpc.calls import PeerUnreachable
from dray.worker.spec import WorkerSpec
from tests.simulation.kernel import Kernel, Process
from tests.simulation.trial import work

HEAD = "head"
"""The machine of drivers and servers."""


class Node:
    """A machine of the cluster."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots, self.free = name, slots, slots
        self.is_alive, self.is_draining = True, False


class Nodes:
    """The machines of a cluster, and the groups that wait for their slots.

    Attributes:
        groups: those whose processes run.
        cut_off: names of processes that a fault has cut off from the others.
    """

    def __init__(self, kernel: Kernel, random: Random, slots: Sequence[int]) -> None:
        self.kernel, self.random = kernel, random
        self.slots = tuple(slots)
        self.nodes = [Node(f"node-{number}", each) for number, each in enumerate(slots)]
        self._booted = len(slots)
        self._waiting: list[Group] = []
        self.groups: dict[str, Group] = {}
        self.began: dict[Group, float] = {}
        self._slot_s: Counter[str] = Counter()  # by owner, of groups that have ended
        self.cut_off: set[str] = set()
        self.watches: dict[Watch, None] = {}
        self.kills = 4
        """How many worker processes are killed at a file operation."""

    def view(self) -> ClusterView:
        alive = [each for each in self.nodes if each.is_alive]
        return ClusterView(
            nodes=tuple(RayNode(each.name, each.name, True, {"CPU": float(each.slots)}, {}) for each in alive),
            draining=frozenset(each.name for each in alive if each.is_draining),
            free={"CPU": float(sum(each.free for each in alive))},
            time=time.time(),
        )

    def slot_s(self, owners: str) -> float:
        """How long groups of these owners, by the beginning of their names, have run."""
        ended = sum(seconds for name, seconds in self._slot_s.items() if name.startswith(owners))
        live = sum(self.kernel.now - at for each, at in self.began.items() if each.owner.name.startswith(owners))
        return ended + live

    def ended(self, group: Group) -> None:
        if (began := self.began.pop(group, None)) is not None:
            self._slot_s[group.owner.name] += self.kernel.now - began

    def wait(self, group: Group) -> None:
        self._waiting.append(group)
        self.kernel.at(self.random.uniform(0.05, 0.5), self.place)

    def place(self) -> None:
        """Give free slots to waiting groups."""
        for group in list(self._waiting):
            free = [each for each in self.nodes if each.is_alive and not each.is_draining and each.free > 0]
            if group.is_over or free:
                self._waiting.remove(group)
            if not group.is_over and free:
                free[0].free -= 1
                group.placed(free[0])

    def release(self, node: Node) -> None:
        node.free += 1
        if node.free > node.slots:
            self.kernel.fail(f"{node.name} got back more slots than it has")
        self.kernel.at(self.random.uniform(0.0, 0.5), self.place)

    def drain(self, node: Node) -> None:
        """Announce that a machine will fail."""
        node.is_draining = True
        for watch in self.watches:
            watch.notice()

    def kill(self, node: Node) -> None:
        """Let a machine fail; another one replaces it some time later."""
        node.is_alive = False
        self.kernel.note(f"{node.name} fails")
        for group in list(self.groups.values()):
            if group.node is node and group.process is not None:
                group.process.kill()
        self.kernel.at(self.random.uniform(1.0, 60.0), self._boot, node.slots)

    def _boot(self, slots: int) -> None:
        self._booted += 1
        self.nodes.append(Node(f"node-{self._booted}", slots))
        self.place()


class Ray:
    """What a process asks of Ray. `lost`: called with a worker process that can't reach its desk."""

    def __init__(self, nodes: Nodes, cluster: Cluster, lost: Callable[[Process, Exception], None]) -> None:
        self._nodes, self.cluster, self._lost = nodes, cluster, lost

    def address(self) -> str:
        return HEAD

    def job(self) -> str:
        return self.host().replace("/", "-")

    def host(self) -> str:
        """The network finds a process by its own name."""
        current = self._nodes.kernel.current
        assert current is not None
        return current.process.name

    def limits(self) -> None:
        """There is no autoscaler."""

    def look(self, limits: AutoscalerLimits | None, *, waiting: bool = False) -> ClusterView:
        time.sleep(self._nodes.random.uniform(0.001, 0.05))
        return self._nodes.view()

    def watch(self, *, draining: Callable[[Collection[str]], object], silent: Callable[[], object]) -> Watch:
        return Watch(self._nodes, draining)

    def group(self, spec: WorkerSpec, *, slots: Slots, report: Callable[[Any], None]) -> Group:
        return Group(self._nodes, spec, report, self._lost)

    def tune(self, source: Callable[[], Callable[[int], Any]], directory: Path) -> Tune:
        return Tune(self._nodes, source)


class Watch:
    """In place of `dray.cluster.watch.Watch`."""

    def __init__(self, nodes: Nodes, draining: Callable[[Collection[str]], object]) -> None:
        assert nodes.kernel.current is not None
        self._nodes, self._draining, self._owner = nodes, draining, nodes.kernel.current.process
        nodes.watches[self] = None
        self.notice()

    def notice(self) -> None:
        """Tell its process, within some seconds, which machines will fail."""

        def tell() -> None:
            if self._owner.is_alive and self in self._nodes.watches and (draining := self._nodes.view().draining):
                self._nodes.kernel.spawn(self._owner, "watch", lambda: self._draining(draining))

        if any(each.is_draining for each in self._nodes.nodes):
            self._nodes.kernel.at(self._nodes.random.uniform(0.1, 3.0), tell)

    def close(self) -> None:
        self._nodes.watches.pop(self, None)

    def answers(self, *, only_head: bool = False) -> bool:
        return True


class Group:
    """In place of `WorkerGroup`: one process."""

    def __init__(
        self,
        nodes: Nodes,
        spec: WorkerSpec,
        report: Callable[[Any], None],
        lost: Callable[[Process, Exception], None],
    ) -> None:
        self._nodes, self._kernel, self._random = nodes, nodes.kernel, nodes.random
        self._spec, self._report, self._lost = spec, report, lost
        current = self._kernel.current
        assert current is not None
        self.owner = current.process
        self.name = f"{self.owner.name}/{spec.group}.{spec.start}"
        self.process: Process | None = None
        self.node: Node | None = None
        self.is_over = self._is_ending = False
        self._ended = threading.Event()
        nodes.wait(self)
        self.owner.on_end.append(lambda: nodes.ended(self))
        self.owner.on_end.append(lambda: self._kernel.at(self._random.choice((0.0, 0.1, 10.0)), self._free))

    def _in_owner(self, delay: float, call: Callable[..., Any], *args: Any) -> None:
        """Call this in a thread of Ray's in the owner's process."""

        def spawn() -> None:
            if self.owner.is_alive:
                self._kernel.spawn(self.owner, "ray", lambda: call(*args))

        self._kernel.at(delay, spawn)

    def placed(self, node: Node) -> None:
        """Its slots are there."""
        self.node = node
        self._in_owner(0.0, self._start)

    def _start(self) -> None:
        self._report(GroupPlaced(group=self._spec.group, start=self._spec.start))
        time.sleep(self._random.uniform(0.5, 3.0))
        if self._is_ending or self.node is None or not self.node.is_alive:
            self._in_owner(0.0, self._notice, "")
            return
        node, spec, lost = self.node.name, self._spec, self._lost
        process = self._kernel.process(self.name, lambda: work(spec, machine=node, lost=lost), node)
        self.process, self._nodes.groups[self.name] = process, self
        self._nodes.began[self] = self._kernel.now
        if self._nodes.kills and self._random.random() < 0.3:
            self._nodes.kills -= 1
            process.kill_at = self._random.randrange(1, 60)
        process.on_end.append(self._has_ended)

    def _has_ended(self) -> None:
        self._nodes.groups.pop(self.name, None)
        self.declare_dead()

    def declare_dead(self) -> None:
        """Ray takes the process for dead, whether it is or not."""
        self._in_owner(self._random.uniform(0.1, 3.0), self._notice, "")

    def _notice(self, why: str) -> None:
        self._nodes.ended(self)
        if not self._is_ending:
            self._is_ending = True
            died = self.process is not None and self.process.exit_code != 0
            dead = {0: why} if died else {}
            self._report(
                GroupEnded(group=self._spec.group, start=self._spec.start, dead=dead, nodes=dict.fromkeys(dead, ""))
            )
        self._ended.set()

    def _free(self) -> None:
        """End the process, unless it is cut off from Ray, and free its slot."""
        if self.is_over:
            return
        self.is_over = True
        if self.process is not None and self.process.name not in self._nodes.cut_off:
            self.process.kill()
        if self.node is not None and self.node.is_alive:
            self._nodes.release(self.node)

    def end(self) -> None:
        first, self._is_ending = not self._is_ending, True
        time.sleep(self._random.uniform(0.001, 0.02))
        self._nodes.ended(self)
        self._free()
        if first:
            self._report(GroupEnded(group=self._spec.group, start=self._spec.start))
        self._ended.set()

    def ended(self, by: float) -> bool:
        return self._ended.wait(max(0.0, by - time.monotonic()))

    def join(self, by: float) -> None:
        """No-op: its threads end by themselves."""


class Tune:
    """In place of `TuneDriver`: its thread, and the handle's process, which may be killed."""

    take: Callable[[Any], None]

    def __init__(self, nodes: Nodes, source: Callable[[], Callable[[int], Any]]) -> None:
        self._nodes, self._source, self._is_stopping = nodes, source, False
        self.started, self.error = False, None
        self.ended: Future[None] = Future()
        self.handle: Process | None = None
        self._number = 0

    def start(self) -> None:
        self.started = True
        threading.Thread(target=self._run, name="dray-tune", daemon=True).start()

    def stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        kernel, random = self._nodes.kernel, self._nodes.random
        assert kernel.current is not None
        owner = kernel.current.process
        time.sleep(random.choice((0.1, 1.0, 4.0)))
        results: Any = "died"
        while results == "died" and not self._is_stopping:
            self._number += 1
            fetched: queue.SimpleQueue[Any] = queue.SimpleQueue()
            taken = threading.Semaphore(0)

            def fetch(fetched: Any = fetched, taken: Any = taken, number: int = self._number) -> None:
                with contextlib.suppress(PeerUnreachable):  # Tune's actor ends
                    source = self._source()
                    while (results := source(number)) is not None:
                        fetched.put(results)
                        taken.acquire()
                    fetched.put(None)

            self.handle = kernel.process(f"{owner.name}/tune-{self._number}", fetch, HEAD)
            self.handle.on_end.append(lambda fetched=fetched: fetched.put("died"))  # type: ignore[misc]
            owner.on_end.append(self.handle.kill)
            while (results := fetched.get()) not in (None, "died") and not self._is_stopping:
                time.sleep(0.001 if random.random() < 0.95 else 5 * random.random())
                self.take(results)
                taken.release()
            if results == "died":
                time.sleep(random.uniform(0.5, 3.0))
        self.ended.set_result(None)
