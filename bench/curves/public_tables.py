"""Turn public tables of learning curves into tables that search_quality.py searches (`--tables DIRECTORY`).

They are not part of dray, so this needs a path to files that you have:

  lcbench   LCBench's JSON file: 35 data sets, 2,000 configurations of a perceptron, epochs 1 to 50
  yahpo     the directory of yahpo_data: `lcbench`, a surrogate of the same data, of which 4,000 random configurations
            are evaluated for each data set; needs the package onnxruntime
  pd1       PD1's matched results, JSON lines, compressed or not: 24 data sets and models, a curve of the validations

The metric is the validation cross entropy. The tables have the form of curves/record.py's, one file for each task.

    python bench/public_tables.py lcbench data_2k.json --into tables
    python bench/search_quality.py --problems tables --tables tables --seeds 3

Sources: Zimmer, Lindauer and Hutter, "Auto-PyTorch Tabular" (arXiv 2006.13799); Pfisterer et al., "YAHPO Gym" (arXiv
2109.03670); Wang et al., "Pre-trained Gaussian processes for Bayesian optimization" (arXiv 2109.08215).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from searchers import parse_space

EPOCHS = 50
"""Of LCBench, whose logs also have an epoch 0 and an epoch after the last."""
NUM_POINTS = 4000

LCBENCH: dict[str, Any] = {
    "batch_size": {"type": "int", "minval": 16, "maxval": 512, "log": True},
    "learning_rate": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "momentum": {"type": "double", "minval": 0.1, "maxval": 0.99},
    "weight_decay": {"type": "double", "minval": 1e-5, "maxval": 1e-1},
    "num_layers": {"type": "int", "minval": 1, "maxval": 5},
    "max_units": {"type": "int", "minval": 64, "maxval": 1024, "log": True},
    "max_dropout": {"type": "double", "minval": 0, "maxval": 1},
}
PD1: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -5, "maxval": 1},
    "power": {"type": "double", "minval": 0.1, "maxval": 2},
    "one_minus_momentum": {"type": "log", "base": 10, "minval": -3, "maxval": 0},
    "decay": {"type": "double", "minval": 0.01, "maxval": 0.99},
}

Curves = list[tuple[Mapping[str, Any], Sequence[float]]]
"""Configurations of a task, and their losses after each epoch."""


def lcbench(path: Path) -> Iterator[tuple[str, Curves]]:
    """Each data set of LCBench's file."""
    for name, runs in json.loads(path.read_text()).items():
        curves: Curves = []
        for run in runs.values():
            log = run["log"]
            losses = dict(zip(log["epoch"], log["Train/val_cross_entropy"], strict=True))
            config = {key: run["config"][key] for key in LCBENCH}
            curves.append((config, [float(losses[epoch]) for epoch in sorted(losses) if 1 <= epoch <= EPOCHS]))
        yield name, curves


def yahpo(path: Path) -> Iterator[tuple[str, Curves]]:
    """Each data set of YAHPO's LCBench surrogate."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path / "lcbench" / "model.onnx"))
    categories, numbers = (each.name for each in session.get_inputs())
    space = parse_space(LCBENCH)
    configs = [space.sample(Random(f"yahpo:{number}")) for number in range(NUM_POINTS)]
    rows = [[epoch, *(config[key] for key in YAHPO_ORDER)] for config in configs for epoch in range(1, EPOCHS + 1)]
    inputs = np.array(rows, dtype=np.float32)
    for name, code in json.loads((path / "lcbench" / "encoding.json").read_text())["OpenML_task_id"].items():
        if name == "#na#":
            continue
        tasks = np.full((len(rows), 1), code, dtype=np.int32)
        (found,) = session.run([session.get_outputs()[0].name], {categories: tasks, numbers: inputs})
        losses = found[:, YAHPO_LOSS].reshape(NUM_POINTS, EPOCHS)
        yield name, list(zip(configs, losses.tolist(), strict=True))


YAHPO_ORDER = (
    "batch_size",
    "learning_rate",
    "momentum",
    "weight_decay",
    "num_layers",
    "max_units",
    "max_dropout",
)
YAHPO_LOSS = 2
"""The surrogate's inputs after the epoch, and the output that is the validation cross entropy."""


def pd1(path: Path) -> Iterator[tuple[str, Curves]]:
    """Each study of PD1's matched results; a trial that diverged early has NaN in the rest of its curve."""
    tasks: defaultdict[str, Curves] = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            run = json.loads(line)
            config = {
                "lr": run["hps.lr_hparams.initial_value"],
                "power": run["hps.lr_hparams.power"],
                "one_minus_momentum": 1 - run["hps.opt_hparams.momentum"],
                "decay": run["hps.lr_hparams.decay_steps_factor"],
            }
            losses = [math.nan if loss is None else float(loss) for loss in run["valid/ce_loss"]]
            tasks[run["study_group"]].append((config, losses))
    yield from tasks.items()


SOURCES = {"lcbench": (lcbench, LCBENCH), "yahpo": (yahpo, LCBENCH), "pd1": (pd1, PD1)}


def write(space: Mapping[str, Any], curves: Curves, path: Path) -> None:
    """Write a task's table. Shorter curves than the longest one are completed by NaN, as those of diverged trials."""
    epochs = max(len(losses) for _, losses in curves)
    rows = [
        {"hparams": json.dumps(config), "seed": 0, "losses": [*losses, *[math.nan] * (epochs - len(losses))]}
        for config, losses in curves
    ]
    columns = [("hparams", pa.string()), ("seed", pa.int8()), ("losses", pa.list_(pa.float32(), epochs))]
    schema = pa.schema(columns, metadata={"space": json.dumps(space)})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd")


def main() -> None:
    """Read the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--into", type=Path, required=True, help="directory of the tables")
    options = parser.parse_args()
    read, space = SOURCES[options.source]
    options.into.mkdir(parents=True, exist_ok=True)
    for task, curves in read(options.path):
        write(space, curves, options.into / f"{task.replace('/', '_')}.parquet")
        print(f"{task}: {len(curves)} configurations", flush=True)


if __name__ == "__main__":
    main()
