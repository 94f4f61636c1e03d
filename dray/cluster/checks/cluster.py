"""``dray cluster check``: finds problems of a cluster before anything trains on it.

On each node an actor, which needs no slot, collects versions and tries what trials do: write to the storage, send to
another node, reduce with gloo, by which the ranks of a trial agree. If nodes have free GPUs, one GPU of each takes part
in an all-reduce with NCCL.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from dray.cluster.checks.findings import ClusterCheck, Node
from dray.cluster.checks.inspector import ANSWER_S, SIGN, AllReduceRank, Inspector
from dray.cluster.checks.node import REMEDIES, STORE_S, Trouble, versions, write_sign
from dray.storage import Location, RemoteDirectory, StorageError
from dray.text import one_line

FREE_GPUS_S = 30.0  # how long the check waits for GPUs that others use
SLOW_BYTES_S = 100e6  # between two nodes: about a gigabit network
MAX_RANKS = 8


def check(address: str | None, storage: Location | None, fallback: Location) -> ClusterCheck:
    """Check all nodes of a cluster. It takes as long as the slowest of them: from ten seconds to a few minutes.

    Args:
        address: of the cluster; by default that of ``RAY_ADDRESS``, without one this machine alone is checked.
        storage: where experiments, or their checkpoints, will be stored.
        fallback: where experiments are stored that don't say where; tried if there is no ``storage``.
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
        there = nodes()
        self.checked = ClusterCheck(
            address=ray.get_runtime_context().gcs_address,
            storage=str(place),
            nodes=[Node(address=node.address, gpus_of_ray=int(node.resources.get("GPU", 0))) for node in there],
        )
        self._ids = [node.id for node in there]
        self._inspectors: dict[int, Any] = {}

    def run(self) -> ClusterCheck:
        self._start()
        self._look()
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
        from dray.code.packages import runtime_env

        sent = runtime_env()
        started = {
            number: on_node(Inspector, node, runtime_env=sent, max_concurrency=2).remote()
            for number, node in enumerate(self._ids)
        }
        ready = self._answers({number: each.__ray_ready__.remote() for number, each in started.items()}, "run dray")
        self._inspectors = {number: started[number] for number in ready}

    def _answers(self, references: Mapping[int, Any], what: str = "be checked") -> dict[int, Any]:
        """The nodes' answers. One that gives none can't do what it was asked for, and is asked nothing else."""
        import ray

        answers: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWER_S
        for number, reference in references.items():
            try:
                answers[number] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:  # whatever the actor raised
                late = isinstance(error, ray.exceptions.GetTimeoutError)
                why = f"no answer within {ANSWER_S:.0f} s" if late else one_line(error)[-300:]
                self._inspectors.pop(number, None)
                self.checked.add_error(self.checked.nodes[number].name, f"can't {what}: {why}")
        return answers

    def _look(self) -> None:
        drivers_versions = versions()
        asked = {number: inspector.facts.remote() for number, inspector in self._inspectors.items()}
        for number, facts in self._answers(asked).items():
            self.checked.take_facts(self.checked.nodes[number], facts, drivers_versions)
        self.checked.compare_nodes()

    def _compare_clocks(self) -> None:
        import ray

        for number, inspector in list(self._inspectors.items()):
            node = self.checked.nodes[number]
            try:
                ahead = ahead_s(lambda there=inspector: ray.get(there.clock.remote(), timeout=ANSWER_S))  # type: ignore[misc]
            except ray.exceptions.RayError:
                continue  # the next step reports that it does not answer
            self.checked.take_clock(node, ahead)

    def _try_storage(self) -> None:
        with _shared_directory(self._place, self.checked) as shared:
            if shared is None:
                return
            place, sign = shared
            asked = {
                number: each.storage.remote(place, sign, f"node-{number}") for number, each in self._inspectors.items()
            }
            for number, trouble in self._answers(asked).items():
                if trouble is None and not _has(place, f"node-{number}"):
                    trouble = Trouble("unseen", f"writes to {self._place}, but the driver does not see what it wrote")
                if trouble is not None:
                    # Name the user's place: the check's own directory in it is deleted afterwards.
                    what = trouble.what.replace(str(place), str(self._place))
                    self._report_storage(self.checked.nodes[number].name, Trouble(trouble.kind, what))

    def _report_storage(self, node: str, trouble: Trouble) -> None:
        what = f"{trouble.what}; {REMEDIES[trouble.kind]}"
        if self._storage_was_given:
            self.checked.add_error(node, what)
        else:
            self.checked.add_note(node, f"{what}; experiments without checkpoint_storage go there: give --storage")

    def _send(self) -> None:
        """Each node sends to the next one, all at the same time: this shows what the network as a whole can carry."""
        numbers = sorted(self._inspectors)
        if len(numbers) < 2:
            return
        places = self._answers({number: self._inspectors[number].listen.remote() for number in numbers})
        after = dict(zip(numbers, [*numbers[1:], numbers[0]], strict=True))
        asked = {
            number: self._inspectors[number].send.remote(places[after[number]])
            for number in numbers
            if number in self._inspectors and after[number] in places
        }
        for number, (speed, error) in self._answers(asked).items():
            node, to = self.checked.nodes[number], self.checked.nodes[after[number]]
            node.sends_bytes_s = speed
            if speed is None:
                self.checked.add_error(
                    node.name,
                    f"can't send to {to.name}: {error}; the workers of a trial listen on ports that the system "
                    "chooses: allow all ports between the nodes, and none from outside",
                )
            elif speed < SLOW_BYTES_S:
                self.checked.add_note(node.name, f"sends only {speed / 1e6:.0f} MB/s to {to.name}")

    def _reduce(self) -> None:
        gpus = [min(len(node.gpus), node.gpus_of_ray) for node in self.checked.nodes]
        ranks = [node for node, count in zip(self._ids, gpus, strict=True) if count > 0]
        if len(ranks) == 1 and max(gpus) > 1:
            ranks *= 2
        if len(self._ids) > 1:
            all_reduce_speed(self.checked, self._ids[:MAX_RANKS], "gloo")
        if len(ranks) > 1:
            self.checked.reduces_bytes_s = all_reduce_speed(self.checked, ranks[:MAX_RANKS], "nccl")


def all_reduce_speed(checked: ClusterCheck, nodes: Sequence[str], backend: Literal["nccl", "gloo"]) -> float | None:
    """The bus bandwidth of an all-reduce between processes on these nodes (ids); None if it failed, which is noted."""
    import ray
    from ray.exceptions import GetTimeoutError

    from dray.cluster.nodes import on_node
    from dray.code.packages import runtime_env

    options = {"runtime_env": runtime_env(), "num_gpus": 1 if backend == "nccl" else 0}
    ranks = [on_node(AllReduceRank, node, **options).remote() for node in nodes]
    try:
        try:
            ray.get([rank.__ray_ready__.remote() for rank in ranks], timeout=FREE_GPUS_S)
        except GetTimeoutError:
            checked.add_note("", f"all-reduce was not tried: GPUs were busy, or not up within {FREE_GPUS_S:.0f} s")
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
        for rank in ranks:
            ray.kill(rank)


def ahead_s(ask: Callable[[], float], now: Callable[[], float] = time.time) -> float:
    """How many seconds another clock is ahead of ours, by the quickest of five answers: it has the smallest error."""
    asked = [(now(), ask(), now()) for _ in range(5)]
    before, there, after = min(asked, key=lambda times: times[2] - times[0])
    return there - (before + after) / 2


@contextlib.contextmanager
def _shared_directory(storage: Location, checked: ClusterCheck) -> Iterator[tuple[Location, str] | None]:
    """A directory in the storage for the time of a check, with the driver's sign, which is returned, too.

    None if the driver can't use it, which is noted.
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
