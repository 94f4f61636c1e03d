"""The cost of a compiled model in a search: 16 trials that differ in lr and weight decay, in one process; twice.

The first experiment starts with an empty cache on disk; the second one, on another Ray cluster, uses that cache.

    python bench/compile.py [--trials 16] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from _measure import BENCH, Paper, Stamp, arguments, end_on_sigterm, machine, of_kind, perform, quantile, run, verdict

SECOND_TO_FIRST = 0.05


def child(directory: Path, trials: int) -> None:
    """Run one of the experiments."""
    end_on_sigterm()
    import dray

    config = {
        "name": "compiled",
        "entrypoint": "compiled:Compiled",
        "hyperparameters": {
            "global_batch_size": 64,
            "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
            "weight_decay": {"type": "double", "minval": 0.0, "maxval": 0.1},
        },
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"epochs": 1},
            "max_trials": trials,
        },
        "resources": {"slot": "cpu", "max_slots": 1},
        "reproducibility": {"experiment_seed": 7},
    }
    dray.Experiment(config, model_dir=BENCH / "model", path=directory / "experiment").run()


def _row(name: str, stamps: list[Stamp]) -> list[str]:
    steps = [s.fields["seconds"] for s in of_kind(stamps, "first_step")]
    counts = of_kind(stamps, "counts")[-1].fields
    later = f"{quantile(steps[2:], 0.5) * 1000:.1f} ms ({max(steps[2:]) * 1000:.1f} at most)"
    graphs = f"{counts['graphs']} ({counts['miss']} compiled, {counts['hit']} from disk)"
    return [name, f"{steps[0]:.2f} s", f"{steps[1] * 1000:.1f} ms", later, graphs]


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run both experiments, and print the results."""
    paper.say(machine())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "cache")
    rows, ratio = [], 0.0
    for name in ("the first experiment", "another one"):
        where = directory / name.replace(" ", "-")
        ran = run(__file__, ["--child", str(where), str(options.trials)], where)
        rows.append(_row(name, ran.stamps))
        steps = [s.fields["seconds"] for s in of_kind(ran.stamps, "first_step")]
        assert len({s.pid for s in of_kind(ran.stamps, "first_step")}) == 1, "the trials shared a process"
        ratio = ratio or steps[1] / steps[0]
    paper.say(f"\n{options.trials} trials each. A first step is forward, backward and the optimizer's step.\n")
    paper.table(["", "trial 0's first step", "trial 1's", "a later one's, median", "graphs in all, by dynamo"], rows)
    paper.say(
        f"\nThe second trial's first step / the first one's: {ratio:.2%} (<= {SECOND_TO_FIRST:.0%}: "
        f"{verdict(ratio <= SECOND_TO_FIRST)})"
    )


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        return child(Path(sys.argv[2]), int(sys.argv[3]))
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=16, help="trials per experiment (default 16)")
    perform(measure, parser.parse_args(), name="compile", title="A compiled model in a search")


if __name__ == "__main__":
    main()
