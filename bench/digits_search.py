"""How soon a search of the digits trial is nearly as good as 256 full trainings: in trained epochs, and in seconds.

Each way has a process, and a Ray, of its own; all train the same trial, and start from the same hyperparameters:

  random     256 trials, each to its end (16 epochs), by dray
  asha       asha.yaml with 256 trials, by dray
  asha-tpe   the same with `sampler: tpe`
  ray-asha   the trial as a class trainable of Tune (reuse_actors), with Tune's ASHA

Nearly as good: an accuracy on the held-out digits within half a point of the best that `random` found at any epoch.
Each validation is an epoch trained; they count in the order in which they ended.

    python bench/digits_search.py [--seeds 1] [--first-seed 7] [--trials 256] [--ways asha ray-asha] [--save]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import Paper, Ran, arguments, end_on_sigterm, machine, of_kind, run, spread
from sweep import BENCH, plan_of

WAYS = ("random", "asha", "asha-tpe", "ray-asha")
NEARLY = 0.005


def child(way: str, directory: Path, plan: dict[str, Any]) -> None:
    """Be one of the ways."""
    end_on_sigterm()
    if way == "ray-asha":
        from _plain_ray import class_trainable

        class_trainable(plan["trials"], plan["max_epochs"], lengths_given=False, saves=True)
        return
    import dray

    config = plan["config"]
    if way == "random":
        config["searcher"] = {key: config["searcher"][key] for key in ("metric", "max_length", "max_trials")}
        config["searcher"] |= {"name": "random", "smaller_is_better": True}
    elif way == "asha-tpe":
        config["searcher"]["sampler"] = "tpe"
    dray.Experiment(config, model_dir=BENCH / "model", path=directory / "experiment").run()


def accuracies(ran: Ran) -> list[float]:
    """Of each epoch trained, in the order in which they ended."""
    return [stamp.fields["accuracy"] for stamp in sorted(of_kind(ran.stamps, "validated"), key=lambda s: s.time)]


def reached(ran: Ran, accuracy: float) -> tuple[int, float] | None:
    """Epochs trained, and seconds from the process's start, until one validation was that good; None if none was."""
    validated = sorted(of_kind(ran.stamps, "validated"), key=lambda s: s.time)
    for epochs, stamp in enumerate(validated, start=1):
        if stamp.fields["accuracy"] >= accuracy:
            return epochs, stamp.time - ran.began
    return None


def report(paper: Paper, found: dict[int, dict[str, Ran]]) -> None:
    """Print the table."""
    rows = []
    for way in next(iter(found.values())):
        runs = [(ways[way], max(accuracies(ways["random"])) - NEARLY) for ways in found.values()]
        ends = [reached(ran, accuracy) for ran, accuracy in runs]
        there = [end for end in ends if end is not None]
        rows.append(
            [
                way,
                spread([max(accuracies(ran)) for ran, _ in runs], digits=4),
                spread([float(len(accuracies(ran))) for ran, _ in runs], digits=0),
                f"{len(there)} of {len(ends)}",
                spread([float(epochs) for epochs, _ in there], digits=0) if there else "-",
                spread([seconds for _, seconds in there], digits=1) if there else "-",
            ]
        )
    paper.say("\nMedian (least - most) over the seeds\n")
    head = ["way", "best accuracy", "epochs trained", "within half a point", "epochs until then", "s until then"]
    paper.table(head, rows)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all ways for each seed."""
    paper.say(machine())
    found: dict[int, dict[str, Ran]] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        plan = plan_of(options.trials, seed)
        for way in options.ways:
            where = directory / f"{seed}-{way}"
            (given := directory / f"{seed}-{way}.json").write_text(json.dumps(plan))
            found.setdefault(seed, {})[way] = ran = run(__file__, ["--child", way, str(where), str(given)], where)
            best = max(accuracies(ran))
            print(f"seed {seed}, {way}: {len(accuracies(ran))} epochs, best {best:.4f}; {ran.wall_s:.1f} s", flush=True)
    report(paper, found)


def main(words: Sequence[str] = sys.argv[1:]) -> None:
    """Read the command line and measure."""
    if words[:1] == ["--child"]:
        way, directory, plan = words[1:]
        return child(way, Path(directory), json.loads(Path(plan).read_text()))
    parser = arguments(__doc__ or "")
    parser.set_defaults(trials=256)
    parser.add_argument("--seeds", type=int, default=1, help="how many searches of each way (default 1)")
    parser.add_argument("--first-seed", type=int, default=7, help="the first one's experiment_seed (default 7)")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=list(WAYS[1:]), help="which, beside random")
    options = parser.parse_args(words)
    options.ways = ["random", *options.ways]
    end_on_sigterm()
    paper, began = Paper(), time.monotonic()
    with tempfile.TemporaryDirectory() as unkept:
        directory = options.keep or Path(unkept)
        directory.mkdir(parents=True, exist_ok=True)
        measure(options, directory.resolve(), paper)
    paper.say(f"\n{time.monotonic() - began:.0f} s in all")
    if options.save:
        paper.save("digits_search", "A search of the digits trial, until it is nearly as good as 256 full trainings")


if __name__ == "__main__":
    main()
