"""The GAN without an experiment: ``python examples/gan/train.py``.

On two processes: ``torchrun --nproc-per-node 2 examples/gan/train.py``. Checkpoints and metrics are below
``~/dray_results/local``.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
import yaml
from model_def import GANTrial

import dray
from dray import pytorch


def as_text(image: torch.Tensor) -> str:
    """An image of 64 pixels from -1 to 1 as eight lines of characters."""
    shades = " .:-=+*#%@"
    levels = ((image.cpu() + 1) / 2 * (len(shades) - 1)).round().long().reshape(8, 8)
    return "\n".join("".join(shades[level] * 2 for level in row) for row in levels.tolist())


def main() -> None:
    """Train with the hyperparameters of const.yaml, and show what the generator makes."""
    config = yaml.safe_load((Path(__file__).parent / "const.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=config["searcher"]["max_length"]["epochs"])
    epochs = parser.parse_args().epochs
    logging.basicConfig(level=logging.INFO, format=dray.LOG_FORMAT)
    with pytorch.init(hparams=config["hyperparameters"], exp_conf=config) as context:
        trial = GANTrial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Epoch(epochs), validation_period=pytorch.Epoch(20), checkpoint_policy="none"
        )
        if context.distributed.rank == 0:
            for image in trial.imagine(3).detach():
                print(as_text(image), end="\n\n")


if __name__ == "__main__":
    main()
