"""``dray cluster check``: finds problems of a cluster before anything trains on it.

On each node an actor, which needs no slot, collects versions and does the same as trials: write to the storage, send to
another node, and reduce with gloo, which the ranks of a trial use to agree. All free GPUs of all nodes take part in an
all-reduce with NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from dray.checks.findings import ClusterCheck, Node
from dray.checks.inspector import ANSWER_S, SIGN, AllReduceRank, Inspector
from dray.cluster.node_check import REMEDIES, STORE_S, Trouble, write_sign
from dray.environment import versions
from dray.storage import Location, RemoteDirectory, StorageError
from dray.text import one_line

FREE_GPUS_S = 30.0  # how long the check waits for GPUs that others use
SLOW_BYTES_S = 100e6  # between two nodes: about a gigabit network
MAX_GLOO_RANKS = 8


def check(address: str | None, storage: Location | None, fallback: Location) -> ClusterCheck:
    """Check all nodes of a cluster. This takes as long as the slowest node: from ten seconds to a few minutes.

    Args:
        address: the cluster's; by default ``RAY_ADDRESS``. Without either, only this machine is checked.
        storage: where experiments, or their checkpoints, will be stored.
        fallback: the default place for experiments, which is checked if there is no ``storage``.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    place = storage or fallback
    if not address or address == "local":
        return _this_machine(place)
    import ray

    from dray.cluster.connection import join

    join(address)
    try:
        return _Check(place, storage_was_given=storage is not None).run()
    finally:
        ray.shutdown()


def _this_machine(place: Location) -> ClusterCheck:
    checked = ClusterCheck(address=None, storage=str(place), nodes=[Node(address=platform.node())])
    inspector = Inspector()
    facts = inspector.facts()
    checked.take_facts(checked.nodes[0], {**facts, "host": "", "has_token": None}, versions())
    with _shared_directory(place, checked) as shared:
        if shared is not None and (trouble := inspector.storage(*shared, "this")) is not None:
            checked.add_error("", f"this machine {trouble.what}")
    return checked


class _Check:
    def __init__(self, place: Location, *, storage_was_given: bool) -> None:
        import ray

        from dray.cluster.nodes import nodes

        self._place, self._storage_was_given = place, storage_was_given
        self._ids = {
            Node(address=node.address, gpus_of_ray=int(node.resources.get("GPU", 0))): node.id for node in nodes()
        }
        address = ray.get_runtime_context().gcs_address
        self.checked = ClusterCheck(address=address, storage=str(place), nodes=list(self._ids))
        self._inspectors: dict[Node, Any] = {}

    def run(self) -> ClusterCheck:
        self._start()
        for node, facts in self._ask("facts").items():
            self.checked.take_facts(node, facts, versions())
        self.checked.compare_nodes()
        self._compare_clocks()
        self._try_storage()
        self._send()
        self._reduce()
        if len(self._ids) == 1:
            what = "this is the only node now; a node that joins later is checked by its first worker"
            self.checked.add_note("", what)
        return self.checked

    def _start(self) -> None:
        from dray.cluster.nodes import on_node
        from dray.cluster.packages import runtime_env

        sent = runtime_env()
        started = {
            node: on_node(Inspector, there, runtime_env=sent, max_concurrency=2).remote()
            for node, there in self._ids.items()
        }
        ready = self._answers({node: each.__ray_ready__.remote() for node, each in started.items()}, "run dray")
        self._inspectors = {node: started[node] for node in ready}

    def _ask(self, method: str) -> dict[Node, Any]:
        return self._answers({node: getattr(each, method).remote() for node, each in self._inspectors.items()})

    def _answers(self, references: Mapping[Node, Any], what: str = "be checked") -> dict[Node, Any]:
        """The nodes' answers. A node that does not answer gets an error, and is asked nothing else.

        Args:
            what: the predicate for such a node's error, after "can't".
        """
        import ray

        answers: dict[Node, Any] = {}
        deadline = time.monotonic() + ANSWER_S
        for node, reference in references.items():
            try:
                answers[node] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:  # the actor can raise any
                late = isinstance(error, ray.exceptions.GetTimeoutError)
                why = f"no answer within {ANSWER_S:.0f} s" if late else one_line(error)[-300:]
                self._inspectors.pop(node, None)
                self.checked.add_error(node.name, f"can't {what}: {why}")
        return answers

    def _compare_clocks(self) -> None:
        import ray

        for node, inspector in self._inspectors.items():
            with contextlib.suppress(ray.exceptions.RayError):  # the next step reports a node that does not answer
                ask = functools.partial(lambda there: ray.get(there.clock.remote(), timeout=ANSWER_S), inspector)
                self.checked.take_clock(node, ahead_s(ask))

    def _try_storage(self) -> None:
        with _shared_directory(self._place, self.checked) as shared:
            if shared is None:
                return
            place, sign = shared
            asked = {node: each.storage.remote(place, sign, node.address) for node, each in self._inspectors.items()}
            for node, trouble in self._answers(asked).items():
                if trouble is None and not _has(place, node.address):
                    trouble = Trouble("unseen", f"writes to {self._place}, but the driver does not see what it wrote")
                if trouble is None:
                    continue
                # Name the user's place: the check's own directory in it is deleted afterwards.
                what = f"{trouble.what.replace(str(place), str(self._place))}; {REMEDIES[trouble.kind]}"
                if self._storage_was_given:
                    self.checked.add_error(node.name, what)
                else:
                    hint = "experiments without checkpoint_storage go there: give --storage"
                    self.checked.add_note(node.name, f"{what}; {hint}")

    def _send(self) -> None:
        """Each node sends to the next one, all at the same time: this shows what the network as a whole can carry."""
        places = self._ask("listen") if len(self._inspectors) > 1 else {}
        if len(places) < 2:
            return
        after = dict(zip(places, [*list(places)[1:], *list(places)[:1]], strict=True))
        asked = {node: self._inspectors[node].send.remote(places[to]) for node, to in after.items()}
        for node, (speed, error) in self._answers(asked).items():
            node.sends_bytes_s = speed
            if speed is None:
                self.checked.add_error(
                    node.name,
                    f"can't send to {after[node].name}: {error}; the workers of a trial listen on ports that the "
                    "system chooses: allow all ports between the nodes, and none from outside",
                )
            elif speed < SLOW_BYTES_S:
                self.checked.add_note(node.name, f"sends only {speed / 1e6:.0f} MB/s to {after[node].name}")

    def _reduce(self) -> None:
        ranks = each_gpu(self._ids)
        if len(self._ids) > 1:
            all_reduce_speed(self.checked, list(self._ids.values())[:MAX_GLOO_RANKS], "gloo")
        if len(ranks) > 1:
            self.checked.reduces_bytes_s = all_reduce_speed(self.checked, ranks, "nccl")


def each_gpu(nodes: Mapping[Node, str]) -> list[str]:
    """For each GPU that both Ray and torch see, the id of its node."""
    return [there for node, there in nodes.items() for _ in range(min(len(node.gpus), node.gpus_of_ray))]


def all_reduce_speed(checked: ClusterCheck, nodes: Sequence[str], backend: Literal["nccl", "gloo"]) -> float | None:
    """The bus bandwidth of an all-reduce between processes on these nodes (ids), with NCCL those that get a GPU within
    `FREE_GPUS_S`; None, and a finding, if it failed."""
    import ray

    from dray.cluster.nodes import on_node
    from dray.cluster.packages import runtime_env

    options = {"runtime_env": runtime_env(), "num_gpus": 1 if backend == "nccl" else 0}
    started = [on_node(AllReduceRank, node, **options).remote() for node in nodes]
    try:
        up = {rank.__ray_ready__.remote(): rank for rank in started}
        ready, late = ray.wait(list(up), num_returns=len(up), timeout=FREE_GPUS_S)
        ray.get(ready)
        ranks = [rank for reference, rank in up.items() if reference in ready]
        if late:
            what = f"was tried without {len(late)} of {len(up)} processes" if len(ranks) > 1 else "was not tried"
            why = f"GPUs were busy, or not up within {FREE_GPUS_S:.0f} s"
            checked.add_note("", f"all-reduce by {backend} {what}: {why}")
        if len(ranks) < 2:
            return None
        at = ray.get(ranks[0].open.remote(), timeout=ANSWER_S)
        asked = [rank.reduce.remote(at, number, len(ranks), backend) for number, rank in enumerate(ranks)]
        return min(cast("list[float]", ray.get(asked, timeout=ANSWER_S)))
    except Exception as error:
        why = one_line(getattr(error, "cause", error))[-500:]  # Ray's own text begins with the traceback of the rank
        checked.add_error(
            "",
            f"all-reduce by {backend} over {len(ranks)} processes failed: {why}; if nodes reach "
            "one another by another network interface than the one with Ray's addresses, set "
            f"{backend.upper()}_SOCKET_IFNAME to its name in the environment in which Ray is started",
        )
        return None
    finally:
        for rank in started:
            ray.kill(rank)


def ahead_s(ask: Callable[[], float], now: Callable[[], float] = time.time) -> float:
    """The seconds by which another clock is ahead of ours, from the quickest of five answers: its error is smallest."""
    asked = [(now(), ask(), now()) for _ in range(5)]
    before, there, after = min(asked, key=lambda times: times[2] - times[0])
    return there - (before + after) / 2


@contextlib.contextmanager
def _shared_directory(storage: Location, checked: ClusterCheck) -> Iterator[tuple[Location, str] | None]:
    """Yields a directory in the storage for the time of a check, and the content of the driver's sign there.

    If the driver can't use the directory, that is recorded as an error, and None is yielded.
    """
    place, sign = storage.child(f".dray-check-{secrets.token_hex(8)}"), secrets.token_hex(16)
    store = None if place.is_local else RemoteDirectory(place, patience_s=STORE_S)
    made: list[Path] = []
    try:
        if store is None:
            made = [each for each in (place.path, *place.path.parents) if not each.exists()]
            write_sign(place.path, sign)
        else:
            store.write(SIGN, sign.encode())
    except OSError as error:  # also a StorageError
        checked.add_error("", f"the driver can't write to {checked.storage}: {error}")
        yield None
        return
    try:
        yield place, sign
    finally:
        if store is not None:
            with contextlib.suppress(StorageError):
                store.delete()
        else:
            shutil.rmtree(place.path, ignore_errors=True)
            for path in made[1:]:
                with contextlib.suppress(OSError):  # somebody else may use it by now
                    path.rmdir()


def _has(place: Location, name: str) -> bool:
    try:
        if place.is_local:
            return (place.path / name).read_text() == name
        return RemoteDirectory(place, patience_s=STORE_S).read(name).decode() == name
    except OSError:
        return False
