"""The gradients of an aggregation are averaged, whatever they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dray.training.optimisation import Optimisation
from dray.training.progress import Position


class Kept:
    """An optimizer that keeps the gradients that it is to step with."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self) -> None:
        self.found = [parameter.grad for parameter in self.param_groups[0]["params"]]

    def zero_grad(self) -> None:
        pass


def test_gradients_of_any_kind_are_averaged() -> None:
    shapes = [(2, 3), (4,), ()]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters += [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    parameters.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    words = nn.Embedding(5, 2, sparse=True)
    gradients = [torch.full_like(parameter, 3.0 * (i + 1)) for i, parameter in enumerate(parameters[:-1])]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient.clone()
    words(torch.tensor([1, 1, 4])).sum().backward()
    optimizer: Any = Kept([*parameters, words.weight])
    Optimisation(Position(), aggregation_frequency=3).step(optimizer)
    found = optimizer.found
    assert all(torch.equal(*pair) for pair in zip(found, [each / 3 for each in gradients], strict=False))
    assert found[-2] is None
    assert torch.equal(found[-1].to_dense(), torch.tensor([[0.0], [2 / 3], [0.0], [0.0], [1 / 3]]).expand(5, 2))
