"""The cost of a decision after many trials, and a search of a million trials on ten thousand workers.

Per event: a method is driven through trials that start, report until they are stopped, and exit; the CPU time of the
events is taken over a window of them once n trials have been created. The target for dray's methods is 5 us an event at
any n. For comparison, Ray's AsyncHyperBandScheduler and Optuna's SuccessiveHalvingPruner take one report with n values
in the rung. The target for a proposal by TPE is 5 ms.

`multi_fidelity` is measured in a stream: each new trial gets a proposal, and its results follow. The target is 5 ms for
the proposals of trials in turn, on average and for 99% of them, each with the longest event of its trial, and for those
of 100 trials that start at once.

The search in virtual time (`searchers.simulate`) drives a bare method; its target is 60 s of wall time.

    python bench/search_scale.py [--most 1000000] [--no-peers] [--no-simulation] [--save]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from random import Random
from statistics import median
from typing import Any

import optuna
from _measure import Paper, machine, verdict
from ray.tune.schedulers import AsyncHyperBandScheduler
from search_peers import TuneTrial
from search_problems import SPACE

from searchers import (
    ASHA,
    Action,
    Create,
    Event,
    Exited,
    Method,
    Pause,
    Reported,
    Resume,
    Search,
    Started,
    Stop,
    parse_space,
)
from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha_promotion import PromotionASHA
from searchers.named_sampler import named_sampler
from searchers.optuna_space import encode, to_optuna
from searchers.simulate import Curve, simulate

EVENT_US, ASK_MS = 5.0, 5.0
SIMULATION_S = 60.0
TRIALS, WORKERS = 1_000_000, 10_000
CONCURRENT = 64
MAX_LENGTH, NUM_RUNGS, DIVISOR = 256, 5, 4
WINDOW = 20_000
"""Events that are timed at each n."""


def _asha(kind: type[ASHA], trials: int = 10**8, workers: int = CONCURRENT, *, skips: bool = False) -> ASHA:
    return kind(
        max_trials=trials,
        max_length=MAX_LENGTH,
        num_rungs=NUM_RUNGS,
        divisor=DIVISOR,
        max_concurrent_trials=workers,
        skip_uninformative_rungs=skips,
    )


METHODS: dict[str, Callable[[], Method]] = {
    "ASHA, stopping": lambda: _asha(ASHA),
    "ASHA, promotion": lambda: _asha(PromotionASHA),
    "ASHA, promotion, skipping rungs": lambda: _asha(PromotionASHA, skips=True),
    "adaptive ASHA": lambda: AdaptiveASHA(
        max_trials=10**8,
        max_length=MAX_LENGTH,
        divisor=DIVISOR,
        max_concurrent_trials=CONCURRENT,
    ),
}


class Timed:
    """Calls a function for each event, and adds up the time it takes.

    Args:
        on: Takes an event.
    """

    def __init__(self, on: Callable[[Event], list[Action]]) -> None:
        self._on = on
        self.events = self.spent_ns = 0

    def __call__(self, event: Event) -> list[Action]:
        began = time.thread_time_ns()
        actions = self._on(event)
        self.spent_ns += time.thread_time_ns() - began
        self.events += 1
        return actions


def clock_ns() -> float:
    """The cost of the clock itself, to be subtracted."""
    nothing = Timed(lambda event: [])
    event = Started(trial=0)
    for _ in range(WINDOW):
        nothing(event)
    return nothing.spent_ns / nothing.events


class Drive:
    """Runs trials one after another until each is stopped, paused or complete.

    Args:
        first: The search's first actions.
        rungs: Lengths at which trials report.
    """

    def __init__(self, first: list[Action], rungs: tuple[float, ...]) -> None:
        self._rungs = tuple(dict.fromkeys(rungs))
        self._queue: list[int] = []
        self._reached: dict[int, int] = {}
        self._random = Random(0)
        self.created = 0
        self._follow(first)

    def step(self, on: Callable[[Event], list[Action]]) -> None:
        """Run one trial from its start until it is stopped, paused or complete."""
        trial = self._queue.pop()
        self._stopped, self._paused = False, False
        self._trial = trial
        self._follow(on(Started(trial=trial)))
        for rung in range(self._reached.pop(trial, 0), len(self._rungs)):
            self._follow(on(Reported(trial=trial, step=self._rungs[rung], value=self._random.random())))
            if self._stopped:
                break
            if self._paused:
                self._reached[trial] = rung + 1
                return
        self._follow(on(Exited(trial=trial, reason="stopped" if self._stopped else "completed")))

    def _follow(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Create(trial=trial):
                    self.created += 1
                    self._queue.append(trial)
                case Resume(trial=trial):
                    self._queue.append(trial)
                case Stop(trial=trial):
                    assert trial == self._trial
                    self._stopped = True
                case Pause(trial=trial):
                    assert trial == self._trial
                    self._paused = True


def per_event_us(
    first: list[Action], on: Callable[[Event], list[Action]], rungs: tuple[float, ...], sizes: list[int]
) -> dict[int, float]:
    """CPU us per event, once this many trials have been created."""
    drive, found, idle = Drive(first, rungs), {}, clock_ns()
    for size in sizes:
        while drive.created < size:
            drive.step(on)
        windows = []
        for _ in range(5):  # the median of five, since the garbage collector and other processes interfere
            timed = Timed(on)
            while timed.events < WINDOW / 5:
                drive.step(timed)
            windows.append((timed.spent_ns / timed.events - idle) / 1e3)
        found[size] = median(windows)
    return found


def ask_ms(name: str, sizes: list[int]) -> dict[int, float]:
    """CPU ms of a sampler's proposal, after the events of this many trials: the median of 30."""
    found: dict[int, float] = {}
    stream = Stream(name)
    for size in sizes:
        stream.run(size)
        times = []
        for number in range(30):
            began = time.thread_time_ns()
            stream.sampler.ask(size + 1 + number)
            times.append((time.thread_time_ns() - began) / 1e6)
        found[size] = median(times)
    return found


def _timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result of a call, and its CPU time in ms."""
    began = time.thread_time_ns()
    result = call(*args)
    return result, (time.thread_time_ns() - began) / 1e6


class Stream:
    """Trials one after another, with random results.

    Attributes:
        sampler: Learns from them.
        waits: CPU ms of each proposal that was asked for, with the longest event of its trial: a slot becomes free with
            an event, and gets a proposal.
    """

    def __init__(self, name: str, asks_from: int = 10**9) -> None:
        rungs = tuple(dict.fromkeys(METHODS["ASHA, stopping"]().rungs))
        self._space, self._random, self._rungs, self._asks_from = parse_space(SPACE), Random(0), rungs, asks_from
        self.sampler = named_sampler(name, self._space, seed=0, rungs=rungs)
        self.waits: list[float] = []
        self._trials = 0

    def run(self, trials: int) -> None:
        """Run until there are this many trials; they are random, or the sampler's from `asks_from` on."""
        sampler, random, rungs = self.sampler, self._random, self._rungs
        for trial in range(self._trials, trials):
            is_asked = trial >= self._asks_from
            hparams, wait = _timed(sampler.ask, trial) if is_asked else (self._space.sample(random), 0.0)
            # As in ASHA: one in DIVISOR continues at each rung.
            reached = next((n for n in range(1, len(rungs)) if random.random() > 1 / DIVISOR), len(rungs))
            events: list[Event] = [Started(trial=trial)]
            events += [Reported(trial=trial, step=rung, value=random.random()) for rung in rungs[:reached]]
            events.append(Exited(trial=trial, reason="completed" if reached == len(rungs) else "stopped"))
            longest = max(_timed(sampler.tell, event, hparams)[1] for event in events)
            if is_asked:
                self.waits.append(wait + longest)
        self._trials = trials

    def burst_ms(self, trials: int) -> float:
        """Mean CPU ms of the proposals of trials that start at once."""
        began = time.thread_time_ns()
        for trial in range(self._trials, self._trials + trials):
            self.sampler.tell(Started(trial=trial), self.sampler.ask(trial))
        return (time.thread_time_ns() - began) / 1e6 / trials


def streams(paper: Paper, most: int) -> None:
    """What `multi_fidelity` takes from a free slot's time."""
    rows = []
    for behind, asked in ((0, 100), (0, 1000), (10_000, 300), (100_000, 300)):
        if behind > most:
            continue
        stream = Stream("multi_fidelity", asks_from=behind)
        stream.run(behind + asked)
        waits, burst = sorted(stream.waits), stream.burst_ms(100)
        mean, late = sum(waits) / len(waits), waits[int(0.99 * len(waits))]
        rows.append(
            [
                f"{behind:,}",
                f"{asked:,}",
                f"{mean:.2f}",
                f"{late:.2f}",
                f"{waits[-1]:.2f}",
                f"{burst:.2f}",
                f"<= {ASK_MS:g}",
                verdict(max(mean, late, burst) <= ASK_MS),
            ]
        )
        print(*rows[-1], flush=True)
    paper.say("\nMilliseconds of CPU time per proposal of multi_fidelity, six hyperparameters\n")
    paper.table(["trials behind", "in turn", "mean", "99%", "longest", "100 at once", "target", ""], rows)


# ------------------------------------------------------------------------------------------------------------ the peers
def ray_us(size: int) -> float:
    """Ray's ASHA: a first report, with this many trials in the rung."""
    scheduler = AsyncHyperBandScheduler(
        time_attr="step", metric="loss", mode="min", max_t=MAX_LENGTH, grace_period=1, reduction_factor=DIVISOR
    )
    random = Random(0)
    _, recorded = scheduler._brackets[0]._rungs[-1]
    recorded.update((str(trial), -random.random()) for trial in range(size))
    times = []
    for number in range(max(5, 200_000 // size if size < 10**6 else 5)):
        trial = TuneTrial(f"new{number}")
        scheduler.on_trial_add(None, trial)
        began = time.thread_time_ns()
        scheduler.on_trial_result(None, trial, {"step": 1, "loss": random.random()})
        times.append((time.thread_time_ns() - began) / 1e3)
    return median(times[:200])


def optuna_us(size: int) -> float:
    """Optuna's pruner: `should_prune` after a first report, with this many trials in the rung."""
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=DIVISOR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)
    random = Random(0)
    study.add_trials(
        [
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED,
                value=value,
                intermediate_values={1: value},
                system_attrs={"completed_rung_0": value},
            )
            for value in (random.random() for _ in range(size))
        ]
    )
    times = []
    for _ in range(max(5, min(100, 200_000 // size))):
        trial = study.ask()
        trial.report(random.random(), 1)
        began = time.thread_time_ns()
        trial.should_prune()
        times.append((time.thread_time_ns() - began) / 1e3)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return median(times)


def optuna_ask_ms(size: int) -> float:
    """The same for Optuna's TPE, with this many complete trials in the study."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    space, random = parse_space(SPACE), Random(0)
    distributions = to_optuna(space)
    study.add_trials(
        [
            optuna.trial.create_trial(
                value=random.random(),
                params=encode(space.root, space.sample(random), distributions),
                distributions=distributions,
            )
            for _ in range(size)
        ]
    )
    times = []
    for _ in range(5):
        began = time.thread_time_ns()
        trial = study.ask(distributions)
        times.append((time.thread_time_ns() - began) / 1e6)
        study.tell(trial, random.random())
    return median(times)


# -------------------------------------------------------------------------------------------------------------- figures
def measure(paper: Paper, sizes: list[int], *, peers: bool) -> None:
    """CPU us per event, for every method and peer."""
    rows = []

    def row(name: str, found: Mapping[int, float], target: float | None) -> None:
        if not found:  # with --most
            return
        cells = [f"{found[size]:,.2f}" if size in found else "-" for size in sizes]
        reached = ["", ""] if target is None else [f"<= {target:g}", verdict(max(found.values()) <= target)]
        rows.append([name, *cells, *reached])
        print(*rows[-1], flush=True)

    for name, make in METHODS.items():
        method = make()
        row(name, per_event_us(method.start(), method.on, method.rungs, sizes), EVENT_US)
        gc.collect()
    space = parse_space({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}})
    method = METHODS["ASHA, stopping"]()
    search = Search(method, space, seed=0, smaller_is_better=True, log=lambda record: None)
    small = [size for size in sizes if size <= 100_000]
    row("Search with ASHA, random draws", per_event_us(search.start(), search.on, method.rungs, small), None)
    del search
    gc.collect()
    if peers:
        row("Ray's ASHA, a report", {size: ray_us(size) for size in sizes}, None)
        row("Optuna's pruner, a report", {size: optuna_us(size) for size in small}, None)
    head = ["what", *(f"n = {size:,}" for size in sizes), "target", ""]
    paper.say("\nMicroseconds of CPU time per event, after n trials\n")
    paper.table(head, rows)

    rows = []
    row("dray's TPE", ask_ms("tpe", small), ASK_MS)
    if peers:
        row("Optuna's TPE", {size: optuna_ask_ms(size) for size in sizes if size <= 10_000}, None)
    paper.say("\nMilliseconds of CPU time per proposal, six hyperparameters, after n trials\n")
    paper.table(head, rows)


def simulation(paper: Paper, trials: int, workers: int) -> None:
    """A search in virtual time."""
    random = Random(0)

    def trial(hparams: Mapping[str, Any]) -> Curve:
        quality, cost = random.random(), 0.5 + random.random()
        return Curve(lambda step: quality / step, cost)

    rows = []
    for name, kind in (("ASHA, stopping", ASHA), ("ASHA, promotion", PromotionASHA)):
        wall, cpu = time.monotonic(), time.process_time()
        found = simulate(_asha(kind, trials, workers), workers, trial)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        assert found.trials == trials
        rows.append(
            [
                name,
                f"{found.trials:,}",
                f"{found.events:,}",
                f"{found.busy / found.time / workers:.0%}",
                f"{cpu:.1f}",
                f"{wall:.1f}",
                f"<= {SIMULATION_S:g}",
                verdict(wall <= SIMULATION_S),
            ]
        )
        print(*rows[-1], flush=True)
    paper.say(f"\nA search in virtual time on {workers:,} workers\n")
    paper.table(["what", "trials", "events", "workers busy", "CPU s", "wall s", "target", ""], rows)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    parser.add_argument("--most", type=int, default=1_000_000, help="most previous trials (default 1000000)")
    parser.add_argument("--no-peers", action="store_true", help="dray's methods only")
    parser.add_argument("--no-simulation", action="store_true", help="no search in virtual time")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    paper = Paper()
    paper.say(f"{machine()}\nOptuna {optuna.__version__}.")
    measure(paper, [size for size in (10**k for k in range(3, 7)) if size <= options.most], peers=not options.no_peers)
    streams(paper, options.most)
    if not options.no_simulation:
        simulation(paper, min(TRIALS, options.most), min(WORKERS, options.most // 100))
    if options.save:
        paper.save("search_scale", "What a decision costs with many trials behind")


if __name__ == "__main__":
    main()
