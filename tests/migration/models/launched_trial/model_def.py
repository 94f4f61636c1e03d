"""A GAN on a ring of points: two models, two optimizers, one schedule stepped by hand."""

import math
from collections import OrderedDict

import torch
from torch import nn

import determined.pytorch as dp


class Generator(nn.Module):
    def __init__(self, latent, width):
        super().__init__()
        self.net = nn.Sequential(
            OrderedDict(first=nn.Linear(latent, width), act=nn.LeakyReLU(0.2), last=nn.Linear(width, 2))
        )

    def forward(self, z):
        return self.net(z)


class GANTrial(dp.PyTorchTrial):
    def __init__(self, context: dp.PyTorchTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.latent = hparams["generator"]["latent"]
        self.generator = context.wrap_model(Generator(self.latent, hparams["generator"]["width"]))
        self.discriminator = context.wrap_model(
            nn.Sequential(
                nn.Linear(2, hparams["discriminator"]["width"]),
                nn.Tanh(),
                nn.Linear(hparams["discriminator"]["width"], 1),
            )
        )
        betas = (hparams["b1"], 0.99)
        self.opt_g = context.wrap_optimizer(
            torch.optim.Adam(self.generator.parameters(), lr=hparams["generator"]["lr"], betas=betas)
        )
        self.opt_d = context.wrap_optimizer(
            torch.optim.Adam(self.discriminator.parameters(), lr=hparams["discriminator"]["lr"], betas=betas)
        )
        self.decay = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.opt_d, gamma=0.98), dp.LRScheduler.StepMode.MANUAL_STEP
        )
        angles = torch.arange(512) * (2 * math.pi / 512)
        noise = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * noise

    def build_training_data_loader(self):
        return dp.DataLoader(self.points, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self):
        return dp.DataLoader(self.points, batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch, epoch_idx, batch_idx):
        bce = nn.functional.binary_cross_entropy_with_logits
        real, fake = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        # The same noise in each process would make them all generate the same points.
        noise = torch.Generator().manual_seed(1000 * batch_idx + self.context.distributed.get_rank())
        made = self.generator(torch.randn(len(batch), self.latent, generator=noise))

        # Train the discriminator on both, every second batch.
        d_loss = (bce(self.discriminator(batch), real) + bce(self.discriminator(made.detach()), fake)) / 2
        if batch_idx % 2 == 0:
            self.context.backward(d_loss)
            self.context.step_optimizer(self.opt_d)
            self.decay.step()

        # Train the generator on what the discriminator says.
        self.discriminator.requires_grad_(False)
        g_loss = bce(self.discriminator(made), real)
        self.context.backward(g_loss)
        self.context.step_optimizer(self.opt_g)
        self.discriminator.requires_grad_(True)
        return {"loss": d_loss, "g_loss": g_loss}

    def evaluate_batch(self, batch, batch_idx):
        noise = torch.Generator().manual_seed(batch_idx)
        made = self.generator(torch.randn(len(batch), self.latent, generator=noise))
        return {"distance_from_ring": (made.norm(dim=1) - 1).abs().mean()}
