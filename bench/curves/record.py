"""Record the learning curves for the development of search methods: dray trains every trial, in this process.

For each task (tasks.py): random configurations of its space, each trained for 27 epochs with several seeds, from which
the weights, the dropout and the order of the data are drawn; the validation loss after every epoch is kept. The table
goes to `<task>.parquet` beside this file, a row for each training:

    hparams   the configuration, as JSON
    seed      the number of the training of this configuration, from 0
    losses    27 numbers, NaN or inf where it diverged

The table's metadata has the space (`space`), and the versions that it was made with (`made_with`). The tables are data:
another processor or torch gives slightly different numbers, and another Python different text.

    python bench/curves/record.py [--tasks digits_mlp ...] [--configurations 300] [--seeds 2]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import sklearn
import torch
from tasks import EPOCHS, TASKS, RecordedTrial

from dray import pytorch
from searchers import parse_space

HERE = Path(__file__).resolve().parent


class Losses(pytorch.PyTorchCallback):
    """Keeps the validation losses."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.values.append(float(metrics["validation_loss"]))


class Kept(RecordedTrial):
    """A trial whose losses are kept."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.losses = Losses()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"losses": self.losses}


def train(task: str, hparams: Mapping[str, Any], seed: int) -> list[float]:
    """The validation losses of one trial."""
    config = {
        "data": {"task": task},
        "reproducibility": {"experiment_seed": seed},
        "resources": {"slot": "cpu"},
    }
    with pytorch.init(hparams=dict(hparams), exp_conf=config, enable_tensorboard_logging=False) as context:
        trial = Kept(context)
        epoch = trial.batches_per_epoch
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(EPOCHS * epoch),
            validation_period=pytorch.Batch(epoch),
            reporting_period=pytorch.Batch(EPOCHS * epoch),
            checkpoint_policy="none",
        )
    assert len(trial.losses.values) == EPOCHS, trial.losses.values
    return trial.losses.values


def record(task: str, configurations: int, seeds: int, scratch: Path) -> pa.Table:
    """The table of a task."""
    space = parse_space(TASKS[task].space)
    rows: list[dict[str, Any]] = []
    began = time.process_time()
    for number in range(configurations):
        hparams = space.sample(Random(f"{task}:{number}"))
        for seed in range(seeds):
            losses = train(task, hparams, 1000 * seed + number)
            rows.append({"hparams": json.dumps(hparams, sort_keys=True), "seed": seed, "losses": losses})
        shutil.rmtree(scratch / "local", ignore_errors=True)  # the checkpoints
        if (number + 1) % 50 == 0:
            print(f"{task}: {number + 1} configurations, {time.process_time() - began:.0f} s of CPU", flush=True)
    made_with = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scikit-learn": sklearn.__version__,
        "machine": platform.machine(),
    }
    columns = [("hparams", pa.string()), ("seed", pa.int8()), ("losses", pa.list_(pa.float32(), EPOCHS))]
    metadata = {"space": json.dumps(TASKS[task].space), "made_with": json.dumps(made_with)}
    schema = pa.schema(columns, metadata=metadata)
    return pa.Table.from_pylist(rows, schema=schema)


def main() -> None:
    """Read the command line and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--configurations", type=int, default=300, help="of each task (default 300)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each configuration (default 2)")
    parser.add_argument("--into", type=Path, default=HERE, help="directory of the tables (default: beside this file)")
    options = parser.parse_args()
    into = options.into.resolve()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("dray").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["DRAY_HOME"] = scratch
        os.chdir(scratch)  # a checkpoint has a copy of the working directory
        for task in options.tasks:
            table = record(task, options.configurations, options.seeds, Path(scratch))
            pq.write_table(table, into / f"{task}.parquet", compression="zstd")


if __name__ == "__main__":
    main()
