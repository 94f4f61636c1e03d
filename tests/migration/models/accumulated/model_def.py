"""Iris (scikit-learn): gradients of two batches a step, a scheduler per batch, validation over the whole set at once."""

import numpy as np
import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import BatchSampler, Sampler

import determined as det
from determined import pytorch


class Iris(torch.utils.data.Dataset):
    def __init__(self, keep):
        features, labels = load_iris(return_X_y=True)
        self.rows = [(f, int(l)) for n, (f, l) in enumerate(zip(features.astype("float32"), labels)) if keep(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        features, label = self.rows[index]
        return {"features": features, "label": label}


class Balanced(Sampler):
    """One of each kind in turn, in another order in each epoch."""

    def __init__(self, labels):
        self.kinds = [np.flatnonzero(np.array(labels) == kind) for kind in range(3)]
        self.random = np.random.RandomState(17)

    def __len__(self):
        return sum(len(kind) for kind in self.kinds)

    def __iter__(self):
        shuffled = [self.random.permutation(kind) for kind in self.kinds]
        yield from (int(index) for triple in zip(*shuffled) for index in triple)


class IrisTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.layers = context.get_hparam("layers")
        sizes = [4, self.layers["first"]["width"], self.layers["second"]["width"], 3]
        modules = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            modules += [nn.Linear(inputs, outputs), nn.Tanh()]
        self.model = self.context.wrap_model(nn.Sequential(*modules[:-1]))
        self.optimizer = self.context.wrap_optimizer(
            getattr(torch.optim, context.get_hparam("optimizer")["name"])(
                self.model.parameters(), lr=context.get_hparam("optimizer")["lr"]
            )
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.context.wrap_lr_scheduler(cosine, step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        info = det.get_cluster_info()
        assert info is None or info.trial.hparams["layers"] == self.layers

    def build_training_data_loader(self):
        data = Iris(lambda n: n % 5)
        sampler = Balanced([label for _, label in data.rows])
        batches = BatchSampler(sampler, self.context.get_per_slot_batch_size(), drop_last=True)
        return pytorch.DataLoader(data, batch_sampler=batches)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(Iris(lambda n: n % 5 == 0), batch_size=7)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch["features"]), batch["label"])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=lambda params: nn.utils.clip_grad_value_(params, 0.5))
        return {"loss": loss}

    def evaluate_full_dataset(self, data_loader):
        right = total = 0
        for batch in data_loader:
            batch = self.context.to_device(batch)
            output = self.model(batch["features"])
            right += int((output.argmax(dim=1) == batch["label"]).sum())
            total += len(batch["label"])
        return {"accuracy": right / total}
