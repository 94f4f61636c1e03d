"""Real searches on Ray for a character GPT: dray's default, the one that docs/search.md recommends, and Ray's own
search.

Each search has a process and a Ray with two CPUs of its own, and runs for ``--seconds``; the variants take turns, once
for each seed. All train examples/gpt by dray's Trainer, from the same space, with rungs at 16, 64 and 256 batches, and
validate every 16 batches.

  default     `name: asha`: trials are stopped, proposals are random
  recommended the same with `variant: promotion` and `sampler: multi_fidelity`
  ray         Tune's ASHAScheduler and OptunaSearch; a function trainable, with actors that are reused

The result of a search is the smallest validation loss of any trial. Its cost is the number of batches that all trials
have trained until then, which does not depend on the load of the machine, and the seconds since the process began.

    python bench/gpt_sweep.py [--seeds 3] [--seconds 300] [--ways default ray] [--save]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import BENCH, Paper, Ran, arguments, end_on_sigterm, machine, of_kind, perform, run, spread, stamp

GPT = BENCH.parent / "examples" / "gpt"
EVERY, MAX_LENGTH, NUM_RUNGS, DIVISOR = 16, 256, 3, 4
MAX_TRIALS = 10_000  # more than there is time for

SEARCHERS: dict[str, dict[str, Any]] = {
    "default": {},
    "recommended": {"variant": "promotion", "sampler": "multi_fidelity"},
}
WAYS = (*SEARCHERS, "ray")

CONSTANTS = {"global_batch_size": 16, "aggregation_frequency": 1, "block": 32}
SPACE: dict[str, dict[str, Any]] = {
    "lr": {"type": "log", "base": 10, "minval": -4.5, "maxval": -1},
    "layers": {"type": "int", "minval": 1, "maxval": 3},
    "width": {"type": "categorical", "vals": [16, 32, 48, 64]},
    "heads": {"type": "categorical", "vals": [1, 2, 4, 8]},
    "dropout": {"type": "double", "minval": 0.0, "maxval": 0.4},
    "warm_up_steps": {"type": "int", "minval": 1, "maxval": 100},
}


# --------------------------------------------------------------------------------------------------- in its own process
def by_dray(way: str, directory: Path, seed: int, seconds: float) -> None:
    """Search until the time is over."""
    import dray

    config = {
        "name": way,
        "entrypoint": "model_def:GPTTrial",
        "hyperparameters": {**CONSTANTS, **SPACE},
        "searcher": {
            "name": "asha",
            "metric": "validation_loss",
            "max_length": {"batches": MAX_LENGTH},
            "max_trials": MAX_TRIALS,
            "divisor": DIVISOR,
            "num_rungs": NUM_RUNGS,
            "max_concurrent_trials": 2,
            **SEARCHERS[way],
        },
        "min_validation_period": {"batches": EVERY},
        "resources": {"slots_per_trial": 1, "slot": "cpu"},
        "reproducibility": {"experiment_seed": seed},
    }
    path = directory / "experiment"
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        dray.Experiment(config, model_dir=GPT, path=path).run()
    except KeyboardInterrupt:
        metrics = dray.Result(path).metrics
        losses = metrics[metrics["name"] == "validation_loss"]
        for row in losses.itertuples():
            stamp("validated", at=row.time, trial=row.trial_id, batches=row.batches, loss=row.value)


def by_ray(directory: Path, seed: int, seconds: float) -> None:
    """Search until the time is over."""
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    space = {
        "lr": tune.loguniform(10 ** SPACE["lr"]["minval"], 10 ** SPACE["lr"]["maxval"]),
        "layers": tune.randint(1, 4),
        "width": tune.choice(SPACE["width"]["vals"]),
        "heads": tune.choice(SPACE["heads"]["vals"]),
        "dropout": tune.uniform(0.0, 0.4),
        "warm_up_steps": tune.randint(1, 101),
    }
    tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={**CONSTANTS, **space},
        tune_config=tune.TuneConfig(
            metric="validation_loss",
            mode="min",
            num_samples=-1,
            time_budget_s=seconds,
            search_alg=OptunaSearch(seed=seed),
            scheduler=ASHAScheduler(
                time_attr="batches", grace_period=EVERY, reduction_factor=DIVISOR, max_t=MAX_LENGTH
            ),
            max_concurrent_trials=2,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="tune", storage_path=str(directory / "tune"), verbose=0),
    ).fit()
    ray.shutdown()


def train(config: dict[str, Any]) -> None:
    """A function trainable of Tune: examples/gpt by dray's Trainer, without checkpoints."""
    import torch
    from ray import tune

    sys.path.insert(0, str(GPT))
    from model_def import GPTTrial

    from dray import pytorch
    from dray.hosts import LocalHost, use_host

    batches = 0

    class Reports(pytorch.PyTorchCallback):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            nonlocal batches
            batches += EVERY
            loss = float(metrics["validation_loss"])
            stamp("validated", trial=tune.get_context().get_trial_id(), batches=batches, loss=loss)
            tune.report({"validation_loss": loss, "batches": batches})

    class Reporting(GPTTrial):  # type: ignore[misc]
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"reports": Reports()}

    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as unkept,
        LocalHost(Path(unkept), trial_seed=0, code_dir=GPT) as host,
        use_host(host),
        pytorch.init(hparams=config, max_length=pytorch.Batch(MAX_LENGTH), enable_tensorboard_logging=False) as context,
    ):
        pytorch.Trainer(Reporting(context), context).fit(
            max_length=pytorch.Batch(MAX_LENGTH),
            validation_period=pytorch.Batch(EVERY),
            checkpoint_policy="none",
        )


# -------------------------------------------------------------------------------------------------------------- figures
@dataclass(frozen=True, slots=True)
class Point:
    """The state of a search after a validation: batches trained in all, seconds, the best loss so far."""

    batches: int
    seconds: float
    best: float


def course(ran: Ran) -> list[Point]:
    """The course of a search."""
    reports = [(s.fields.get("at", s.time), s.fields) for s in of_kind(ran.stamps, "validated")]
    points, trained, best = list[Point](), dict[Any, int](), float("inf")
    for time, fields in sorted(reports, key=lambda each: each[0]):
        if fields["loss"] == fields["loss"]:
            best = min(best, fields["loss"])
        trained[fields["trial"]] = max(trained.get(fields["trial"], 0), int(fields["batches"]))
        points.append(Point(sum(trained.values()), time - ran.began, best))
    return points


def first(points: Sequence[Point], loss: float) -> Point | None:
    """The point at which a search first reached this loss."""
    return next((point for point in points if point.best <= loss), None)


def report(paper: Paper, searches: dict[str, list[list[Point]]]) -> None:
    """Print the tables: the cost at which each variant reaches the best loss of the others, seed by seed."""
    ends = {way: [points[-1] for points in each] for way, each in searches.items()}
    rows = [
        [way, spread([p.best for p in last], digits=3), spread([p.batches for p in last], digits=0),
         spread([p.seconds for p in last], "s", 0)]
        for way, last in ends.items()
    ]  # fmt: skip
    paper.say("\nMedian (min - max) over the seeds\n")
    paper.table(["way", "best loss", "batches trained", "last report after"], rows)
    # With equal batches: the best of each variant when the one that trained least ended.
    least = [min(last[seed].batches for last in ends.values()) for seed in range(len(next(iter(ends.values()))))]
    paper.say("\nThe best loss after as many batches as the shortest search of each seed has trained\n")
    paper.table(
        ["way", *(f"{batches} batches" for batches in least)],
        [
            [
                way,
                *(
                    f"{[p for p in points if p.batches <= most][-1].best:.3f}"
                    for points, most in zip(each, least, strict=True)
                ),
            ]
            for way, each in searches.items()
        ],
    )
    paper.say("\nBatches, and seconds, until the final best loss of another way, for each seed; -: never\n")
    cells = []
    for way, each in searches.items():
        for other, last in ends.items():
            if other != way:
                met = [first(points, end.best) for points, end in zip(each, last, strict=True)]
                shares = [
                    "-" if m is None else f"{m.batches} of {end.batches} ({m.seconds:.0f} of {end.seconds:.0f} s)"
                    for m, end in zip(met, last, strict=True)
                ]
                cells.append([way, other, *shares])
    paper.table(["way", "as good as", *(f"seed {seed}" for seed in range(len(least)))], cells)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all searches, and print the results."""
    paper.say(machine())
    paper.say(f"{options.seconds:g} s for each search.")
    searches: dict[str, list[list[Point]]] = {way: [] for way in options.ways}
    for seed in range(options.seeds):
        for way in options.ways:
            where = directory / f"{seed}-{way}"
            ran = run(__file__, ["--child", way, str(where), str(seed), str(options.seconds)], where)
            searches[way].append(course(ran))
            last = searches[way][-1][-1]
            print(f"seed {seed}, {way}: {last.best:.3f} after {last.batches} batches, {last.seconds:.0f} s", flush=True)
    report(paper, searches)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        way, directory, seed, seconds = sys.argv[2:]
        end_on_sigterm()
        if way == "ray":
            return by_ray(Path(directory), int(seed), float(seconds))
        return by_dray(way, Path(directory), int(seed), float(seconds))
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="per search, at most 480 (default 300)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    perform(measure, parser.parse_args(), name="gpt_sweep", title="Real searches for a GPT")


if __name__ == "__main__":
    main()
