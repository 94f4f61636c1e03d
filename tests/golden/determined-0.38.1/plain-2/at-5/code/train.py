"""Train a trial of model_def.py, locally or under torchrun: with determined, or with dray as `determined`.

python train.py CLASS LENGTH OUT [--save 7 12] [--latest DIR] [--global-batch-size 8]; periods are batches.
OUT/losses_<rank>.json gets the losses of the batches that were trained here, and OUT/checkpoints.json the ids of the
checkpoints, by batches.
"""

import argparse
import json
import os
import pathlib
import random

import determined as det
import model_def
import numpy as np
import torch
import torch.distributed
from determined import core, pytorch

EXPERIMENT = {
    "name": "golden",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "validation_loss"},
}


class Ids(pytorch.PyTorchCallback):
    def __init__(self, trial):
        self.trial, self.of = trial, {}

    def on_checkpoint_upload_end(self, uuid):
        self.of[len(self.trial.losses)] = uuid


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trial")
    parser.add_argument("length", type=int)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--save", type=int, nargs="*", default=[])
    parser.add_argument("--latest")
    parser.add_argument("--global-batch-size", type=int)
    args = parser.parse_args()

    torch.set_num_threads(1)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    distributed = None
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        distributed = core.DistributedContext.from_torch_distributed()
    size = distributed.size if distributed else 1
    # In batches of 4: six an epoch. Of one process the last one is partial. Of two processes it would be partial in one
    # of them, which would then draw other numbers for its dropout; a checkpoint of Determined's has the chief's alone.
    hparams = {"width": 5, "records": 22 if size == 1 else 24, "global_batch_size": args.global_batch_size or 4 * size}
    exp_conf = {**EXPERIMENT, "hyperparameters": hparams, "resources": {"slots_per_trial": size}}
    with pytorch.init(
        hparams=hparams, exp_conf=exp_conf, distributed=distributed, enable_tensorboard_logging=False
    ) as context:
        trial = getattr(model_def, args.trial)(context)
        ids = Ids(trial)
        own = trial.build_callbacks()
        trial.build_callbacks = lambda: {**own, "ids": ids}
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(args.length),
            checkpoint_period=pytorch.Batch(args.save) if args.save else None,
            validation_period=pytorch.Epoch(1),
            checkpoint_policy="none",
            latest_checkpoint=args.latest,
        )
        rank = context.distributed.rank
    found = {"losses": trial.losses, "best": trial.best.state_dict()}
    (args.out / f"losses_{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        (args.out / "checkpoints.json").write_text(json.dumps(ids.of))
    print("trained with", det.__version__ if hasattr(det, "__version__") else det, len(trial.losses), "batches")


if __name__ == "__main__":
    main()
