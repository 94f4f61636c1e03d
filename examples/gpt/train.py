"""The GPT as a script: ``python examples/gpt/train.py``, or ``torchrun --nproc-per-node 2 examples/gpt/train.py``.

In an experiment (const.yaml) the same script is each trial's code. Without one, checkpoints and metrics are below
``~/dray_results/local``.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import yaml
from data import decode, encode
from model_def import GPTTrial

import dray
from dray import pytorch


def main() -> None:
    """Train with the hyperparameters of the experiment, or of const.yaml; then print what the model writes."""
    config = yaml.safe_load((Path(__file__).parent / "const.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=config["searcher"]["max_length"]["batches"])
    parser.add_argument("--characters", type=int, default=400, help="how many to write at the end")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=dray.LOG_FORMAT)
    info = dray.get_cluster_info()
    hparams = config["hyperparameters"] if info is None else info.trial.hparams
    with pytorch.init(
        hparams=hparams,
        exp_conf=config,
        aggregation_frequency=hparams["aggregation_frequency"],
        max_length=pytorch.Batch(options.batches),
    ) as context:
        trial = GPTTrial(context)
        pytorch.Trainer(trial, context).fit(
            validation_period=pytorch.Batch(200),
            checkpoint_policy="none",
            latest_checkpoint=None if info is None else info.latest_checkpoint,
        )
        if context.distributed.rank == 0 and options.characters:
            trial.model.eval()
            start = encode("\n\ndef ").long().to(context.device)
            print(decode(trial.model.write(start, options.characters)))


if __name__ == "__main__":
    main()
