"""Trains the trial of model_def.py: by itself, under torchrun, or as a trial of script.yaml.

::

    python3 train.py --epochs 4
    torchrun --nproc-per-node 2 train.py
    dray experiment create script.yaml .
"""

from __future__ import annotations

import argparse
import logging

from model_def import DigitsTrial

import dray
from dray import pytorch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=16)
    arguments = parser.parse_args()
    info = dray.get_cluster_info()
    if info is not None:
        hparams, latest_checkpoint = dict(info.trial.hparams), info.latest_checkpoint
    else:
        hparams, latest_checkpoint = {"global_batch_size": 64, "lr": 3e-3, "hidden": 128}, None
    print(f"training with {hparams}")
    with pytorch.init(hparams=hparams) as context:
        pytorch.Trainer(DigitsTrial(context), context).fit(
            max_length=pytorch.Epoch(arguments.epochs),
            validation_period=pytorch.Epoch(1),
            latest_checkpoint=latest_checkpoint,
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=dray.LOG_FORMAT)
    main()
