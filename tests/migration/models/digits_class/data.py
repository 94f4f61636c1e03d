"""The images, 8 by 8, and their digits."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def load(validation_fraction, scale):
    digits = load_digits()
    images = torch.tensor(digits.data / scale, dtype=torch.float32)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = np.random.RandomState(0).permutation(len(labels))
    cut = int(len(order) * (1 - validation_fraction))
    train, validation = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[validation], labels[validation])
