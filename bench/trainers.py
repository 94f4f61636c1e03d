"""The cost of a `TorchTrainer` in a `Tuner` besides its workers: memory, by process.

Runs several trials at a time, each a function that runs a `TorchTrainer` of one worker, as in Ray's guide to
hyperparameter optimization. Each worker builds a model, reports once, and waits. Then memory is read; the cost of a
trial is the slope over all sizes, by least squares. `groups.py` measures the same for dray's groups.

    python bench/trainers.py [--sizes 1 2 4] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _measure import (
    STAMPS,
    Paper,
    arguments,
    command,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    read_stamps,
    run,
    stamp,
)
from groups import others, slope
from scale import memory_mb

SETTLE_S = 15.0


def train_loop(config: dict[str, Any]) -> None:
    """A worker of Ray Train's: begins to train, and waits until memory has been read."""
    import torch
    from ray import train

    model = train.torch.prepare_model(torch.nn.Linear(64, 10))
    torch.optim.Adam(model.parameters())
    train.report({"loss": 1.0})
    stamp("trains")
    while not Path(config["measured"]).exists():
        time.sleep(0.1)


def run_trainer(config: dict[str, Any]) -> None:
    """A trial of Tune's."""
    from ray import train, tune
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    TorchTrainer(
        train_loop,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(
            name=tune.get_context().get_trial_id(),
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


def read_memory(size: int, measured: Path) -> None:
    """Once all workers train, stamp the memory of all other processes, and let the workers end."""
    stamps = Path(os.environ[STAMPS])
    while not stamps.exists() or len(of_kind(read_stamps(stamps), "trains")) < size:
        time.sleep(0.1)
    time.sleep(SETTLE_S)
    for kind in ("Pss", "Rss"):
        found: dict[str, float] = {}
        for pid, name in others().items():
            found[name] = found.get(name, 0.0) + memory_mb(pid).get(kind, 0.0)
        stamp(kind, **found)
    measured.touch()


def child(directory: Path, size: int) -> None:
    """Run this many trials at a time, in a driver of its own."""
    import ray
    from ray import tune
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2 * size, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        measured = directory / "measured"
        threading.Thread(target=read_memory, args=(size, measured), daemon=True).start()
        tune.Tuner(
            run_trainer,
            param_space={
                "lr": tune.grid_search([0.1 / (1 + trial) for trial in range(size)]),
                "measured": str(measured),
                "storage": str(directory),
            },
            run_config=tune.RunConfig(name="tune", storage_path=str(directory), verbose=0),
        ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all sizes, and print the results."""
    paper.say(f"{machine()}\n\n`{command()}`\n")
    ran = {
        size: run(__file__, ["--child", str(directory / str(size)), str(size)], directory / str(size)).stamps
        for size in options.sizes
    }
    for kind, title in (("Pss", "pages that processes share are divided among them"), ("Rss", "resident")):
        found = {size: of_kind(stamps, kind)[0].fields for size, stamps in ran.items()}
        total = {size: sum(each.values()) for size, each in found.items()}
        names = [name for name, mb in found[options.sizes[-1]].items() if mb >= 5.0]
        paper.table(
            [f"{kind} beside the workers ({title})", *(f"{size} trials" for size in options.sizes), "a trial"],
            [
                [what, *(f"{points[size]:.0f} MB" for size in options.sizes), f"{slope(points):.1f} MB"]
                for what, points in [
                    ("all processes", total),
                    *((f"- {name}", {size: each.get(name, 0.0) for size, each in found.items()}) for name in names),
                ]
            ],
        )
        paper.say()


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        end_on_sigterm()
        return child(Path(sys.argv[2]), int(sys.argv[3]))
    parser = arguments(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of trials at a time")
    perform(
        measure, parser.parse_args(), name="trainers", title="What a TorchTrainer in a Tuner takes beside its workers"
    )


if __name__ == "__main__":
    main()
