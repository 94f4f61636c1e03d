"""How much memory the driver keeps per trial, over 100,000 trials, without Ray.

The deciding objects, `ExperimentDriver` and `Desk`, are real, as are journal, timeline, metrics, display and the
observers that every experiment has. Groups and trials are simulated: trials report twice on the way to each rung of an
ASHA search and save a checkpoint there; some fail once and restart. Reports and results are pickled, so that no object
is shared that would not be on a cluster. Checkpoints are not written, and nothing waits for the disk.

Memory is `Anonymous` in /proc/self/smaps_rollup, after the threads have finished their work, metrics are in Parquet,
garbage is collected, and the C library has returned free memory. The slope is that of the least squares line through
all sizes. In another process, tracemalloc shows which files allocated the memory between the first two sizes.

    python bench/driver_memory.py [--trials 10000 25000 50000 100000] [--save]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import itertools
import os
import pickle
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any, TypeVar

from _measure import Paper, Ran, arguments, command, machine, of_kind, perform, run, stamp, verdict

if TYPE_CHECKING:
    from dray.leases.messages import LeaseOutcome, Row
    from searchers.events import TrialResult

T = TypeVar("T")

GROUPS = 64
RUNGS = (400, 1600, 6400)
FAILS_EVERY = 25
"""One in this many of the trials that continue after the first rung fails once, and restarts."""
STEP_S = 2.0
"""The length of a step of all groups, for the metrics, which write their rows every five seconds."""
OBSERVED_EVERY_S = 0.1
"""The interval of observers' updates, shorter than the usual second, in which hundreds of trials end here."""
LIMIT_S = 3600.0
TARGET = 1000.0
"""Bytes a trial."""
CASES: dict[str, list[str]] = {
    "ASHA, output to a file": [],
    "ASHA, on a terminal": ["--terminal"],
    "ASHA by promotion, on a terminal": ["--terminal", "--variant", "promotion"],
}
"""By name, the arguments of the child process."""
SAMPLERS = {"tpe": 20_000, "multi_fidelity": 2_000}
"""Trials of the searches whose samplers learn."""


# -------------------------------------------------------------------------------------------------------- the groups
def travelled(value: T) -> T:
    """The value as it arrives in another process."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


@dataclass(slots=True, kw_only=True)
class Played:
    """A trial on a group."""

    lease: int
    trial: int
    first: int
    """The rung at which the trial began in this lease."""
    rung: int
    waits: bool = False


def rows(batches: int, kind: str, value: float) -> list[Row]:
    """The metrics of one report, and a trial's use of its time and machine."""
    common = {"batches": batches, "epochs": batches / 100, "time": time.time()}
    own = [("loss", value), ("accuracy", 1 - value)]
    usage = [("batches_per_second", 30 + value), ("training_s", 4 + value), ("data_s", value), ("memory_gb", 2 + value)]
    named = [(kind, *each) for each in own] + [("system", *each) for each in usage]
    return [{**common, "kind": its, "name": name, "value": number} for its, name, number in named]


class Nowhere(io.StringIO):
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


# ----------------------------------------------------------------------------------------------------------- the driver
class Driver:
    """The driver as in `dray.experiment.run.Run`, with simulated groups.

    Args:
        directory: does not exist yet.
        config: of the experiment.
        terminal: whether the display has a terminal to draw on.
    """

    def __init__(self, directory: Path, config: dict[str, Any], *, terminal: bool) -> None:
        from rich.console import Console

        from dray.config.custom import Custom
        from dray.config.load import load_config
        from dray.display.display import Display
        from dray.experiment.driver import ExperimentDriver
        from dray.experiment.open_search import open_search
        from dray.experiment.request_files import RequestFiles
        from dray.leases.desk import Desk
        from dray.observers import loggers
        from dray.observers.observer import Observers
        from dray.records.directory import ExperimentDirectory
        from dray.records.metrics import MetricsLog
        from dray.records.timeline import Timeline
        from searchers.journal import Journal

        checked = load_config(config)
        self._directory = where = ExperimentDirectory.create(directory, checked, None)
        self.journal = Journal(where.journal)
        self._observers = Observers(where, loggers.makes(where, checked))
        opened = open_search(checked, Custom(), {}, journal=self.journal, records=[], requests=RequestFiles(where))
        self.search = search = opened.search
        console = Console(file=Nowhere(), force_terminal=terminal, width=160, height=50)
        self.display = Display(
            name="driver-memory",
            path=where.path,
            metric=checked.searcher.first_metric,
            smaller_is_better=True,
            unit=checked.searcher.unit,
            console=console,
        )
        self._observers.begin(self.display.say)
        self._now = 0.0
        self._metrics = MetricsLog(where.metrics, clock=lambda: self._now)
        self.display.__enter__()
        self.display.begin(search)
        self._timeline = Timeline(where.metrics)
        self._played: dict[str, Played] = {}
        self._due: list[TrialResult] = []
        self._effects: list[Any] = []
        self.driver = ExperimentDriver(opened, self._effects.append)
        self.desk = Desk(self._effects.append)
        self.desk.add("run")
        self.driver.begin(opened.records)
        for number in range(GROUPS):
            self._timeline.starts(f"group-{number}", 1)
            self._ask(f"group-{number}", 0)
        self._settle()

    def play(self, trials: int) -> None:
        """Continue until this many trials, plus one for each group, have been created."""
        while len(self.search.trials) < trials + GROUPS:
            self.step()

    def step(self) -> None:
        """Every group that can continue reports, and Tune passes on the reports that need a decision."""
        self._now += STEP_S
        for group, played in list(self._played.items()):
            if not played.waits:
                self._train(group, played)
                self._settle()
        self.driver.fetch("fetch", 1)
        self._settle()
        due, self._due = self._due, []
        self.driver.decide(travelled(due))
        self._settle()
        self._metrics.pack()
        self.display.update(self.driver.counts, GROUPS, GROUPS)

    # what the groups do
    def _ask(self, group: str, after: int) -> None:
        self.desk.next_lease(group, "run", group, 1, 0, 1, after)

    def _train(self, group: str, played: Played) -> None:
        """To the next rung: a report on the way, one there, and a checkpoint."""
        from dray.leases.failure import Failure
        from dray.leases.messages import DeskReport

        trial, batches = played.trial, RUNGS[played.rung]
        value = random.Random(f"{trial}:{batches}").random()
        plain = DeskReport(rows=rows(batches // 2, "training", value))
        self.driver.report(None, played.lease, travelled(plain), decides=False)
        if trial % FAILS_EVERY == 0 and (played.first, played.rung) == (0, 1):
            failure = Failure(kind="error", where=f"ValueError model_def.py:{played.lease}", batches=trial)
            self._leave(group, "errored", error="ValueError: a bad batch", failure=failure)
            return
        checkpoint = str(self._directory.path / f"trial_{trial}" / f"checkpoint_{batches}")
        self.driver.saved(None, trial, checkpoint, batches, value, 0.1)
        final = batches == RUNGS[-1]
        report = DeskReport(rows=rows(batches, "validation", value), step=batches, value=value, final=final)
        played.waits = True
        self.driver.report(("report", group), played.lease, travelled(report), decides=True)

    def _leave(self, group: str, outcome: LeaseOutcome, **fields: Any) -> None:
        from dray.leases.messages import Departure

        number = self._played.pop(group).lease
        self.desk.leave(None, number, 0, Departure(outcome=outcome, **fields))
        self._ask(group, number)

    def _replied(self, call: Any, value: Any) -> None:
        match call:
            case "fetch":
                self._due = value or []
            case ("report", group):
                played = self._played[group]
                is_last = played.rung == len(RUNGS) - 1
                played.rung, played.waits = played.rung + 1, False
                if is_last:
                    self._leave(group, "completed")
                elif value != "continue":
                    self._leave(group, "paused" if value == "pause" else "stopped")
            case str(group) if value is not None:
                lease, trial, rung = pickle.loads(value[2])
                self._played[group] = Played(lease=lease, trial=trial, first=rung, rung=rung)
                self.desk.begun(None, lease)

    # what the run's shell does
    def _settle(self) -> None:
        """Like `Run.settle`."""
        from dray.experiment.effects import Append

        while self._effects:
            decided = self._effects.copy()
            self._effects.clear()
            with self.journal.batch():
                for each in decided:
                    if isinstance(each, Append):
                        record = {**each.record, "time": time.time()}
                        self.journal.append(record, wait=each.wait)
            for each in decided:
                self._perform(each)

    def _perform(self, effect: Any) -> None:
        """Like `Run._perform`."""
        from dray.experiment import effects
        from dray.leases import messages
        from dray.leases.effects import Reply, Tell

        match effect:
            case Reply(call, value):
                self._replied(call, value)
            case Tell(_, message):
                match message:
                    case messages.GroupReady():
                        self._timeline.ready(message.group, message.time)
                        return
                    case messages.LeaseGranted():
                        self._timeline.granted(message.group, message.trial, message.time)
                    case messages.TrialLeft():
                        self._timeline.left(message.group, message.trial, message.time)
                self.driver.on(message)
            case effects.ToDesk(method, args):
                getattr(self.desk, method)("run", *args)
            case effects.Bind():
                rung = sum((effect.last_step or 0) >= length for length in RUNGS)
                self.desk.bind("run", effect.lease, pickle.dumps((effect.lease, effect.trial, rung)))
            case messages.ReportReceived():
                self._metrics.append(effect.trial, effect.rows)
                self._observers.wake()
                self.display.rows(effect.trial, effect.rows)
            case effects.Prune():
                self.driver.retention.pruned(effect, effect.delete, [], failed=False)
            case effects.Examine():
                self.driver.retention.examined(effect)
            case effects.Say(line):
                self.display.say(line)
            case effects.ShowFailure():
                self.display.failure(effect.trial, effect.error, effect.ended, effect.kept)
            case effects.Fail(error):
                raise error

    def settle(self) -> None:
        """Let the observers' thread finish its work, and write the rows of metrics."""
        self._now += 60.0
        self._metrics.pack()
        self.display._due = 0.0
        self.display.update(self.driver.counts, GROUPS, GROUPS)
        time.sleep(10 * OBSERVED_EVERY_S)

    def close(self) -> None:
        """End the threads."""
        self._timeline.close()
        self.display.__exit__(None, None, None)
        self._metrics.close()
        self._observers.close()
        self.journal.close()


def config(variant: str, sampler: str, trials: int) -> dict[str, Any]:
    """An ASHA search at three rungs, over six hyperparameters."""
    return {
        "name": "driver-memory",
        "entrypoint": "model_def:DigitsTrial",
        "hyperparameters": {
            "global_batch_size": 64,
            "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
            "weight_decay": {"type": "log", "base": 10, "minval": -6, "maxval": -2},
            "dropout": {"type": "double", "minval": 0.0, "maxval": 0.6},
            "hidden": {"type": "int", "minval": 16, "maxval": 4096},
            "layers": {"type": "int", "minval": 1, "maxval": 8},
            "optimizer": {"type": "categorical", "vals": ["adam", "sgd", "adamw"]},
        },
        "searcher": {
            "name": "asha",
            "metric": "loss",
            "max_length": {"batches": RUNGS[-1]},
            "max_trials": trials,
            "divisor": 4,
            "num_rungs": len(RUNGS),
            "max_concurrent_trials": GROUPS,
            "variant": variant,
            "sampler": sampler,
        },
        "resources": {"slots_per_trial": 1, "slot": "cpu"},
    }


# --------------------------------------------------------------------------------------------------- in its own process
def anonymous() -> int:
    """Bytes of anonymous memory of this process, after free memory was returned."""
    import pyarrow

    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def child(options: argparse.Namespace) -> None:
    """Play a search, and stamp the memory at each size; or, if traced, the allocations between the two sizes."""
    import dray.observers.observer

    os.fsync = lambda fd: None
    sizes: list[int] = options.trials
    dray.observers.observer.EVERY_S = OBSERVED_EVERY_S
    if options.traced:
        tracemalloc.start()  # started here, so that of earlier tables only the growth counts
    settings = config(options.variant, options.sampler, sizes[-1] + 1000)
    driver = Driver(options.directory / "experiment", settings, terminal=options.terminal)
    before: tracemalloc.Snapshot | None = None
    for size in sizes:
        began = time.process_time()
        driver.play(size)
        used = time.process_time() - began
        driver.settle()
        if not options.traced:
            stamp("memory", trials=size, bytes=anonymous(), cpu_s=used)
            continue
        gc.collect()
        if before is None:
            before = tracemalloc.take_snapshot()
        else:
            held = held_by_file(before, tracemalloc.take_snapshot())
            stamp("held", **{name: grown / (size - sizes[0]) for name, grown in held.items()})
            tracemalloc.stop()
    driver.close()


def held_by_file(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot) -> Counter[str]:
    """Bytes allocated between two snapshots and still held at the second, by the file that allocated them."""
    held: Counter[str] = Counter()
    for each in after.compare_to(before, "filename"):
        path = Path(each.traceback[0].filename)
        package = next((parent for parent in path.parents if parent.name in ("dray", "searchers")), None)
        if path == Path(__file__):
            name = "what messages bring"
        elif package is None:
            name = f"{path.parent.name}/{path.name}"
        else:
            name = str(path.relative_to(package.parent))
        held[name] += each.size_diff
    return held


# -------------------------------------------------------------------------------------------------------------- figures
@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One search: bytes by the number of trials, and CPU milliseconds a trial on the way there."""

    memory: dict[int, int]
    cpu_ms: dict[int, float]

    @property
    def slope(self) -> float:
        """Bytes a trial, by the least squares line."""
        return linear_regression(list(self.memory), list(self.memory.values())).slope


def figures_of(ran: Ran) -> Figures:
    """Figures from the stamps of a child process."""
    found = [each.fields for each in of_kind(ran.stamps, "memory")]
    sizes = [0, *(each["trials"] for each in found)]
    return Figures(
        memory={each["trials"]: each["bytes"] for each in found},
        cpu_ms={
            each["trials"]: 1000 * each["cpu_s"] / (each["trials"] - before)
            for each, before in zip(found, sizes, strict=False)
        },
    )


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run every case, two at a time, and print the tables."""
    paper.say(f"{machine()}\n`{command()}`")
    sizes, numbers = options.trials, itertools.count(1)

    def ran(trials: Sequence[int], *given: str) -> Ran:
        where = directory / str(next(numbers))
        arguments = [*given, "--trials", *map(str, trials)]
        print(*arguments, flush=True)
        return run(str(Path(__file__)), ["--child", str(where), *arguments], where, limit_s=LIMIT_S)

    with ThreadPoolExecutor(2) as two:
        runs = {case: two.submit(ran, sizes, *given) for case, given in CASES.items()}
        for sampler, most in SAMPLERS.items():
            some = [max(most * size // sizes[-1], 1) for size in sizes]
            runs[f"ASHA, sampler: {sampler}"] = two.submit(ran, some, "--sampler", sampler)
        traced = two.submit(ran, sizes[:2], "--traced")

    lines = []
    for case, one in runs.items():
        found = figures_of(one.result())
        memory = [f"{size:,}: {each / 1e6:.1f} MB" for size, each in found.memory.items()]
        costs = [f"{each:.2f}" for each in found.cpu_ms.values()]
        reached = f"<= {TARGET:,.0f}", verdict(found.slope <= TARGET)
        lines.append([case, *memory, f"{found.slope:,.0f}", *reached, costs[0], costs[-1]])
    paper.say("\nThe driver's memory after so many trials\n")
    head = ["search", *[""] * len(sizes), "bytes a trial", "target", "", "CPU, ms a trial, first", "last"]
    paper.table(head, lines)

    held = {name: size for name, size in of_kind(traced.result().stamps, "held")[0].fields.items() if abs(size) >= 1}
    lines = [[name, f"{held[name]:,.0f}"] for name in sorted(held, key=lambda name: -held[name])]
    paper.say(f"\nBytes per trial from {sizes[0]:,} to {sizes[1]:,} trials, by the file that allocated them\n")
    paper.table(["file", "bytes"], [*lines, ["all", f"{sum(held.values()):,.0f}"]])


def main() -> None:
    """Read the command line and measure."""
    parser = arguments(__doc__)
    sizes = [10_000, 25_000, 50_000, 100_000]
    parser.add_argument(
        "--trials", type=int, nargs="+", default=sizes, help="sizes to measure at (default: up to 100000)"
    )
    parser.add_argument("--child", dest="directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variant", default="stopping", help=argparse.SUPPRESS)
    parser.add_argument("--sampler", default="random", help=argparse.SUPPRESS)
    parser.add_argument("--terminal", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory is not None:
        child(options)
        return
    perform(measure, options, name="driver_memory", title="What the driver keeps of each trial")


if __name__ == "__main__":
    main()
