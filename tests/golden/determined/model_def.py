"""Trials in Determined's style, small, and with one sort of state each; they run with determined and with dray."""

import random

import torch
from determined import pytorch
from determined.pytorch import samplers
from torch import nn


class Squares(torch.utils.data.Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return self.records

    def __getitem__(self, index):
        x = torch.linspace(index, index + 1, 6) / self.records
        return x, (x**2).sum(0, keepdim=True)


class Best(pytorch.PyTorchCallback):
    """State of a callback: the best validation, and how many epochs there were."""

    def __init__(self):
        self.best, self.epochs = float("inf"), 0

    def on_training_epoch_end(self, epoch_idx):
        self.epochs += 1

    def on_validation_end(self, metrics):
        self.best = min(self.best, float(metrics["validation_loss"]))

    def state_dict(self):
        return {"best": self.best, "epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.best, self.epochs = state_dict["best"], state_dict["epochs"]


class Plain(pytorch.PyTorchTrial):
    """Records in their order, dropout, SGD with momentum, a schedule by batches."""

    def __init__(self, context):
        self.context = context
        self.losses = []
        self.best = Best()
        self.data = Squares(context.get_hparam("records"))
        width = context.get_hparam("width")
        self.model = context.wrap_model(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), *self.drop(), nn.Linear(width, 1))
        )
        self.optimizer = context.wrap_optimizer(self.make_optimizer(self.model))
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.9)
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def drop(self):
        return [nn.Dropout(0.4)]

    def make_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def build_callbacks(self):
        return {"best": self.best}

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data, batch_size=5)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1]) + 0.01 * random.random()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.losses.append(loss.item())
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}


class Still(Plain):
    """A new order each epoch, and nothing else that is drawn."""

    def drop(self):
        return []

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)


class Own(Plain):
    """A sampler that shuffles by a seed of its own; Adam."""

    def make_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.02)

    def build_training_data_loader(self):
        sampler = samplers.ReproducibleShuffleSampler(torch.utils.data.SequentialSampler(self.data), seed=11)
        return pytorch.DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size(), sampler=sampler)


class Two(Plain):
    """Two models with an optimizer each, schedules by epochs, clipped gradients."""

    def __init__(self, context):
        self.context = context
        self.losses = []
        self.best = Best()
        self.data = Squares(context.get_hparam("records"))
        width = context.get_hparam("width")
        # Without a bias: its gradient before a BatchNorm is rounding alone, of which AdamW would make whole steps.
        first = nn.Linear(6, width, bias=False)
        self.first = context.wrap_model(nn.Sequential(first, nn.BatchNorm1d(width), nn.Tanh()))
        self.second = context.wrap_model(nn.Sequential(nn.Dropout(0.3), nn.Linear(width, 1)))
        self.model = lambda x: self.second(self.first(x))
        self.optimizers = [
            context.wrap_optimizer(torch.optim.AdamW(self.first.parameters(), lr=0.02)),
            context.wrap_optimizer(torch.optim.SGD(self.second.parameters(), lr=0.05, momentum=0.5)),
        ]
        for optimizer in self.optimizers:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
            context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        for optimizer in self.optimizers:
            self.context.step_optimizer(
                optimizer, clip_grads=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)
            )
        self.losses.append(loss.item())
        return loss


class Scaled(Plain):
    """A gradient scaler, whose state grows."""

    def __init__(self, context):
        self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
        super().__init__(context)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        self.scaler.update()
        self.losses.append(self.scaler.get_scale() + loss.item())
        return {"loss": loss}
