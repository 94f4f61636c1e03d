"""The sweep of examples/digits/asha.yaml, by dray and by Ray alone: wall time from the start of a process to its end.

Each run has a process and a Ray of its own; the variants take turns, ``--rounds`` times:

  a        asha.yaml through dray
  b        as Ray documents it: a TorchTrainer in each trial of Tune's ASHA, two at a time; a few trials, scaled
  c        the trial as a class trainable of Tune (reuse_actors, no process groups), with Tune's ASHA
  c-same   the same, every trial exactly as long as the same trial of (a), so that both train the same
  c-bare   c-same without saving: (a) and Tune's defaults save each trial's state at its end

All train the same model on the same data from the same hyperparameters and seeds. A later trial is the time from the
first batch of the first trial to the end of the process, by the number of trials.

    python bench/sweep.py [--rounds 3] [--trials 64] [--documented-trials 8] [--ways a c-same] [--save]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from _measure import (
    BENCH,
    DIGITS,
    Paper,
    Ran,
    Stamp,
    arguments,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    quantile,
    run,
    spread,
    stamp,
    stamp_counts,
    verdict,
)

WAYS = ("a", "b", "c", "c-same", "c-bare")
TIMES_FASTER = 20.0
TIMES_SLOWER = 1.2
START_UP_S = 12.0
TURNAROUND_S = 0.1

PHASES = (
    ("Python, the config, torch", "checked"),
    ("ray.init(), and meanwhile the imports of Train, Tune, pandas", "connected"),
    ("first group: a worker process that runs", "WorkerArrived"),
    ("first group: imports of torch and of the trial's class", "trial_class_loaded"),
    ("first group at the desk", "GroupReady"),
    ("first lease: granted", "LeaseGranted"),
    ("first batch: hyperparameters, model, data", "first_batch"),
)
"""The phases of (a)'s start-up: each ends with the first stamp of its kind after the previous phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run."""

    way: str
    trials: int
    ran: Ran

    @property
    def first_batch(self) -> float:
        return of_kind(self.ran.stamps, "first_batch")[0].time

    @property
    def start_up_s(self) -> float:
        return self.first_batch - self.ran.began

    @property
    def later_trial_s(self) -> float:
        return (self.ran.ended - self.first_batch) / self.trials

    @property
    def lengths(self) -> Counter[int]:
        """Epochs of each trial."""
        return Counter(s.fields["trial"] for s in of_kind(self.ran.stamps, "validated"))

    @property
    def epochs(self) -> int:
        return self.lengths.total()

    @property
    def after_s(self) -> float:
        """From the last report to the end of the process."""
        return self.ran.ended - of_kind(self.ran.stamps, "validated")[-1].time

    @property
    def best(self) -> float:
        return min(s.fields["loss"] for s in of_kind(self.ran.stamps, "validated"))

    def scaled(self, trials: int) -> float:
        """Seconds for this many trials."""
        return self.start_up_s + self.later_trial_s * trials


# --------------------------------------------------------------------------------------------------- in its own process
def child(way: str, directory: Path, plan: dict[str, Any]) -> None:
    """Run one of the variants, in its process."""
    end_on_sigterm()
    if way == "a":
        _dray(directory, plan)
    elif way == "b":
        from _plain_ray import documented

        documented(plan["trials"], plan["max_epochs"])
    else:
        from _plain_ray import class_trainable

        class_trainable(
            plan["trials"], plan["max_epochs"], lengths_given=way in ("c-same", "c-bare"), saves=way != "c-bare"
        )


def _dray(directory: Path, plan: dict[str, Any]) -> None:
    import dray

    experiment = dray.Experiment(plan["config"], model_dir=BENCH / "model", path=directory / "experiment")
    stamp("checked")
    # dray starts Ray while it imports Ray's modules.
    import ray

    init = ray.init

    def timed_init(*args: Any, **options: Any) -> Any:
        context = init(*args, **options)
        stamp("connected")
        return context

    ray.init = timed_init
    experiment.run(on_message=lambda message: (kind := type(message).__name__) != "ReportReceived" and stamp(kind))
    stamp_counts(experiment)


# ------------------------------------------------------------------------------------------------------------- the plan
def plan_of(trials: int, seed: int | None = None) -> dict[str, Any]:
    """asha.yaml with this many trials, and the hyperparameters and seeds that its search gives them.

    Args:
        seed: its experiment_seed; None for the one in the file.
    """
    import yaml

    from dray.config.load import load_config
    from dray.config.search import build_method
    from searchers import Search

    config = yaml.safe_load((DIGITS / "asha.yaml").read_text())
    config["entrypoint"] = "timed:TimedDigits"
    config["searcher"]["max_trials"] = trials
    if seed is not None:
        config["reproducibility"]["experiment_seed"] = seed
    checked = load_config(config)
    space, seed = checked.space, checked.reproducibility.experiment_seed
    search = Search(build_method(checked), space, seed=seed, smaller_is_better=True, log=lambda record: None)
    assert checked.searcher.max_length.unit == "epochs", "this benchmark counts in epochs"
    return {
        "config": config,
        "max_epochs": checked.searcher.max_length.value,
        "trials": [
            {"trial": trial, "seed": search.seed_of(trial), "hparams": space.sample(Random(f"{seed}:{trial}"))}
            for trial in range(trials)
        ],
    }


def turnarounds(stamps: Sequence[Stamp]) -> list[float]:
    """From the last report of a trial to the first batch of the next in the same process."""
    last: dict[int, float] = {}
    gaps = []
    for s in of_kind(stamps, "first_batch", "validated"):
        if s.kind == "validated":
            last[s.pid] = s.time
        elif s.pid in last:
            gaps.append(s.time - last.pop(s.pid))
    return gaps


# --------------------------------------------------------------------------------------------------------------- output
def phases(figures: Figures) -> list[float]:
    """Seconds of each of `PHASES`."""
    at, found = figures.ran.began, []
    driver = of_kind(figures.ran.stamps, "checked")[0].pid
    for _, kind in PHASES:
        # The driver loads the trial's class too, before it starts anything.
        later = (s.time for s in of_kind(figures.ran.stamps, kind) if kind != "trial_class_loaded" or s.pid != driver)
        end = next(later)
        found.append(end - at)
        at = end
    return found


def report(paper: Paper, figures: dict[str, list[Figures]], trials: int) -> None:
    """Print the tables."""
    paper.say("\nSeconds; median (min - max) over the rounds\n")
    rows = []
    for way, runs in figures.items():
        rows.append(
            [
                way,
                str(runs[0].trials),
                spread([f.ran.wall_s for f in runs]),
                spread([f.scaled(trials) for f in runs]) if runs[0].trials != trials else "",
                spread([f.start_up_s for f in runs]),
                spread([f.later_trial_s for f in runs], digits=3),
                spread([f.epochs / f.trials for f in runs]),
                spread([f.later_trial_s * f.trials / f.epochs for f in runs], digits=3),
                spread([f.after_s for f in runs]),
                spread([f.best for f in runs], digits=3),
            ]
        )
    head = ["way", "trials", "total", f"scaled to {trials}", "start-up", "a later trial", "epochs a trial",
            "by trained epoch", "last report to end", "best loss"]  # fmt: skip
    paper.table(head, rows)
    if "a" not in figures:
        return
    ours = figures["a"]
    paper.say("\nRatios, round by round; targets by the median\n")
    ratios: list[list[str]] = []

    def ratio(name: str, values: list[float], target: str, reached: bool | None) -> None:
        ratios.append([name, spread(values, "x"), target, "" if reached is None else verdict(reached)])

    def against(way: str) -> list[tuple[Figures, Figures]]:
        return list(zip(ours, figures.get(way, []), strict=False))

    if pairs := against("b"):
        values = [b.scaled(trials) / a.scaled(trials) for a, b in pairs]
        name = f"{trials} trials: (b) / (a), total; against Ray's documented way only"
        ratio(name, values, f">= {TIMES_FASTER:g}x", quantile(values, 0.5) >= TIMES_FASTER)
    if pairs := against("c-same"):
        values = [a.later_trial_s / c.later_trial_s for a, c in pairs]
        name = "a later trial: (a) / (c-same), trials of the same lengths"
        ratio(name, values, f"<= {TIMES_SLOWER:g}x", quantile(values, 0.5) <= TIMES_SLOWER)
    if pairs := against("c-bare"):
        values = [a.later_trial_s / c.later_trial_s for a, c in pairs]
        ratio("a later trial: (a) / (c-bare), the same lengths, (c) saves nothing", values, "", None)
    if pairs := against("c"):
        values = [a.later_trial_s / c.later_trial_s for a, c in pairs]
        ratio("a later trial: (a) / (c), each with its own ASHA", values, "", None)
        values = [a.later_trial_s * a.trials / a.epochs / (c.later_trial_s * c.trials / c.epochs) for a, c in pairs]
        ratio("by trained epoch: (a) / (c), each with its own ASHA", values, "", None)
        values = [a.scaled(trials) / c.scaled(trials) for a, c in pairs]
        ratio(f"{trials} trials: (a) / (c), total", values, "", None)
    paper.table(["what", "ratio", "target", ""], ratios)

    paper.say("\n(a) alone\n")
    start_up = [f.start_up_s for f in ours]
    gaps = [gap for f in ours for gap in turnarounds(f.ran.stamps)]
    paper.table(
        ["what", "seconds", "target", ""],
        [
            ["start-up: process start to first batch", spread(start_up), f"<= {START_UP_S:g}",
             verdict(quantile(start_up, 0.5) <= START_UP_S)],
            *([f"  {name}", spread(list(values)), "", ""]
              for (name, _), values in zip(PHASES, zip(*map(phases, ours), strict=True), strict=True)),
            [f"last report to the next trial's first batch, median of {len(gaps)}", f"{quantile(gaps, 0.5):.3f}",
             f"<= {TURNAROUND_S:g}", verdict(quantile(gaps, 0.5) <= TURNAROUND_S)],
            ["  90th percentile", f"{quantile(gaps, 0.9):.3f}", "", ""],
        ],
    )  # fmt: skip
    for f in ours:
        counts = of_kind(f.ran.stamps, "counts")[0].fields
        lengths = Counter(f.lengths.values())
        trained = ", ".join(f"{number} trials of {length} epochs" for length, number in sorted(lengths.items()))
        paper.say(
            f"\n{counts['handles']} handles, {counts['groups']} groups started, {counts['lost']} groups lost, "
            f"{counts['restarts']} trials restarted; {trained}"
        )


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all variants in turn, and print the results."""
    plan = plan_of(options.trials)
    paper.say(machine())
    figures: dict[str, list[Figures]] = {way: [] for way in options.ways}
    for number in range(1, options.rounds + 1):
        lengths: Counter[int] = Counter()
        for way in options.ways:
            trials = plan["trials"]
            if way == "b":
                trials = trials[: options.documented_trials]
            elif way in ("c-same", "c-bare"):
                trials = [{**trial, "length": lengths[trial["trial"]]} for trial in trials]
            where = directory / f"{number}-{way}"
            (given := directory / f"{number}-{way}.json").write_text(json.dumps({**plan, "trials": trials}))
            ran = run(__file__, ["--child", way, str(where), str(given)], where)
            found = Figures(way=way, trials=len(trials), ran=ran)
            if way == "a":
                lengths = found.lengths
            figures[way].append(found)
            print(
                f"round {number}, {way}: {found.ran.wall_s:.1f} s, {found.start_up_s:.1f} of it to the first batch; "
                f"{found.trials} trials, {found.epochs} epochs",
                flush=True,
            )
    report(paper, figures, options.trials)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        way, directory, plan = sys.argv[2:]
        return child(way, Path(directory), json.loads(Path(plan).read_text()))
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=64, help="trials per search (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run (default 3)")
    parser.add_argument("--documented-trials", type=int, default=8, help="trials of way b (default 8)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways (default: all)")
    options = parser.parse_args()
    if {"c-same", "c-bare"} & set(options.ways) and "a" not in options.ways:
        parser.error("c-same and c-bare take their lengths from a: name it too")
    options.ways = [way for way in WAYS if way in options.ways]
    perform(measure, options, name="sweep", title="One sweep: dray, and Ray's own ways")


if __name__ == "__main__":
    main()
