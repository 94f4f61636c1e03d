"""The cost of a worker group besides its workers: memory, CPU, and the time to start, to notice a death, and to end.

Real groups of one worker each, on a cluster of this machine with invented CPUs. Their workers wait instead of loading a
trial. Measured, in this order: the cost of starting one more group; resident memory and CPU while idle; the time from
`kill -9` of a worker until the driver notices; and from the order to end a group until its process is gone. The cost of
a group is the slope over all sizes, by least squares.

    python bench/groups.py [--sizes 1 4 8 16] [--save]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _measure import (
    STAMPS,
    Paper,
    arguments,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    read_stamps,
    run,
    spread,
    stamp,
)
from scale import cpu_s, memory_mb

IDLE_S = 60.0
SETTLE_S = 5.0
WORKER = "ray::RayTrainWo"
SPARE = "ray::IDLE"
"""A process that Ray keeps ready; which group it starts for is chance."""


class Held:
    """Stands in for the trial loader: stamps its start, and waits."""

    def __init__(self, number: int) -> None:
        self._number = number

    def place(self) -> None:
        stamp("runs", number=self._number)
        time.sleep(3600)


class Groups:
    """Real groups, and the desk that their workers call, in an event loop of this process."""

    def __init__(self, directory: Path) -> None:
        from dray.leases.desk import Desk
        from dray.rpc.event_loop import EventLoop

        self._directory = directory
        self._heard: list[tuple[float, Any]] = []
        """Messages of the desk and reports of groups, each with its time."""
        self._desk = Desk(self._carry_out)
        self._desk.add("bench", is_owner=True)
        self._loop = EventLoop("bench")
        self._loop.listen("127.0.0.1")
        self._loop.attach(self)

    def _carry_out(self, effect: Any) -> None:
        from dray.leases.effects import Reply, Tell

        if isinstance(effect, Reply):
            effect.call.answer(effect.value)  # type: ignore[attr-defined]
        elif isinstance(effect, Tell):
            self._hear(effect.message)

    def _hear(self, event: Any) -> None:
        self._heard.append((time.time(), event))

    def take(self, call: Any) -> None:
        getattr(self._desk, call.method)(call, *call.args)

    def lost(self, session: Any) -> None:
        """Its process has ended."""

    def settle(self) -> None:
        """Everything is carried out at once."""

    def failed(self, error: BaseException) -> None:
        raise error

    def start(self, number: int) -> Any:
        from dray.groups.group import WorkerGroup
        from dray.groups.slots import Slots
        from dray.worker.spec import ExperimentSpec, WorkerSpec

        settings: Any = SimpleNamespace()
        held: Any = Held(number)
        spec = WorkerSpec(
            desk=self._loop.endpoint,
            owner="bench",
            environment={},
            group=f"group-{number}",
            start=number,
            experiment=ExperimentSpec(run="bench", settings=settings, load_trial=held, log_format=""),
            shared_by=1,
        )
        slots = Slots(per_trial=1, gpu=False, cpus_per_slot=1, runtime_env={})
        return WorkerGroup(spec, slots=slots, directory=self._directory, report=self._hear)

    def wait_for(self, kind: str, number: int) -> float:
        """The time of an event of this class about a group."""
        while True:
            for at, event in self._heard.copy():
                if type(event).__name__ == kind and event.group == f"group-{number}":
                    return at
            time.sleep(0.001)


def others() -> dict[int, str]:
    """This process and its descendants, by pid, except workers and spare ones."""
    from tests.ray.harness import descendants

    named = {os.getpid(): "driver", **descendants(os.getpid())}
    return {pid: name for pid, name in named.items() if name not in (WORKER, SPARE)}


def used() -> dict[str, float]:
    """CPU time of each of them, by name."""
    return _by_name(cpu_s)


def resident() -> dict[str, float]:
    """Megabytes of each of them, by name."""
    return _by_name(lambda pid: memory_mb(pid).get("Rss", 0.0))


def _by_name(measured: Callable[[int], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for pid, name in others().items():
        found[name] = found.get(name, 0.0) + measured(pid)
    return found


def child(directory: Path, size: int) -> None:
    """Start groups in a separate driver, and measure them."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": size, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        groups = Groups(directory)
        started = []
        for number in range(size):
            time.sleep(1.0)
            began, before = time.time(), sum(used().values())
            started.append(groups.start(number))
            arrived = groups.wait_for("WorkerArrived", number)
            time.sleep(1.0)
            stamp("start", s=arrived - began, cpu=sum(used().values()) - before, first=number == 0)
        time.sleep(SETTLE_S)
        before_idle = used()
        time.sleep(IDLE_S)
        stamp("cpu", **{name: 100 * (s - before_idle[name]) / IDLE_S for name, s in used().items()})
        stamp("memory", **resident())
        stamp("threads", count=len(list(Path("/proc/self/task").iterdir())))
        stamps = read_stamps(Path(os.environ[STAMPS]))
        pids = {one.fields["number"]: one.pid for one in of_kind(stamps, "runs")}
        for number in range(0, size, 2):
            at = time.time()
            os.kill(pids[number], signal.SIGKILL)
            stamp("noticed", s=groups.wait_for("GroupEnded", number) - at)
        for number in range(1, size, 2):
            began = time.time()
            started[number].end()
            while Path(f"/proc/{pids[number]}").exists():
                time.sleep(0.001)
            stamp("over", s=time.time() - began)
        for group in started:
            group.end()
            group.join(time.monotonic() + 10)
    finally:
        ray.shutdown()
        cluster.shutdown()


def slope(points: Mapping[int, float]) -> float:
    """The slope of the line through these points, by least squares."""
    middle, height = statistics.mean(points), statistics.mean(points.values())
    return sum((x - middle) * (y - height) for x, y in points.items()) / sum((x - middle) ** 2 for x in points)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all sizes, and print the results."""
    paper.say(machine())
    ran = {}
    for size in options.sizes:
        where = directory / str(size)
        ran[size] = run(__file__, ["--child", str(where), str(size)], where).stamps
    threads = {size: of_kind(stamps, "threads")[0].fields["count"] for size, stamps in ran.items()}

    def rows(kind: str, unit: str, digits: int, least: float) -> Iterator[list[str]]:
        """A row for all processes together, and for each that takes at least this much."""
        found = {size: of_kind(stamps, kind)[0].fields for size, stamps in ran.items()}
        yield row(f"{kind}, all processes", {size: sum(each.values()) for size, each in found.items()}, unit, digits)
        for name in found[options.sizes[-1]]:
            points = {size: each.get(name, 0.0) for size, each in found.items()}
            if max(points.values()) >= least:
                yield row(f"- {name}", points, unit, digits)

    def row(what: str, points: Mapping[int, float], unit: str, digits: int) -> list[str]:
        each = [f"{points[size]:.{digits}f} {unit}" for size in options.sizes]
        return [what, *each, f"{slope(points):.{digits + 1}f} {unit}"]

    paper.say()
    paper.table(
        ["beside the workers", *(f"{size} groups" for size in options.sizes), "a group"],
        [
            *rows("memory", "MB", 0, least=5.0),
            *rows("cpu", "%", 2, least=0.2),
            row("threads of the driver", threads, "", 0),
        ],
    )
    starts = [one for stamps in ran.values() for one in of_kind(stamps, "start")]
    first = [one.fields["s"] for one in starts if one.fields["first"]]
    further = [one.fields["s"] for one in starts if not one.fields["first"]]
    spent = [one.fields["cpu"] for one in starts if not one.fields["first"]]
    noticed, over = (
        [one.fields["s"] for stamps in ran.values() for one in of_kind(stamps, kind)] for kind in ("noticed", "over")
    )
    paper.say()
    paper.table(
        ["time", "median (min - max)"],
        [
            ["from the request for the first group to its function", spread(first, "s")],
            ["the same for each further group, one after another", spread(further, "s")],
            ["CPU for a further group, of all but its worker, in the second after that too", spread(spent, "s")],
            ["from the death of a worker until the driver hears of it", spread(noticed, "s", 3)],
            ["from the order to end a group until its process is gone", spread(over, "s", 3)],
        ],
    )


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        end_on_sigterm()
        return child(Path(sys.argv[2]), int(sys.argv[3]))
    parser = arguments(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8, 16], help="numbers of groups")
    perform(measure, parser.parse_args(), name="groups", title="What a worker group takes beside its workers")


if __name__ == "__main__":
    main()
