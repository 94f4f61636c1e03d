"""Diabetes progression (scikit-learn) by a residual network, with Determined's launcher for torch.distributed."""

import argparse
import json

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import distributed as dist
from torch import nn

import determined as det
from determined import pytorch
from networks import Residual


class DiabetesTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(Residual(context.get_hparam("width"), context.get_hparam("depth")))
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(
                self.model.parameters(),
                lr=context.get_hparam("learning_rate"),
                weight_decay=context.get_hparam("weight_decay"),
            )
        )
        self.warmup = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10)),
            pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
        )
        x, y = load_diabetes(return_X_y=True)
        x, y = (x / x.std()).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)
        self.rows = [{"x": x[i], "y": y[i]} for i in range(len(y))]

    def build_training_data_loader(self):
        sampler = pytorch.samplers.ReproducibleShuffleSampler(torch.utils.data.SequentialSampler(range(352)), seed=5)
        return pytorch.DataLoader(
            self.rows[:352], batch_size=self.context.get_per_slot_batch_size(), sampler=sampler, drop_last=True
        )

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.rows[352:], batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch["x"]), batch["y"])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss

    def evaluate_batch(self, batch):
        error = self.model(batch["x"]) - batch["y"]
        return {"mse": (error**2).mean(), "worst": error.abs().max()}

    def evaluation_reducer(self):
        return {"mse": pytorch.Reducer.AVG, "worst": pytorch.Reducer.MAX}


def main(epochs, local_hparams):
    info = det.get_cluster_info()
    if info is not None:
        hparams, latest_checkpoint, distributed = info.trial.hparams, info.latest_checkpoint, None
    else:
        hparams, latest_checkpoint, distributed = local_hparams, None, None
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
            distributed = det.core.DistributedContext.from_torch_distributed()
    with pytorch.init(hparams=hparams, distributed=distributed) as context:
        torch.manual_seed(hparams["seed"])
        pytorch.Trainer(DiabetesTrial(context), context).fit(
            max_length=pytorch.Epoch(epochs),
            validation_period=pytorch.Epoch(1),
            checkpoint_period=pytorch.Epoch(2),
            checkpoint_policy="none",
            reporting_period=pytorch.Batch(5),
            latest_checkpoint=latest_checkpoint,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--hparams", type=json.loads, help="for a run without a cluster")
    args = parser.parse_args()
    main(args.epochs, args.hparams)
