"""A GAN on scikit-learn's 1,797 digits of 8x8 pixels: two models, two optimizers, and a metric over the whole set."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from dray import pytorch

PIXELS = 64


@pytorch.cached  # several trials run in one process: read the images once
def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to learn from and 360 to compare with, stratified by digit; pixels from -1 to 1."""
    digits = load_digits()
    parts = train_test_split(digits.data / 8.0 - 1.0, test_size=0.2, stratify=digits.target, random_state=0)
    training, held_out = (TensorDataset(torch.as_tensor(part).float()) for part in parts)
    return training, held_out


def generator(latent: int, hidden: int) -> nn.Module:
    """From `latent` random numbers to an image."""
    return nn.Sequential(
        nn.Linear(latent, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, PIXELS),
        nn.Tanh(),
    )


def discriminator(hidden: int) -> nn.Module:
    """From an image to one number, which is above 0 if the image looks real."""
    return nn.Sequential(
        nn.Linear(PIXELS, hidden),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.2),
        nn.Linear(hidden, 1),
    )


def frechet_distance(real: torch.Tensor, fake: torch.Tensor) -> float:
    """The Fréchet distance of two sets of images, each taken as a normal distribution of pixels; 0 if they are equal.

    Args:
        real, fake: (images, pixels).
    """
    real, fake = real.double(), fake.double()
    covariances = real.T.cov() @ fake.T.cov()
    root = torch.linalg.eigvals(covariances).sqrt().real.sum()
    means = (real.mean(0) - fake.mean(0)).square().sum()
    return float(means + real.T.cov().trace() + fake.T.cov().trace() - 2 * root)


class GANTrial(pytorch.PyTorchTrial):
    """A generator against a discriminator; each takes one step per batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.latent = context.get_hparam("latent")
        hidden, betas = context.get_hparam("hidden"), (0.5, 0.999)
        self.generator = context.wrap_model(generator(self.latent, hidden))
        self.discriminator = context.wrap_model(discriminator(hidden))
        self.generator_optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.generator.parameters(), lr=context.get_hparam("generator_lr"), betas=betas)
        )
        self.discriminator_optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.discriminator.parameters(), lr=context.get_hparam("discriminator_lr"), betas=betas)
        )
        self.loss = nn.BCEWithLogitsLoss()
        # Not a mean over batches: the distance is computed over all images of all ranks.
        self.distance = context.wrap_reducer(_distance_of_batches, name="frechet_distance", for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        batch_size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(datasets()[0], batch_size=batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(datasets()[1], batch_size=60)

    def imagine(self, images: int) -> torch.Tensor:
        """New images, (images, pixels)."""
        made: torch.Tensor = self.generator(torch.randn(images, self.latent, device=self.context.device))
        return made

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        [real] = batch
        fake = self.imagine(len(real))
        truth = torch.zeros(2 * len(real), 1, device=real.device)
        truth[: len(real)] = 0.9  # not 1: one-sided label smoothing

        discriminator_loss = self.loss(self.discriminator(torch.cat([real, fake.detach()])), truth)
        self.context.backward(discriminator_loss)
        self.context.step_optimizer(self.discriminator_optimizer)

        generator_loss = self.loss(self.discriminator(fake), torch.ones(len(real), 1, device=real.device))
        self.context.backward(generator_loss)
        self.context.step_optimizer(self.generator_optimizer)
        # The generator's backward pass left gradients in the discriminator too.
        self.discriminator_optimizer.zero_grad()
        return {"generator_loss": generator_loss, "discriminator_loss": discriminator_loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        [real] = batch
        fake = self.imagine(len(real))
        self.distance.update((real.cpu(), fake.cpu()))
        found = (self.discriminator(real) > 0).float().mean() + (self.discriminator(fake) <= 0).float().mean()
        return {"discriminator_accuracy": found / 2}


def _distance_of_batches(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return frechet_distance(*(torch.cat(images) for images in zip(*pairs, strict=True)))
