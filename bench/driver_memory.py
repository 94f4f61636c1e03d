"""What the driver keeps of each trial in memory, over 100,000 trials, without Ray.

The driver's parts are real, and are called in the order of `dray/experiment/run.py`: the search with its journal, the
queue, Tune's side of the search (`TuneDriver.take`), retention, restarts, timeline, metrics, display, and the observers
that every experiment has. The desk is played: so are the groups and the trials, which report twice on the way to each
rung of an ASHA search and save a checkpoint there; some fail once and restart. Messages travel as pickles, as they do
through Ray, so that nothing is shared that isn't on a cluster. Checkpoints are not written, and nothing waits for the
disk.

Memory is what /proc/self/smaps_rollup calls anonymous, once the threads have done their work, the rows of metrics are
in Parquet, the garbage is collected, and the C library has given back what is free. The slope is that of the least
squares line through all sizes. By what holds it: tracemalloc, between the first two sizes, in another process.

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
import threading
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any, TypeVar

from _measure import Paper, Ran, arguments, command, machine, of_kind, perform, run, stamp, verdict

if TYPE_CHECKING:
    from dray.desk.messages import LeaseGranted, LeaseOutcome, Message, Row
    from dray.desk.results import TrialResult
    from dray.worker.lease import TrialLease
    from searchers.events import Decision

T = TypeVar("T")

GROUPS = 64
RUNGS = (400, 1600, 6400)
FAILS_EVERY = 25
"""One in so many of the trials that continue after the first rung fails once, and restarts."""
STEP_S = 2.0
"""How long a step of all groups is to take, to the metrics: they write their rows every five seconds."""
OBSERVED_EVERY_S = 0.1
"""How often observers are updated, rather than once a second, in which hundreds of trials end here."""
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


# --------------------------------------------------------------------------------------------- the desk and its groups
def travelled(value: T) -> T:
    """The value as it arrives in another process."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


@dataclass(slots=True, kw_only=True)
class Played:
    """A trial on a group."""

    number: int
    group: str
    trial: int
    first: int = 0
    """The rung that it began at, in this lease."""
    rung: int = 0
    began: bool = False
    waits: bool = False


class PlayedDesk:
    """A `DeskConnection` to a desk with groups of its own. It keeps nothing of a trial that has left its group."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._queue: deque[int] = deque()
        self._free = deque(f"group-{number}" for number in range(GROUPS))
        self._leases: dict[int, Played] = {}
        self._of: dict[int, Played] = {}
        self._messages: list[Message] = []
        self._results: list[TrialResult] = []
        self._numbers, self._result_numbers = itertools.count(1), itertools.count(1)

    # what the driver calls
    def tell(self, method: str, *args: Any, **named: Any) -> None:
        args, named = travelled((args, named))
        getattr(self, f"_{method}")(*args, **named)

    def _set_best(self, client: str, score: float | None) -> None:
        """The score of the best trial so far: of no use here."""

    def _enqueue(self, client: str, trials: Sequence[int], first: bool = False) -> None:
        if first:
            self._queue.extendleft(reversed(trials))
        else:
            self._queue.extend(trials)

    def _withdraw(self, client: str, trials: Sequence[int]) -> None:
        for trial in trials:
            if trial in self._queue:
                self._queue.remove(trial)

    def _drop(self, lease: int) -> None:
        self._leave(self._leases[lease])

    def _bind(self, number: int, lease: TrialLease) -> None:
        played = self._leases[number]
        reached = lease.last_step or 0
        played.first = played.rung = sum(reached >= length for length in RUNGS)
        played.began = True

    def _answer(self, client: str, trial: int, number: int, decision: Decision) -> None:
        if (played := self._of.get(trial)) is None:
            return
        played.rung, played.waits = played.rung + 1, False
        if decision == "pause":
            self._leave(played, "paused")
        elif decision == "stop":
            self._leave(played, "completed" if played.rung == len(RUNGS) else "stopped")

    def _end_trial(self, client: str, trial: int, outcome: LeaseOutcome) -> None:
        from dray.desk.results import TrialResult

        self._results.append(TrialResult(number=next(self._result_numbers), trial=trial, outcome=outcome))

    def _end_search(self, client: str) -> None:
        """No trial is left to train."""

    # what happens on the groups
    def step(self) -> tuple[list[Message], list[TrialResult]]:
        """Let every group that can go on report once. Returns messages and results since the last time."""
        from dray.desk.messages import LeaseGranted

        for played in list(self._leases.values()):
            if played.began and not played.waits:
                self._train(played)
        while self._free and self._queue:
            played = Played(number=next(self._numbers), group=self._free.popleft(), trial=self._queue.popleft())
            self._leases[played.number] = self._of[played.trial] = played
            self._messages.append(LeaseGranted(lease=played.number, group=played.group, trial=played.trial))
        due = travelled((self._messages, self._results))
        self._messages, self._results = [], []
        return due

    def _train(self, played: Played) -> None:
        """To the next rung: a report on the way, one there, and a checkpoint."""
        from dray.desk.messages import CheckpointSaved
        from dray.desk.results import TrialResult

        trial, batches = played.trial, RUNGS[played.rung]
        value = random.Random(f"{trial}:{batches}").random()
        self._report(played, rows(batches // 2, "training", value), None)
        if trial % FAILS_EVERY == 0 and (played.first, played.rung) == (0, 1):
            self._fail(played)
            return
        self._report(played, rows(batches, "validation", value), batches)
        checkpoint = str(self._directory / f"trial_{trial}" / f"checkpoint_{batches}")
        self._messages.append(
            CheckpointSaved(trial=trial, checkpoint=checkpoint, batches=batches, value=value, seconds=0.1)
        )
        outcome: LeaseOutcome | None = "completed" if batches == RUNGS[-1] else None
        number = next(self._result_numbers)
        self._results.append(TrialResult(number=number, trial=trial, step=batches, value=value, outcome=outcome))
        played.waits = True

    def _report(self, played: Played, its: list[Row], step: float | None) -> None:
        from dray.desk.messages import ReportReceived

        self._messages.append(ReportReceived(lease=played.number, trial=played.trial, rows=its, step=step, warning=""))

    def _fail(self, played: Played) -> None:
        from dray.desk.failure import Failure

        failure = Failure(kind="error", where=f"ValueError model_def.py:{played.number}", batches=played.trial)
        self._leave(played, "errored", error="ValueError: a bad batch", failure=failure)

    def _leave(self, played: Played, outcome: LeaseOutcome | None = None, **more: Any) -> None:
        from dray.desk.messages import TrialLeft

        del self._leases[played.number], self._of[played.trial]
        self._free.append(played.group)
        if outcome is None:
            return
        self._messages.append(
            TrialLeft(lease=played.number, group=played.group, trial=played.trial, outcome=outcome, **more)
        )


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


class NoStore:
    """Stands in for a trial's checkpoints: there are none on the disk."""

    def listed(self) -> list[tuple[int, str]]:
        return []

    def delete(self, batches: int) -> None:
        """Nothing to do."""

    def force_to_disk(self, batches: int) -> None:
        """Nothing to do."""


# ----------------------------------------------------------------------------------------------------------- the driver
class Driver:
    """The driver's parts, as `dray.experiment.experiment.Experiment` and `dray.experiment.run.Run` have them.

    Args:
        directory: does not exist yet.
        config: of the experiment.
        terminal: whether the display has a terminal to draw on.
    """

    def __init__(self, directory: Path, config: dict[str, Any], *, terminal: bool) -> None:
        from rich.console import Console

        from dray.config.custom import Custom
        from dray.config.load import load_config
        from dray.desk.messages import GroupReady
        from dray.display.counts import Counts
        from dray.display.display import Display
        from dray.experiment.open_search import open_search
        from dray.experiment.restarts import Restarts
        from dray.experiment.retention import Policy, Retention, checkpoints_needed
        from dray.experiment.trial_queue import TrialQueue
        from dray.observers import loggers
        from dray.observers.observer import Observers
        from dray.records.directory import ExperimentDirectory
        from dray.records.metrics import MetricsLog
        from dray.records.timeline import Timeline
        from searchers.journal import Journal
        from searchers.ray_tune import TuneDriver

        checked = load_config(config)
        self._directory = where = ExperimentDirectory.create(directory, checked, None)
        self.journal = Journal(where.journal)
        self._observers = Observers(where, loggers.makes(where, checked))
        opened = open_search(checked, Custom(), {}, journal=self.journal, records=[], observers=self._observers)
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
        self._observers.begin(opened.records, search.trials, self.display.say)
        self._granted: list[LeaseGranted] = []
        self._now = 0.0
        self._metrics = MetricsLog(where.metrics, clock=lambda: self._now)
        self.display.__enter__()
        self.display.begin(search, opened.records)
        self._timeline = Timeline(where.metrics)
        self._restarts = Restarts(
            opened.records,
            config=checked,
            directory=where,
            journal=self.journal,
            display=self.display,
            has_logs=False,
        )
        self._counts = Counts(restarts=self._restarts.counted)
        self._retention = Retention(
            Policy.of(checked.checkpoint_storage, smaller_is_better=True),
            store_of=lambda trial: NoStore(),  # type: ignore[arg-type, return-value]
            needs=lambda trial: checkpoints_needed(search.trials[trial]),
            note=lambda record: self.journal.append(record, wait=False),
            say=self.display.say,
        )
        self.desk: Any = PlayedDesk(where.path)
        self._queue = TrialQueue(
            search,
            name="run",
            directory=where,
            together=self.journal.together,
            changed=self._retention.changed,
        )
        self._tune = TuneDriver(source=list, directory=where.ray)  # type: ignore[arg-type]  # no handle runs here
        self._tune.attach(search, lock=self._queue.lock, together=self.journal.together, act=self._act)
        self._queue.begin(self.desk, lambda value: value)
        self._retention.start(opened.records)
        for group in self.desk._free:
            self._timeline.starts(group, 1)
            self._read(GroupReady(group=group))

    def play(self, trials: int) -> None:
        """Go on until so many trials, and one for each group, have been created."""
        while len(self.search.trials) < trials + GROUPS:
            self.step()

    def step(self) -> None:
        """One turn of the driver's loop, and of Tune's."""
        self._now += STEP_S
        messages, results = self.desk.step()
        for message in messages:
            self._read(message)
        granted, self._granted = self._granted, []
        self._queue.bind(granted, revived=self._restarts.ended_before, send_every_s=1.0)
        if results:
            self._tune.take(results)  # type: ignore[arg-type]  # as Ray brings them
            if self._tune.error is not None:
                raise self._tune.error
        self._queue.states()
        self._queue.count_runnable()
        self._metrics.pack()
        self.display.update(self._counts, GROUPS, GROUPS)

    def _read(self, message: Message) -> None:
        """As `Run._read`."""
        from dray.desk import messages

        match message:
            case messages.GroupReady():
                self._timeline.ready(message.group, message.time)
            case messages.LeaseGranted():
                self._timeline.granted(message.group, message.trial, message.time)
                self._granted.append(message)
            case messages.ReportReceived():
                self._metrics.append(message.trial, message.rows)
                self._observers.rows(message.trial, message.rows)
                self.display.rows(message.trial, message.rows)
                self._counts.reports += 1
            case messages.TrialLeft():
                self._timeline.left(message.group, message.trial, message.time)
                if message.outcome == "errored" and not self.search.trials[message.trial].ended:
                    if (reason := self._restarts.end_of(message)) is not None:
                        self._queue.end(message.trial, reason)
                    else:
                        self._queue.retry(message.trial)
            case messages.CheckpointSaved():
                self._restarts.saved(message.trial, message.batches)
                self._retention.saved(message.trial, message.batches, message.checkpoint, message.value)

    def _act(self, answer: Any) -> None:
        """As `Run._act`."""
        self._counts.decisions[answer.decision] += 1
        self._queue.act(answer)

    def settle(self) -> None:
        """Let the threads do what they have, and write the rows of metrics."""
        self._now += 60.0
        self._metrics.pack()
        for _ in range(2):  # the second comes after the work of the first
            done = threading.Event()
            self._retention._work.put(done.set)
            done.wait()
        self.display._due = 0.0
        self.display.update(self._counts, GROUPS, GROUPS)
        while any(self._observers._new.values()):
            time.sleep(0.1)
            if not any(self._observers._new.values()):
                time.sleep(1.0)  # an update has taken them, and is writing

    def close(self) -> None:
        """End the threads."""
        self._retention.close()
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
    """Bytes of this process's memory that no file backs, once all that is free was given back."""
    import pyarrow

    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def child(options: argparse.Namespace) -> None:
    """Play a search, and stamp the memory at each size; or, if traced, what holds it, between the two sizes."""
    import dray.observers.observer

    os.fsync = lambda fd: None
    sizes: list[int] = options.trials
    dray.observers.observer.EVERY_S = OBSERVED_EVERY_S
    if options.traced:
        tracemalloc.start()  # from here on: a table that grows later is counted as what it grows by
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
    """Bytes held at the second time that were not at the first, by the file that asked for them."""
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
    """From what a child process has stamped."""
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
    paper.say(
        f"\nWhat holds it: bytes a trial from {sizes[0]:,} to {sizes[1]:,} trials, by the file that asked for it\n"
    )
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
