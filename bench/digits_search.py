"""How fast a search of the digits trial gets nearly as good as 256 full trainings, in trained epochs and in seconds.

Nearly as good means an accuracy on the held-out digits within half a point of the best that random search found at any
epoch of its 256 full trainings. There is one validation per trained epoch; they count in the order in which they ended.

About one validation in 270 is that good, by luck, so a single search says nothing. The searches are replayed for many
seeds, on two workers in virtual time (`searchers.simulate`), over recorded learning curves: every trial that a search
asks for is really trained, once, by dray's Trainer in this process. A trial's curve depends only on its hyperparameters
and its seed, so all variants get the same trials, with the same curves, in the same order, except those with TPE, which
choose their own. Each seed's trials also come in 30 other orders (``--orders``). With ``--real 2`` the first two seeds
are also run on Ray.

  random, asha, promotion, asha-tpe   by dray: asha.yaml with 256 trials, and the method in the name
  ray-asha                            Tune's ASHA: the scheduler itself, called as Tune calls it;
                                      on Ray, with a class trainable (reuse_actors)

    python bench/digits_search.py [--seeds 12] [--first-seed 7] [--orders 30] [--real 0] [--ways ...]
                                   [--keep DIR] [--save]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from _measure import BENCH, DIGITS, Paper, Ran, arguments, end_on_sigterm, machine, of_kind, perform, quantile, run
from sweep import plan_of

WAYS: dict[str, dict[str, Any]] = {
    "random": {"name": "random"},
    "asha": {},
    "promotion": {"variant": "promotion"},
    "asha-tpe": {"sampler": "tpe"},
    "ray-asha": {},
}
"""Changes in the ``searcher`` section of asha.yaml."""

NEARLY = 0.005
WORKERS = 2
MAX_EPOCHS = 16  # as asha.yaml says

Curve = list[tuple[float, float]]
"""Validation loss and accuracy after each epoch."""
Found = dict[int, dict[str, list[list[float]]]]
"""By seed and variant: for each search, the accuracies after each trained epoch, in order of time."""


# --------------------------------------------------------------------------------------------------- in its own process
def child(way: str, directory: Path, plan: dict[str, Any]) -> None:
    """Run one of the variants, on Ray."""
    end_on_sigterm()
    if way == "ray-asha":
        from _plain_ray import class_trainable

        class_trainable(plan["trials"], MAX_EPOCHS, lengths_given=False, saves=True)
        return
    import dray

    dray.Experiment(config_of(way, plan), model_dir=BENCH / "model", path=directory / "experiment").run()


def config_of(way: str, plan: dict[str, Any]) -> dict[str, Any]:
    """The experiment of this variant."""
    searcher = plan["config"]["searcher"] | WAYS[way]
    if way == "random":
        for field in ("divisor", "num_rungs"):
            del searcher[field]
    config: dict[str, Any] = plan["config"] | {"searcher": searcher}
    return config


# ------------------------------------------------------------------------------------------------------------- recorded
def train(task: tuple[dict[str, Any], int, int]) -> Curve:
    """Train the digits trial as an experiment does.

    Args:
        task: its hyperparameters, its seed, and how many epochs.
    """
    import torch
    from model_def import DigitsTrial

    from dray import pytorch
    from dray.hosts import LocalHost, use_host

    hparams, seed, epochs = task
    curve: Curve = []

    class Recorder(pytorch.PyTorchCallback):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            curve.append((float(metrics["validation_loss"]), float(metrics["accuracy"])))

    class RecordedDigits(DigitsTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"recorder": Recorder()}

    torch.set_num_threads(1)  # as on Ray
    with (
        tempfile.TemporaryDirectory() as unkept,
        LocalHost(Path(unkept), trial_seed=seed, code_dir=DIGITS) as host,
        use_host(host),
        pytorch.init(hparams=dict(hparams), enable_tensorboard_logging=False) as context,
    ):
        pytorch.Trainer(RecordedDigits(context), context).fit(
            max_length=pytorch.Epoch(epochs), validation_period=pytorch.Epoch(1), checkpoint_policy="none"
        )
    return curve


class Curves:
    """Learning curves of trials, each trained once, on first use.

    Args:
        file: of recorded curves; read first, if it exists.
        lengths: ascending; to answer for one epoch, a trial is trained to the next of these.
    """

    def __init__(self, file: Path, lengths: Sequence[int]) -> None:
        self._file, self._lengths = file, lengths
        self._known: dict[str, Curve] = {}
        if file.exists():
            self._known = dict(json.loads(line) for line in file.read_text().splitlines())

    def record(self, trials: Sequence[dict[str, Any]]) -> None:
        """Train these trials in full, on all cores."""
        tasks = [(trial["hparams"], trial["seed"], self._lengths[-1]) for trial in trials]
        tasks = [task for task in tasks if len(self._known.get(_key(*task[:2]), [])) < task[2]]
        if tasks:
            with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
                for task, curve in zip(tasks, pool.imap(train, tasks), strict=True):
                    self._note(_key(*task[:2]), curve)

    def of(self, hparams: dict[str, Any], seed: int) -> Curve:
        """The whole curve."""
        self.at(hparams, seed, self._lengths[-1])
        return self._known[_key(hparams, seed)]

    def at(self, hparams: dict[str, Any], seed: int, epoch: int) -> tuple[float, float]:
        """Validation loss and accuracy after this many epochs."""
        key = _key(hparams, seed)
        if len(self._known.get(key, [])) < epoch:
            # Training is deterministic: a longer curve begins with the shorter one.
            self._note(key, train((hparams, seed, next(length for length in self._lengths if length >= epoch))))
        return self._known[key][epoch - 1]

    def _note(self, key: str, curve: Curve) -> None:
        self._known[key] = curve
        with self._file.open("a") as file:
            file.write(json.dumps([key, curve]) + "\n")


def _key(hparams: dict[str, Any], seed: int) -> str:
    return json.dumps([hparams, seed], sort_keys=True)


def replay(way: str, plan: dict[str, Any], curves: Curves, orders: int) -> list[list[float]]:
    """Simulate searches of this variant.

    Args:
        orders: further searches, with the same trials in another order; none if the search chooses its own trials.

    Returns:
        For each search, the accuracies after each trained epoch, in order of time.
    """
    from dray.config.load import load_config
    from dray.config.search import build_method, build_search

    trials = plan["trials"]
    config = load_config(config_of(way, plan))
    search = build_search(config, lambda record: None)
    if "sampler" in WAYS[way]:

        def number(hparams: Any) -> int:
            return next(view.id for view in search.trials.values() if view.hparams is hparams)

        def chosen(trial: int, epoch: int) -> tuple[float, float]:
            return curves.at(search.params(trial), search.seed_of(trial), epoch)

        return [play(search, number, chosen)]
    found = []
    for order in range(1 + orders):
        shuffled = Random(f"{search.seed}:{order}").sample(trials, len(trials))
        given = [curves.of(trial["hparams"], trial["seed"]) for trial in (shuffled if order else trials)]
        method = tunes_asha(len(trials), MAX_EPOCHS) if way == "ray-asha" else build_method(config)
        found.append(play(method, lambda bare: int(bare["trial"]), lambda trial, epoch, of=given: of[trial][epoch - 1]))
    return found


def play(
    search: Any, number: Callable[[Mapping[str, Any]], int], at: Callable[[int, int], tuple[float, float]]
) -> list[float]:
    """Simulate one search, or method, whose trials validate after each epoch.

    Args:
        number: the number of the trial with these hyperparameters.
        at: loss and accuracy of a trial after a number of epochs.
    """
    from searchers import Event, Reported
    from searchers.simulate import Curve as Simulated
    from searchers.simulate import simulate

    accuracies: list[float] = []

    def begin(hparams: Mapping[str, Any]) -> Simulated:
        trial = number(hparams)
        return Simulated(lambda epoch: at(trial, int(epoch))[0])

    def watch(time: float, event: Event, actions: object) -> None:
        if isinstance(event, Reported):
            accuracies.append(at(event.trial, int(event.step))[1])

    simulate(search, WORKERS, begin, reports=range(1, MAX_EPOCHS + 1), watch=watch)
    return accuracies


def tunes_asha(max_trials: int, max_epochs: int) -> Any:
    """A method that asks Ray Tune's scheduler about each report, as Tune does."""
    from types import SimpleNamespace

    from _plain_ray import asha

    from searchers import Action, Event, RandomSearch, Reported, Stop

    scheduler = asha(max_epochs)
    scheduler.set_search_properties("validation_loss", "min")

    class TunesASHA(RandomSearch):
        def on(self, event: Event) -> list[Action]:
            if not isinstance(event, Reported):
                return super().on(event)
            trial = SimpleNamespace(trial_id=event.trial)
            if event.step == 1:
                scheduler.on_trial_add(None, trial)
            result = {"training_iteration": event.step, "validation_loss": event.value}
            decision = scheduler.on_trial_result(None, trial, result)
            # In Tune, its STOP at max_t ends a trial; here, trials end by themselves.
            return [Stop(trial=event.trial)] if decision == scheduler.STOP and event.step < max_epochs else []

    return TunesASHA(max_trials=max_trials, max_concurrent_trials=WORKERS)


# -------------------------------------------------------------------------------------------------------------- figures
def validations(ran: Ran) -> list[tuple[float, float]]:
    """Accuracy, and seconds from the process's start, of each epoch trained, in the order in which they ended."""
    return [(stamp.fields["accuracy"], stamp.time - ran.began) for stamp in of_kind(ran.stamps, "validated")]


def wanted(searches: Mapping[str, Sequence[Sequence[float]]]) -> float:
    """The accuracy to reach, for the searches of one seed."""
    return max(searches["random"][0]) - NEARLY


def reached(accuracies: Sequence[float], aim: float) -> int | None:
    """Epochs trained until a validation was that good; None if none was.

    >>> reached([0.5, 0.75, 0.5], 0.75), reached([0.5], 0.75)
    (2, None)
    """
    return next((epochs for epochs, accuracy in enumerate(accuracies, start=1) if accuracy >= aim), None)


def ratio(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """The geometric mean of the ratios, paired by seed, with its 95% bootstrap interval over the seeds.

    >>> ratio([[2], [8]], [[1, 1], [2, 8]])
    '2.00 (2.00 .. 2.00)'
    """
    logs = np.asarray([np.log(a).mean() - np.log(b).mean() for a, b in zip(ours, theirs, strict=True)])
    means = logs[np.random.default_rng(0).integers(0, len(logs), (10_000, len(logs)))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return f"{math.exp(logs.mean()):.2f} ({low:.2f} .. {high:.2f})"


def report(paper: Paper, found: Found) -> None:
    """Print the table of the replayed searches."""
    ways = list(next(iter(found.values())))
    ends = {way: [[reached(run, wanted(of)) for run in of[way]] for of in found.values()] for way in ways}
    # A search that never gets there counts as if it had trained as much as random search.
    most = max(len(run) for of in found.values() for run in of["random"])
    until = {way: [[end or most for end in of] for of in ends[way]] for way in ways}
    rows = []
    for way in ways:
        runs = [run for of in found.values() for run in of[way]]
        there = [end is not None for of in ends[way] for end in of]
        rows.append(
            [
                way,
                f"{sum(there)} of {len(there)}",
                f"{quantile([float(each) for of in until[way] for each in of], 0.5):.0f}",
                *(
                    ratio(until[way], until[other]) if other in ways and other != way else "-"
                    for other in ("random", "ray-asha")
                ),
                f"{quantile([float(len(run)) for run in runs], 0.5):.0f}",
                f"{quantile([max(run) for run in runs], 0.5):.4f}",
            ]
        )
    paper.say(
        f"\nReplayed over recorded curves: seeds {', '.join(map(str, found))}. Medians; ratios are geometric means,"
    )
    paper.say("paired by seed, with 95% bootstrap intervals over the seeds.\n")
    head = ["way", "within half a point", "epochs until then", "of random's", "of ray-asha's"]
    paper.table([*head, "epochs trained", "best accuracy"], rows)


def report_real(paper: Paper, found: Found, real: dict[tuple[int, str], Ran]) -> None:
    """Print the results of the searches on Ray beside those of the replayed ones."""
    rows = []
    for (seed, way), ran in real.items():
        found_there = validations(ran)
        end = reached([accuracy for accuracy, _ in found_there], wanted(found[seed]))
        replayed = found[seed][way][0]
        rows.append(
            [
                str(seed),
                way,
                f"{max(found_there)[0]:.4f}",
                f"{len(found_there)} ({len(replayed)})",
                f"{end or '-'} ({reached(replayed, wanted(found[seed])) or '-'})",
                f"{found_there[end - 1][1]:.1f}" if end else "-",
                f"{ran.wall_s:.1f}",
            ]
        )
    paper.say("\nRun on Ray, each in a process and a Ray of its own (in parentheses: replayed)\n")
    head = ["seed", "way", "best accuracy", "epochs trained", "epochs until then", "s until then", "s in all"]
    paper.table(head, rows)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """All ways for each seed."""
    paper.say(machine())
    found: Found = {}
    real: dict[tuple[int, str], Ran] = {}
    sys.path.append(str(DIGITS))
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        plan = plan_of(options.trials, seed)
        curves = Curves(directory / "curves.jsonl", lengths=(1, 4, MAX_EPOCHS))
        curves.record(plan["trials"])
        found[seed] = {way: replay(way, plan, curves, options.orders) for way in options.ways}
        print(f"seed {seed}, epochs until {wanted(found[seed]):.4f}: ", end="")
        print(
            ", ".join(f"{way} {reached(runs[0], wanted(found[seed]))}" for way, runs in found[seed].items()), flush=True
        )
        if seed < options.first_seed + options.real:
            (given := directory / f"{seed}.json").write_text(json.dumps(plan))
            for way in options.ways:
                where = directory / f"{seed}-{way}"
                real[seed, way] = run(__file__, ["--child", way, str(where), str(given)], where)
    report(paper, found)
    if real:
        report_real(paper, found, real)


def main(words: Sequence[str] = sys.argv[1:]) -> None:
    """Read the command line and measure."""
    if words[:1] == ["--child"]:
        way, directory, plan = words[1:]
        return child(way, Path(directory), json.loads(Path(plan).read_text()))
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=256, help="trials per search (default 256)")
    parser.add_argument("--seeds", type=int, default=12, help="searches per variant (default 12)")
    parser.add_argument("--first-seed", type=int, default=7, help="the first one's experiment_seed (default 7)")
    parser.add_argument("--orders", type=int, default=30, help="further orders of each seed's trials (default 30)")
    parser.add_argument("--real", type=int, default=0, help="number of seeds that also run on Ray (default 0)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS)[1:], default=list(WAYS)[1:], help="besides random")
    options = parser.parse_args(words)
    options.ways = ["random", *options.ways]
    perform(
        measure,
        options,
        name="digits_search",
        title="A search of the digits trial, until it is nearly as good as 256 full trainings",
    )


if __name__ == "__main__":
    main()
