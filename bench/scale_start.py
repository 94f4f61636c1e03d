"""A start of many groups from zero, and a storm in which half of their nodes vanish: the load on driver and GCS.

The driver first asks for all groups, as on a cluster with an autoscaler. Then ten nodes a second join, all groups
train, and half of the nodes are killed at once. The head is monitored for over a minute; then as many nodes join again,
and the trials end.

GCS, raylets, the driver with its groups (placement groups, threads, the detection of deaths), Tune and its handle are
real; nodes and workers are simulated. A raylet with 50 slots stands for 50 nodes, so one joins every five seconds. An
actor on each raylet simulates the worker processes of all groups placed there: it speaks the desk's protocol like rank
0, with real checkpoints of a few bytes, and when it dies, all of them die. So Ray's own work for each worker process is
missing here; bench/groups.py measures it. There is no autoscaler; the driver gets its limits.

    python bench/scale_start.py [--groups 100 200 500 1000] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from asyncio import wrap_future
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _measure import (
    DIGITS,
    STAMPS,
    Paper,
    Stamp,
    arguments,
    command,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    read_stamps,
    run,
    stamp,
    verdict,
)
from groups import slope
from scale import below, config, cpu_s, rows

PER_RAYLET = 50
"""Slots of a raylet, each of which stands for a node."""
NODES_PER_S = 10
CPUS_PER_SLOT = 4
"""CPUs that a node should have for each group that starts there at the same time."""
QUEUED = 1.25
"""Trials for each group."""
REPORTS_EVERY_S = 10.0
SAVES_EVERY = 2
"""Reports between two checkpoints."""
MAX_LENGTH = 1000
"""Reports of a trial: more than it gets to send before all trials are told to end."""
SETTLE_S, STORM_S, WATCH_S = 30.0, 30.0, 75.0
"""Seconds of training before the storm, of counting the CPU of the storm, and of monitoring the head."""
PATIENCE_S = 200.0
IDLE_ABOVE = 0.05
"""The share of a core above its previous level at which the head counts as idle again."""
OVER_S = REPORTS_EVERY_S
"""Seconds over which the head's CPU is averaged for that: each trial reports once."""
GOAL_START, GOAL_IDLE_S = 1.2, 60.0
ON_PAPER = 10_000
END = "end"
"""A file that tells all trials to end."""
HEAD = ("driver", "handle", "gcs", "head's raylet")
TITLES = {"ray::ResourceTr": "handle", "ray::Players": "players", "gcs_server": "gcs"}


# --------------------------------------------------------------------------------------------- groups that only report
class Players:
    """Simulates the worker processes of all groups of a raylet, of one rank each."""

    def __init__(self, end: str) -> None:
        self._end = Path(end)
        self._served: dict[int, asyncio.Task[None]] = {}

    async def begin(self, spec: SimpleNamespace) -> None:
        """Begin to serve leases as this group's process."""
        self._served[spec.start] = asyncio.create_task(self._serve(spec))

    async def execute(self, start: int, function: Callable[[], Any]) -> Any:
        """Ray Train's way to run functions in a worker, as the process of the group's start with this number."""
        if function.__name__ != "ended":
            return function()
        await self._served[start]
        return ""

    async def _serve(self, spec: SimpleNamespace) -> None:
        import ray

        from dray.leases.messages import Departure
        from dray.rpc.connection import Connection

        desk, number = await asyncio.to_thread(Connection, spec.desk), 0
        desk.tell("arrived", spec.owner, spec.group, spec.start, ray.get_runtime_context().get_node_id(), "", "")
        asked = spec.owner, spec.group, spec.start, 0, 1
        while (granted := await wrap_future(desk.next_lease(*asked, number, spec.shape))) is not None:
            lease = pickle.loads(granted[2])
            number = lease.number
            desk.tell("begun", number)
            outcome = await self._trial(desk, lease, spec.group)
            desk.tell("leave", number, 0, Departure(outcome=outcome))
        desk.close()

    async def _trial(self, desk: Any, lease: Any, group: str) -> Any:
        from dray.leases.messages import DeskReport

        outcomes = {"stop": "stopped", "pause": "paused", "interrupt": "interrupted", "fenced": "interrupted"}
        found = await asyncio.to_thread(lease.store.latest)
        at = 0 if found is None else lease.store.batches_of(found)
        stamp("trains", trial=lease.trial_id, group=group, at=at)
        stop = desk.stop_wanted(lease.number)
        # Groups that came up together report at different times, as different trials do.
        await self._train(random.random() * REPORTS_EVERY_S)
        while True:
            final = self._end.exists()
            at = MAX_LENGTH if final else at + 1
            report = DeskReport(rows=rows(at, "validation"), step=at, value=1 / at, final=final)
            reply = await wrap_future(desk.report(lease.number, report, final))
            if reply == "fenced":
                return "interrupted"
            leaves = final or reply != "continue" or (stop.done() and stop.result())
            if leaves or (at + lease.trial_id) % SAVES_EVERY == 0:
                if not await wrap_future(desk.may_commit(lease.number)):
                    return "interrupted"
                checkpoint = await asyncio.to_thread(_save, lease.store, at)
                desk.tell("saved", lease.trial_id, checkpoint, at, 1 / at, 0.0)
            if leaves:
                return "completed" if final else outcomes.get(reply, "interrupted")
            await self._train(REPORTS_EVERY_S)

    async def _train(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._end.exists():
            await asyncio.sleep(min(2.0, seconds))


def _save(store: Any, batches: int) -> str:
    staging = store.stage(batches)
    (staging / "state").write_text(str(batches))
    return str(store.commit(staging, batches))


class PlayedWorker:
    """A group's process, as the driver sees it."""

    def __init__(self, player: Any, start: int) -> None:
        self._player, self._start = player, start
        self.execute = self

    def options(self, **_: Any) -> PlayedWorker:
        return self

    def remote(self, function: Callable[[], Any]) -> Any:
        return self._player.execute.remote(self._start, function)


class Stage:
    """Starts simulated workers in place of `dray.groups.train_workers.start_workers`."""

    def __init__(self, end: Path) -> None:
        self._end, self._lock = end, threading.Lock()
        self._players: dict[str, Any] = {}

    def start_workers(self, function: Any, placement: Any, **_: Any) -> list[Any]:
        """The only worker of a group, on the node of its placement group."""
        import ray
        from ray.util.placement_group import placement_group_table

        from dray.groups.train_workers import Worker

        (spec,) = function.args
        (node,) = placement_group_table(placement)["bundles_to_node_id"].values()
        player = self._player(node)
        told = {name: getattr(spec, name) for name in ("desk", "owner", "group", "start", "shape")}
        ray.get(player.begin.remote(SimpleNamespace(**told)))
        played: Any = PlayedWorker(player, spec.start)
        return [Worker(played, node)]

    def _player(self, node: str) -> Any:
        from dray.cluster.nodes import on_node

        with self._lock:
            if node not in self._players:
                self._players[node] = on_node(Players, node, max_concurrency=1000).remote(str(self._end))
            return self._players[node]


# ------------------------------------------------------------------------------------------------ the driver's process
def drive(directory: Path, groups: int, address: str) -> None:
    """Run the search."""
    import dray
    import dray.cluster.autoscaler
    import dray.groups.group
    from dray.cluster.view import AutoscalerLimits, NodeType
    from dray.leases.messages import GroupEnded, TrialLeft

    raylet = NodeType(name="nodes", resources={"CPU": PER_RAYLET * CPUS_PER_SLOT}, max_count=groups // PER_RAYLET)
    dray.cluster.autoscaler.limits = lambda: AutoscalerLimits(types=(raylet,), max_count=raylet.max_count)
    dray.groups.group.start_workers = Stage(directory / END).start_workers  # type: ignore[assignment]

    def heard(message: Any) -> None:
        if isinstance(message, GroupEnded) and message.is_lost:
            stamp("lost", group=message.group, known=message.time)
        elif isinstance(message, TrialLeft) and message.outcome == "errored":
            stamp("failed", trial=message.trial)

    settings = {
        **config(int(groups * QUEUED), MAX_LENGTH),
        "name": "scale-start",
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"batches": MAX_LENGTH},
            "max_trials": int(groups * QUEUED),
            "max_concurrent_trials": 0,
        },
        "resources": {"slots_per_trial": 1, "slot": "cpu", "cpus_per_slot": CPUS_PER_SLOT},
    }
    experiment = dray.Experiment(settings, model_dir=DIGITS, path=directory / "experiment", address=address)
    trials = experiment.run(on_message=heard).trials
    stamp("result", states=trials["state"].value_counts().to_dict(), restarts=int(trials["restarts"].sum()))


# ----------------------------------------------------------------------------------------------- the cluster's process
class Watch:
    """Stamps CPU and memory of this process's descendants every second."""

    def __init__(self, head: int) -> None:
        self._head, self.driver = head, -1
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(1.0):
            cpu: defaultdict[str, float] = defaultdict(float)
            rss: defaultdict[str, float] = defaultdict(float)
            for pid, name in self._processes():
                try:
                    cpu[name] += cpu_s(pid)
                    rss[name] += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
                except OSError:  # it has ended
                    continue
            stamp("sample", cpu=cpu, rss=rss)

    def _processes(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for pid, title in below(os.getpid()).items():
            if pid == self.driver:
                name = "driver"
            elif title == "raylet":
                name = "head's raylet" if pid == self._head else "nodes' raylets"
            else:
                name = next((name for start, name in TITLES.items() if title.startswith(start)), "Ray's others")
            found.append((pid, name))
        return found

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()


class Cluster:
    """The head, and nodes that join and vanish."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._ray = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address = self._ray.address
        self.head = self._ray.head_node.all_processes["raylet"][0].process.pid
        self._nodes: list[Any] = []

    def grow(self, raylets: int) -> None:
        """Add raylets one by one, at the pace of their nodes."""
        began = time.monotonic()
        for number in range(raylets):
            time.sleep(max(0.0, began + number * PER_RAYLET / NODES_PER_S - time.monotonic()))
            self._nodes.append(self._ray.add_node(num_cpus=PER_RAYLET * CPUS_PER_SLOT, object_store_memory=80 * 2**20))
            stamp("joined")

    def lose(self, raylets: int) -> None:
        """Kill the first raylets, and all their descendants, at once."""
        lost, self._nodes = self._nodes[:raylets], self._nodes[raylets:]
        daemons = [node.all_processes["raylet"][0].process.pid for node in lost]
        pids = [*daemons, *(pid for daemon in daemons for pid in below(daemon))]
        stamp("storm", raylets=raylets)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the cluster."""
        self._ray.shutdown()


def wait_for(happened: Callable[[list[Stamp]], bool], driver: subprocess.Popen[bytes], what: str) -> None:
    """Wait until the condition holds for the stamps so far."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened(read_stamps(Path(os.environ[STAMPS]))):
        if driver.poll() is not None:
            raise SystemExit(f"the driver ended with code {driver.returncode} before {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"timed out after {PATIENCE_S:.0f} s, waiting for: {what}")
        time.sleep(1.0)


def host(directory: Path, groups: int) -> None:
    """Run the cluster, and watch the driver in a process of its own."""
    raylets = groups // PER_RAYLET
    cluster = Cluster()
    stamp("head")
    watch = Watch(cluster.head)
    command = [sys.executable, __file__, "--child", "drive", str(directory), str(groups), cluster.address]
    stamp("drives")
    driver = subprocess.Popen(command)
    try:
        watch.driver = driver.pid
        timeline = directory / "experiment" / "metrics" / "_timeline.jsonl"
        wait_for(lambda _: timeline.exists() and timeline.read_text().count('"starts"') >= groups, driver, "groups")
        time.sleep(8.0)
        stamp("grows")
        cluster.grow(raylets)
        wait_for(lambda stamps: len(trained(stamps)) == groups, driver, "all groups trained")
        time.sleep(SETTLE_S)
        cluster.lose(raylets // 2)
        time.sleep(WATCH_S)
        stamp("grows")
        cluster.grow(raylets // 2)
        wait_for(lambda stamps: not waiting(stamps), driver, "all trials resumed")
        time.sleep(REPORTS_EVERY_S)
        stamp("end")
        (directory / END).touch()
        if code := driver.wait(PATIENCE_S):
            raise SystemExit(f"the driver ended with code {code}")
    finally:
        driver.kill()
        watch.close()
        cluster.close()


def trained(stamps: Sequence[Stamp]) -> dict[str, float]:
    """The time at which each group started its first trial."""
    found: dict[str, float] = {}
    for each in of_kind(stamps, "trains"):
        found.setdefault(each.fields["group"], each.time)
    return found


def waiting(stamps: Sequence[Stamp]) -> set[int]:
    """Trials that failed in the storm and have not resumed since."""
    trials: set[int] = set()
    for each in of_kind(stamps, "failed", "trains"):
        (trials.add if each.kind == "failed" else trials.discard)(each.fields["trial"])
    return trials


# -------------------------------------------------------------------------------------------------------------- figures
class Samples:
    """CPU and memory of the processes of one run."""

    def __init__(self, stamps: Sequence[Stamp]) -> None:
        self._samples = of_kind(stamps, "sample")

    def between(self, since: float, until: float) -> list[Stamp]:
        """The samples in this period."""
        return [each for each in self._samples if since <= each.time <= until]

    def cpu_s(self, name: str, since: float, until: float) -> float:
        """CPU time of a process in this period."""
        samples = self.between(since, until)
        return float(samples[-1].fields["cpu"][name] - samples[0].fields["cpu"].get(name, 0.0))

    def share(self, name: str, since: float, until: float) -> float:
        """The share of a core that a process used."""
        samples = self.between(since, until)
        return self.cpu_s(name, since, until) / (samples[-1].time - samples[0].time)

    def head(self, since: float, until: float) -> float:
        """The share of a core that all processes of the head used."""
        return sum(self.share(name, since, until) for name in HEAD)

    def peak_mb(self, name: str, since: float, until: float) -> float:
        """The peak memory of a process."""
        return float(max(each.fields["rss"].get(name, 0.0) for each in self.between(since, until)))

    def idle_after(self, since: float, until: float, level: float) -> float:
        """Seconds until the head's share of a core, averaged over `OVER_S`, fell to this value and stayed there."""
        times = [each.time for each in self.between(since, until)]
        busy = [at for at in times if at + OVER_S <= until and self.head(at, at + OVER_S + 0.5) > level]
        return busy[-1] + OVER_S - since if busy else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run; times in seconds."""

    groups: int
    grew: float
    """From the first node's start to the last one's arrival."""
    up: float
    """From the first node's start to the last group's first trial."""
    start_cpu: Mapping[str, float]
    """CPU time from the driver's start until then, by process."""
    waiting_mb: Mapping[str, float]
    """Memory while all groups wait for nodes."""
    start_mb: Mapping[str, float]
    """Peak memory until all groups train."""
    heard: tuple[float, float]
    """From the storm until the driver knows of the first and the last lost group."""
    queued: float
    """From the storm until the last lost trial is queued again."""
    lost: int
    """Trials that were lost with their groups."""
    before: Mapping[str, float]
    after: Mapping[str, float]
    """Shares of a core before the storm, and once it is over."""
    peak: float
    """The head's largest share in one second of the storm."""
    storm_cpu: Mapping[str, float]
    """CPU time in the `STORM_S` after the storm, above the level once it is over, by process."""
    idle: float
    """From the storm until the head is idle again."""
    calm: float
    """The same, compared with its lower level once the storm is over."""
    storm_mb: Mapping[str, float]
    grew_again: float
    again: float
    """From the first replaced node's start until the last lost trial trains again."""
    states: Mapping[str, int]
    restarts: int


def figures(groups: int, stamps: Sequence[Stamp]) -> Figures:
    """The figures from the stamps of a run."""
    samples = Samples(stamps)
    [drives], [grows, regrows] = of_kind(stamps, "drives"), of_kind(stamps, "grows")
    [storm], [result] = of_kind(stamps, "storm"), of_kind(stamps, "result")
    joined = [each.time for each in of_kind(stamps, "joined")]
    up = max(trained(stamps).values())
    lost = of_kind(stamps, "lost")
    failed = {each.fields["trial"]: each.time for each in of_kind(stamps, "failed")}
    trains = {each.fields["trial"]: each.time for each in of_kind(stamps, "trains")}
    until = regrows.time
    before = {name: samples.share(name, storm.time - SETTLE_S, storm.time) for name in HEAD}
    after = {name: samples.share(name, until - SETTLE_S, until) for name in HEAD}
    seconds = [at.time for at in samples.between(storm.time, until - 1.5)]
    return Figures(
        groups=groups,
        grew=max(at for at in joined if at < storm.time) - grows.time,
        up=up - grows.time,
        start_cpu={name: samples.cpu_s(name, drives.time, up + 1.0) for name in HEAD},
        waiting_mb={name: samples.peak_mb(name, grows.time - 2.0, grows.time) for name in HEAD},
        start_mb={name: samples.peak_mb(name, grows.time, up) for name in HEAD},
        heard=(min(e.fields["known"] for e in lost) - storm.time, max(e.fields["known"] for e in lost) - storm.time),
        queued=max(failed.values()) - storm.time,
        lost=len(failed),
        before=before,
        after=after,
        peak=max(samples.head(at, at + 1.5) for at in seconds),
        storm_cpu={
            name: STORM_S * (samples.share(name, storm.time, storm.time + STORM_S) - after[name]) for name in HEAD
        },
        idle=samples.idle_after(storm.time, until, sum(before.values()) + IDLE_ABOVE),
        calm=samples.idle_after(storm.time, until, sum(after.values()) + IDLE_ABOVE),
        storm_mb={name: samples.peak_mb(name, storm.time, until) for name in HEAD},
        grew_again=max(joined) - regrows.time,
        again=max(trains[trial] for trial in failed) - regrows.time,
        states=result.fields["states"],
        restarts=result.fields["restarts"],
    )


def report(paper: Paper, all_: list[Figures]) -> None:
    """Print the tables."""
    sizes = [f"{f.groups:,} groups" for f in all_]

    def line(what: str, value: Callable[[Figures], str]) -> list[str]:
        return [what, *(value(f) for f in all_)]

    def lines(what: str, of: Callable[[Figures], Mapping[str, float]], unit: str, digits: int, times: float = 1) -> Any:
        points = {name: {f.groups: times * of(f)[name] for f in all_} for name in HEAD}
        for name in HEAD:
            row = [f"{points[name][f.groups]:.{digits}f} {unit}" for f in all_]
            each = f"{slope(points[name]):.{digits + 2}f} {unit}" if len(all_) > 1 else "-"
            yield [f"{what}, {name}", *row, each]

    paper.say("\nThe start: seconds from the first node's start\n")
    paper.table(
        ["", *sizes],
        [
            line("the last node has joined", lambda f: f"{f.grew:.1f} s"),
            line("every group trains", lambda f: f"{f.up:.1f} s"),
            line("of the time that the nodes take", lambda f: f"{f.up / f.grew:.0%}"),
            line(f"goal: {GOAL_START:.0%}", lambda f: verdict(f.up <= GOAL_START * f.grew)),
        ],
    )
    paper.say("\nCosts: CPU from the driver's start until every group trains, and resident memory\n")
    paper.table(
        ["", *sizes, "each group"],
        [
            *lines("CPU", lambda f: f.start_cpu, "s", 1),
            *lines("memory while all wait for nodes", lambda f: f.waiting_mb, "MB", 0),
            *lines("memory, most", lambda f: f.start_mb, "MB", 0),
        ],
    )
    paper.say("\nThe storm: half of the nodes are killed at once; none joins while the head is monitored\n")
    paper.table(
        ["", *sizes],
        [
            line("trials lost with their groups", lambda f: str(f.lost)),
            line("the driver knows of the first lost group", lambda f: f"{f.heard[0]:.1f} s"),
            line("and of the last", lambda f: f"{f.heard[1]:.1f} s"),
            line("the last lost trial is queued again", lambda f: f"{f.queued:.1f} s"),
            line("head's CPU before", lambda f: f"{100 * sum(f.before.values()):.0f} %"),
            line("most in a second", lambda f: f"{100 * f.peak:.0f} %"),
            line("once it is over", lambda f: f"{100 * sum(f.after.values()):.0f} %"),
            line(f"no more than before + {100 * IDLE_ABOVE:.0f} % of a core", lambda f: f"{f.idle:.1f} s"),
            line("no more than once it is over + as much", lambda f: f"{f.calm:.1f} s"),
            line(f"goal: {GOAL_IDLE_S:.0f} s", lambda f: verdict(max(f.idle, f.calm) <= GOAL_IDLE_S)),
            line("nodes join again: the last has", lambda f: f"{f.grew_again:.1f} s"),
            line("every lost trial trains again", lambda f: f"{f.again:.1f} s"),
            line("in the end", lambda f: ", ".join(f"{count} {state}" for state, count in f.states.items())),
            line("restarts", lambda f: str(f.restarts)),
        ],
    )
    paper.say(
        "\nShares of a core while all groups train and report every ten seconds, and CPU of the\n"
        "storm above its level once it is over\n"
    )
    paper.table(
        ["", *sizes, "each group"],
        [
            *lines("training", lambda f: f.before, "%", 1, 100),
            *lines(f"CPU of the storm, {STORM_S:.0f} s", lambda f: f.storm_cpu, "s", 1),
            *lines("memory, most", lambda f: f.storm_mb, "MB", 0),
        ],
    )
    if len(all_) > 1:
        on_paper(paper, all_)


def on_paper(paper: Paper, all_: list[Figures]) -> None:
    """Extrapolate by slope."""
    what: dict[str, tuple[Callable[[Figures], float], str]] = {
        "CPU of the head, start": (lambda f: sum(f.start_cpu.values()), "s"),
        "CPU of the head, storm": (lambda f: sum(f.storm_cpu.values()), "s"),
        "head while all train": (lambda f: 100 * sum(f.before.values()), "% of a core"),
        **{f"memory, {name}": (lambda f, name=name: f.storm_mb[name], "MB") for name in HEAD},
    }
    rows = []
    for name, (value, unit) in what.items():
        points = {f.groups: value(f) for f in all_}
        each, most = slope(points), max(points)
        rows.append([name, f"{points[most]:.0f} {unit}", f"{points[most] + each * (ON_PAPER - most):.0f} {unit}"])
    paper.say()
    paper.table(["on paper, by slope", f"{max(f.groups for f in all_):,} groups", f"{ON_PAPER:,} groups"], rows)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all sizes, and print the results."""
    paper.say(f"{machine()}\n\n`{command()}`")
    ran: list[Figures] = []
    for groups in options.groups:
        where = directory / str(groups)
        once = run(__file__, ["--child", "host", str(where), str(groups)], where)
        ran.append(figures(groups, once.stamps))
        print(f"{groups} groups: {once.wall_s:.1f} s", flush=True)
    report(paper, ran)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        name, directory, *more = sys.argv[2:]
        end_on_sigterm()
        if name == "host":
            return host(Path(directory), int(more[0]))
        return drive(Path(directory), int(more[0]), more[1])
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[100, 200, 500, 1000], help=f"multiples of {2 * PER_RAYLET}"
    )
    perform(measure, parser.parse_args(), name="scale_start", title="A start of many groups, and a storm")


if __name__ == "__main__":
    main()
