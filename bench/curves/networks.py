"""The networks of the recorded tasks. Each takes a trial's hyperparameters and ends in scores or values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from data import BUCKETS, LENGTH, LEVELS, NUM_CHARACTERS, PACKAGES, TAGS
from torch import Tensor, nn
from torch.nn import functional

Hparams = Mapping[str, Any]


def mlp(inputs: int, outputs: int, hparams: Hparams) -> nn.Module:
    """`layers` hidden layers of `width` units."""
    width, dropout = hparams["width"], hparams["dropout"]
    parts: list[nn.Module] = []
    for layer in range(hparams["layers"]):
        parts += [nn.Linear(width if layer else inputs, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*parts, nn.Linear(width, outputs))


def digits_mlp(hparams: Hparams) -> nn.Module:
    return mlp(64, 10, hparams)


def diabetes_mlp(hparams: Hparams) -> nn.Module:
    return mlp(10, 1, hparams)


def cancer_mlp(hparams: Hparams) -> nn.Module:
    return mlp(30, 2, hparams)


def code_origin(hparams: Hparams) -> nn.Module:
    return mlp(BUCKETS, len(PACKAGES), hparams)


def digits_cnn(hparams: Hparams) -> nn.Module:
    """`layers` 3x3 convolutions of `width / 4` channels, each followed by a pooling."""
    channels, before = hparams["width"] // 4, 1
    parts: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for _ in range(hparams["layers"]):
        parts += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = channels
    side = 8 // 2 ** hparams["layers"]
    return nn.Sequential(*parts, nn.Flatten(), nn.Dropout(hparams["dropout"]), nn.Linear(channels * side**2, 10))


class Block(nn.Module):
    """A layer of a transformer with two heads, normalised first."""

    def __init__(self, width: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries(self.before(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.feed(self.between(x)))


class DigitsViT(nn.Module):
    """A transformer over the eight 2x4 patches of an image; their mean is classified."""

    def __init__(self, hparams: Hparams) -> None:
        super().__init__()
        width = hparams["width"]
        self.patches = nn.Conv2d(1, width, (2, 4), stride=(2, 4))
        self.places = nn.Parameter(torch.randn(8, width) * 0.1)
        self.block = Block(width, hparams["dropout"], causal=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2)
        scores: Tensor = self.head(self.block(patches + self.places).mean(dim=1))
        return scores


class CodeTransformer(nn.Module):
    """A language model of characters: one causal layer."""

    def __init__(self, hparams: Hparams) -> None:
        super().__init__()
        width = hparams["width"]
        self.embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.block = Block(width, hparams["dropout"], causal=True)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_CHARACTERS))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.block(self.embedding(x) + self.places))
        return scores


class DocsGRU(nn.Module):
    """A recurrent language model of characters."""

    def __init__(self, hparams: Hparams) -> None:
        super().__init__()
        width = hparams["width"]
        self.embedding = nn.Embedding(NUM_CHARACTERS, 16)
        self.recurrent = nn.GRU(16, width, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(hparams["dropout"]), nn.Linear(width, NUM_CHARACTERS))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(x))
        scores: Tensor = self.head(states)
        return scores


class Convolutions(nn.Module):
    """Residual dilated convolutions over a sequence; causal ones see only what is before."""

    def __init__(
        self, inputs: int, outputs: int, dilations: tuple[int, ...], hparams: Hparams, *, causal: bool
    ) -> None:
        super().__init__()
        width = hparams["width"]
        self.causal, self.dilations = causal, dilations
        self.embedding = nn.Embedding(inputs, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=dilation) for dilation in dilations)
        self.drop, self.head = nn.Dropout(hparams["dropout"]), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).transpose(1, 2)
        for dilation, layer in zip(self.dilations, self.layers, strict=True):
            around = (2 * dilation, 0) if self.causal else (dilation, dilation)
            x = x + self.drop(functional.relu(layer(functional.pad(x, around))))
        scores: Tensor = self.head(x.transpose(1, 2))
        return scores


def code_tags(hparams: Hparams) -> nn.Module:
    return Convolutions(NUM_CHARACTERS, len(TAGS), (1, 2), hparams, causal=False)


def pixels(hparams: Hparams) -> nn.Module:
    return Convolutions(LEVELS + 1, LEVELS, (1, 4, 8), hparams, causal=True)
