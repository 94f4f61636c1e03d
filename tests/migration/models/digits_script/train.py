"""A small convolution on scikit-learn's digits, as a program: `python3 train.py` on a laptop, or on the cluster."""

import argparse
import logging

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import determined as det
from determined import core, pytorch


class DigitsTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, hparams: dict) -> None:
        self.context = context
        self.hparams = hparams
        channels = hparams["channels"]
        self.model = context.wrap_model(
            nn.Sequential(
                nn.Conv2d(1, channels, 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.1),
                nn.Linear(9 * channels, 10),
            )
        )
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=hparams["lr"]))
        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
        labels = torch.tensor(digits.target)
        self.train_set = TensorDataset(images[:1200], labels[:1200])
        self.validation_set = TensorDataset(images[1200:], labels[1200:])

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        images, labels = batch
        output = self.model(images)
        return {
            "validation_loss": nn.functional.cross_entropy(output, labels),
            "accuracy": (output.argmax(dim=1) == labels).float().mean(),
        }

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.train_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.validation_set, batch_size=self.context.get_per_slot_batch_size())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.003, help="off the cluster; on it the searcher says")
    parser.add_argument("--channels", type=int, default=4, help="off the cluster; on it the searcher says")
    args = parser.parse_args()

    info = det.get_cluster_info()
    if info is None:
        hparams = {"lr": args.lr, "channels": args.channels, "global_batch_size": 100}
        latest_checkpoint = None
        # Under torchrun, on my own machine.
        distributed = None
        if torch.distributed.is_torchelastic_launched():
            torch.distributed.init_process_group("gloo")
            distributed = core.DistributedContext.from_torch_distributed()
    else:
        hparams = info.trial.hparams
        latest_checkpoint = info.latest_checkpoint
        distributed = None

    with pytorch.init(hparams=hparams, distributed=distributed) as context:
        torch.manual_seed(1)  # the same weights and batches wherever it runs
        trial = DigitsTrial(context, hparams)
        trainer = pytorch.Trainer(trial, context)
        trainer.fit(
            max_length=pytorch.Epoch(args.epochs),
            validation_period=pytorch.Batch(6),
            checkpoint_policy="all",
            latest_checkpoint=latest_checkpoint,
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    main()
