"""How many groups one driver can serve, with groups that only report. bench/groups.py has the cost of a real group.

One or two actors simulate the groups: they speak the desk's protocol like rank 0 of a group, without torch and Ray
Train. Everything else is real: the driver with its search, journal, metrics, display and desk, Tune and its handle.
Trials take no time, so the search runs as fast as the driver can, on the same cores as these actors. It is an ASHA
search with three rungs. Before each decision, a trial sends --plain reports that need no decision; the difference
between two such runs gives the cost of one of these reports. CPU time is read from /proc, without the first 10% and the
last 5% of the trials.

    python bench/scale.py [--groups 10 30 60] [--trials 1000] [--plain 0 10] [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import sys
import threading
import time
from asyncio import wrap_future
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import (
    DIGITS,
    Paper,
    arguments,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    quantile,
    run,
    stamp,
)

if TYPE_CHECKING:
    from dray.leases.messages import LeaseOutcome, Message
    from dray.worker.lease import TrialLease
    from dray.worker.spec import WorkerSpec

GROUPS_PER_PLAYER = 30
ROWS = 8
"""Numbers in a report: a metric or two, and time and machine usage."""
PARTS = {
    "ray::ResourceTr": "handle",
    "ray::Handle": "handle",  # between two calls of it
    "ray::Players": "players",
    "gcs_server": "gcs",
    "raylet": "raylet",
}

# To extrapolate to: slots, trials of the sweep, seconds between two decisions on a trial, and between two of its
# other reports.
EXTRAPOLATED = ((1_000, 10_000), (10_000, 100_000))
DECIDES_EVERY_S, REPORTS_EVERY_S = 60.0, 5.0


# ------------------------------------------------------------------------------------------------------------- /proc
def cpu_s(pid: int, thread: int | None = None) -> float:
    """CPU time of a process, or of one of its threads, until now."""
    path = Path(f"/proc/{pid}/stat") if thread is None else Path(f"/proc/{pid}/task/{thread}/stat")
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> dict[str, float]:
    """Resident memory of a process, shared pages counted in full ("Rss") or divided among processes ("Pss")."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name.rstrip(":"): int(value) / 1024 for name, value, _ in lines if name in ("Rss:", "Pss:")}


def below(root: int) -> dict[int, str]:
    """The descendants of a process: titles by pid."""
    parents, titles = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            line = path.read_text()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], titles[pid] = int(line.rpartition(")")[2].split()[1]), line.partition("(")[2].rpartition(")")[0]
    found, known = {root}, 0
    while len(found) > known:
        known = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return {pid: titles[pid] for pid in found - {root}}


def parts() -> list[tuple[int, str]]:
    """Descendants of this process that are in `PARTS`."""
    processes = sorted(below(os.getpid()).items())
    return [(pid, part) for pid, title in processes for name, part in PARTS.items() if title.startswith(name)]


# --------------------------------------------------------------------------------------------- groups that only report
class Players:
    """Plays worker groups of one rank each."""

    def __init__(self, plain: int) -> None:
        self._plain, self._waits, self._sent = plain, list[float](), 0

    async def play(self, endpoint: Any, run: str, group: str, start: int, shape: str, rungs: list[int]) -> None:
        """The life of a group, from its start to the end of the search."""
        from dray.leases.messages import Departure
        from dray.rpc.connection import Connection

        desk = await asyncio.to_thread(Connection, endpoint)
        desk.tell("arrived", run, group, start, "", "", "")
        number = 0
        while (given := await wrap_future(desk.next_lease(run, group, start, 0, 1, number, shape))) is not None:
            lease: TrialLease = pickle.loads(given[2])
            number = lease.number
            desk.tell("begun", number)
            outcome = await self._trial(desk, number, lease.trial_id, rungs)
            desk.tell("leave", number, 0, Departure(outcome=outcome))

    async def _trial(self, desk: Any, number: int, trial: int, rungs: list[int]) -> LeaseOutcome:
        from dray.leases.messages import DeskReport

        outcomes: dict[str, LeaseOutcome] = {"stop": "stopped", "pause": "paused", "interrupt": "interrupted"}
        rng = random.Random(trial)
        for rung in rungs:
            for step in range(self._plain):
                plain = DeskReport(rows=rows(rung - self._plain + step, "training"))
                await wrap_future(desk.report(number, plain, False))
                self._sent += 1
            final = rung == rungs[-1]
            report = DeskReport(rows=rows(rung, "validation"), step=rung, value=rng.random(), final=final)
            began = time.monotonic()
            self._sent += 1
            verdict = await wrap_future(desk.report(number, report, True))
            if not final:
                self._waits.append(time.monotonic() - began)
            if verdict != "continue":
                return outcomes[verdict]
        return "completed"

    async def figures(self) -> tuple[list[float], int]:
        """Seconds from each report to the decision on it, and how many reports were sent."""
        return self._waits, self._sent


def rows(batches: int, kind: str) -> list[dict[str, Any]]:
    """The metrics of one report."""
    common = {"batches": batches, "epochs": batches / 10, "kind": kind, "time": time.time()}
    return [{**common, "name": name, "value": 0.5} for name in ("loss", *(f"metric_{n}" for n in range(1, ROWS)))]


class LightGroup:
    """Stands in for a `dray.groups.group.WorkerGroup` in the driver; a few actors play all of them."""

    players: list[Any]
    made = 0

    def __init__(self, spec: WorkerSpec, *, report: Callable[[Any], None], **_: Any) -> None:
        from dray.groups.effects import GroupPlaced

        report(GroupPlaced(group=spec.group, start=spec.start))
        player = self.players[LightGroup.made // GROUPS_PER_PLAYER % len(self.players)]
        LightGroup.made += 1
        settings = spec.experiment.settings
        lengths = [rung for rung in (*settings.rungs, settings.max_length) if rung is not None]
        rungs = sorted({int(length.value) for length in lengths})
        player.play.remote(spec.desk, spec.owner, spec.group, spec.start, spec.shape, rungs)

    def end(self) -> None:
        """No-op: the group ends with its actor."""

    def ended(self, by: float) -> bool:
        return True

    def join(self, by: float) -> None:
        """No-op: there is no thread."""


# --------------------------------------------------------------------------------------------------- in its own process
class Window:
    """Listens to the desk's messages, and measures usage without the first 10% and the last 5% of the ended trials."""

    def __init__(self, trials: int) -> None:
        self._trials, self._ended, self.reports, self._decided = trials, 0, 0, 0
        self._began: dict[str, float] = {}
        self._half: dict[str, float] = {}

    def __call__(self, message: Message) -> None:
        from dray.leases.messages import ReportReceived, TrialLeft

        if isinstance(message, ReportReceived):
            self.reports += 1
            self._decided += message.step is not None
        if not isinstance(message, TrialLeft):
            return
        self._ended += 1
        if self._ended == self._trials // 10:
            self._began = self._now()
        elif self._ended == self._trials // 2:
            self._half = self._now()
        elif self._ended == self._trials - self._trials // 20:
            now = self._now()
            used = {name: value - self._began.get(name, 0.0) for name, value in now.items()}
            trials = now["trials"] - self._half["trials"]
            grows = (now["rss"] - self._half["rss"]) / trials
            stamp("window", **used, grows=grows, mb=now["rss"])
        elif self._ended == self._trials:
            stamp("last")

    def _now(self) -> dict[str, float]:
        used = {"driver": time.process_time(), "wall": time.monotonic(), "rss": memory_mb(os.getpid())["Rss"]}
        for thread in threading.enumerate():
            if thread.name in ("dray-driver", "dray-tune") and thread.native_id is not None:
                used[thread.name] = cpu_s(os.getpid(), thread.native_id)
        for pid, name in parts():
            used[name] = used.get(name, 0.0) + cpu_s(pid)
            used[f"{name} rss"] = used.get(f"{name} rss", 0.0) + memory_mb(pid)["Rss"]
        return {**used, "reports": self.reports, "decided": self._decided, "trials": self._ended}


def light(directory: Path, groups: int, trials: int, plain: int) -> None:
    """Run a search on played groups."""
    import ray
    from ray.cluster_utils import Cluster

    import dray
    from dray.groups.on_ray import OnRay

    OnRay.group = LightGroup  # type: ignore[assignment]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": groups, "include_dashboard": False})
    try:
        experiment = dray.Experiment(
            config(trials, max_length=64), model_dir=DIGITS, path=directory / "experiment", address=cluster.address
        )
        ray.init(address=cluster.address, log_to_driver=False)
        player = ray.remote(num_cpus=0, max_concurrency=1000)(Players)
        LightGroup.players = [player.remote(plain) for _ in range(-(-groups // GROUPS_PER_PLAYER))]
        window = Window(trials)
        experiment.run(on_message=window)
        stamp("ended", reports=window.reports)
        for one in LightGroup.players:
            waits, sent = ray.get(one.figures.remote())
            stamp("player", waits=waits, sent=sent)
    finally:
        ray.shutdown()
        cluster.shutdown()


def config(trials: int, max_length: int) -> dict[str, Any]:
    """An ASHA search in batches; at three rungs of four, so that two trials in three end at the first."""
    return {
        "name": "scale",
        "entrypoint": "model_def:DigitsTrial",
        "hyperparameters": {
            "global_batch_size": 64,
            "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
            "hidden": {"type": "int", "minval": 16, "maxval": 256},
        },
        "searcher": {
            "name": "asha",
            "metric": "validation_loss",
            "max_length": {"batches": max_length},
            "max_trials": trials,
            "divisor": 4,
            "num_rungs": 3,
        },
        "resources": {"slots_per_trial": 1, "slot": "cpu"},
    }


# -------------------------------------------------------------------------------------------------------------- figures
@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one search on played groups."""

    groups: int
    plain: int
    used: Mapping[str, float]
    waits: list[float]
    lost: int
    """Reports that were sent, but never reached the driver."""
    wait_to_end: float
    """Seconds from the last trial's end to that of the run."""

    def ms(self, name: str, each: str) -> float:
        """CPU milliseconds of a process or a thread, for each "trials" or "reports"."""
        return 1000 * self.used.get(name, 0.0) / self.used[each]


def report(paper: Paper, figures: list[Figures]) -> None:
    """Print the tables."""
    paper.say(
        "\nSearches on groups that only report: CPU milliseconds per trial, and events per second on these cores\n"
    )
    head = ["groups", "reports a trial", "driver", "of it Tune's thread", "event loop", "handle", "GCS",
            "raylet", "players", "trials / s", "reports / s", "decisions / s", "decision, median",
            "90th %", "reports lost"]  # fmt: skip
    columns = ("driver", "dray-tune", "dray-driver", "handle", "gcs", "raylet", "players")
    lines = []
    for f in figures:
        rates = (f.used[each] / f.used["wall"] for each in ("trials", "reports", "decided"))
        lines.append(
            [
                str(f.groups),
                f"{f.used['reports'] / f.used['trials']:.1f}",
                *(f"{f.ms(name, 'trials'):.2f}" for name in columns),
                *(f"{rate:.0f}" for rate in rates),
                *(f"{1000 * quantile(f.waits, share):.0f} ms" for share in (0.5, 0.9)),
                str(f.lost),
            ]
        )
    paper.table(head, lines)
    paper.say("\nMemory\n")
    head = ["groups", "reports a trial", "driver, at the end", "grows by, a trial", "last trial's end to the run's"]
    lines = []
    for f in figures:
        reports, grown = f.used["reports"] / f.used["trials"], f"{1024 * f.used['grows']:.1f} kB"
        lines.append([str(f.groups), f"{reports:.1f}", f"{f.used['mb']:.0f} MB", grown, f"{f.wait_to_end:.1f} s"])
    paper.table(head, lines)
    paper.say("Growth is measured over the second half of the trials.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU seconds of one event in one thread or process."""

    decision: float
    report: float


def costs(figures: list[Figures], name: str) -> Costs:
    """The costs of a decision, including the rest of the trial, and of a report without a decision, from the two most
    different runs with the most groups."""
    most = [f for f in figures if f.groups == max(f.groups for f in figures)]
    few, many = min(most, key=lambda f: f.plain), max(most, key=lambda f: f.plain)
    if few is many:
        return Costs(decision=few.ms(name, "decided") / 1000, report=float("nan"))
    plain = [f.used["reports"] - f.used["decided"] for f in (few, many)]
    decided = [f.used["decided"] for f in (few, many)]
    used = [f.used.get(name, 0.0) for f in (few, many)]
    # Two equations: decisions * x + reports * y = CPU time.
    determinant = decided[0] * plain[1] - decided[1] * plain[0]
    return Costs(
        decision=(used[0] * plain[1] - used[1] * plain[0]) / determinant,
        report=(decided[0] * used[1] - decided[1] * used[0]) / determinant,
    )


def extrapolate(paper: Paper, figures: list[Figures]) -> None:
    """The load of the driver on a cluster of many slots, one slot per group."""
    paper.say(
        f"\nOn paper: groups of one slot, with a decision every {DECIDES_EVERY_S:g} s and a report every "
        f"{REPORTS_EVERY_S:g} s; shares of one core of this machine\n"
    )
    growth = 1024 * quantile([f.used["grows"] for f in figures], 0.5)
    lines = []
    for what, name in (("driver, Tune's thread", "dray-tune"), ("driver, event loop", "dray-driver"),
                       ("driver, all", "driver"), ("handle", "handle")):  # fmt: skip
        each = costs(figures, name)
        shares = [
            slots * (each.decision / DECIDES_EVERY_S + each.report / REPORTS_EVERY_S) for slots, _ in EXTRAPOLATED
        ]
        lines.append(
            [what, f"{1e3 * each.decision:.2f} ms", f"{1e3 * each.report:.2f} ms", *(f"{s:.0%}" for s in shares)]
        )
    sizes = [f"{slots:,} slots" for slots, _ in EXTRAPOLATED]
    paper.table(["CPU", "a decision", "a report", *sizes], lines)
    paper.say()
    grown = (f"{growth * trials / 2**20:.1f} GB" for _, trials in EXTRAPOLATED)
    lines = [["memory of the driver", f"{growth:.0f} kB a trial", *grown]]
    paper.table(["beside the workers", "each", *sizes], lines)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all searches, and print the results."""
    paper.say(machine())
    figures: list[Figures] = []
    for groups in options.groups:
        for plain in options.plain:
            where = directory / f"{groups}-{plain}"
            ran = run(__file__, ["--child", "light", str(where), str(groups), str(options.trials), str(plain)], where)
            [window], [last, ended] = of_kind(ran.stamps, "window"), of_kind(ran.stamps, "last", "ended")
            players = of_kind(ran.stamps, "player")
            figures.append(
                Figures(
                    groups=groups,
                    plain=plain,
                    used=window.fields,
                    waits=[s for each in players for s in each.fields["waits"]],
                    lost=sum(each.fields["sent"] for each in players) - ended.fields["reports"],
                    wait_to_end=ended.time - last.time,
                )
            )
            print(f"{groups} groups, {plain} reports before each decision: {ran.wall_s:.1f} s", flush=True)
    report(paper, figures)
    extrapolate(paper, figures)


def main() -> None:
    """Read the command line and measure."""
    children: dict[str, Callable[..., None]] = {"light": light}
    if sys.argv[1:2] == ["--child"]:
        name, directory, *numbers = sys.argv[2:]
        end_on_sigterm()
        return children[name](Path(directory), *map(int, numbers))
    parser = arguments(__doc__ or "")
    parser.add_argument("--groups", type=int, nargs="+", default=[10, 30, 60], help="default: 10 30 60")
    parser.add_argument("--trials", type=int, default=1000, help="trials per search (default 1000)")
    parser.add_argument("--plain", type=int, nargs="+", default=[0, 10], help="reports before each decision")
    options = parser.parse_args()
    perform(measure, options, name="scale", title="How far one driver goes")


if __name__ == "__main__":
    main()
