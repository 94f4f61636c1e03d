"""Optimizer steps on parameters that are placed differently: what the user's optimizers and functions see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dray.training.parallel.sharding import gradients_on_one_mesh, groups_placed_alike


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    # Nothing is sent, and gloo's threads would be in the way of later tests that fork.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def divided(mesh: str) -> nn.Parameter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    here = init_device_mesh("cpu", (1,), mesh_dim_names=(mesh,))
    return nn.Parameter(DTensor.from_local(torch.ones(2, 2), here, [Shard(0)]))


def with_gradients(*parameters: nn.Parameter) -> list[Any]:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return list(parameters)


class Own(torch.optim.Optimizer):
    """Has no options of torch's, and may know its groups by number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "kwargs", "groups"),
    [
        (torch.optim.SGD, {}, 2),
        (torch.optim.SGD, {"foreach": True}, 2),
        (torch.optim.SGD, {"fused": True}, 2),
        (torch.optim.SGD, {"foreach": False}, 1),
        (Own, {}, 1),
    ],
)
def test_groups_are_split_where_kernels_take_all_of_one_in_a_call(kind: Any, kwargs: Any, groups: int) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2)), divided("tp")], **kwargs)
    with groups_placed_alike(optimizer):
        assert len(optimizer.param_groups) == groups
    assert len(optimizer.param_groups) == 1


def test_clipping_may_compare_gradients_with_parameters() -> None:
    parameters = with_gradients(nn.Parameter(torch.full((2, 2), 0.5)), divided("tp"))
    with gradients_on_one_mesh(parameters):
        for each in parameters:
            each.grad.mul_(each.detach().norm(dim=-1, keepdim=True) ** 2)
    torch.testing.assert_close(parameters[0].grad, torch.full((2, 2), 0.5))
    torch.testing.assert_close(parameters[1].grad.to_local(), torch.full((2, 2), 2.0))


def test_gradients_of_a_mesh_that_is_no_part_of_the_other_are_not_taken_for_whole_ones() -> None:
    parameters = with_gradients(divided("tp"), divided("other"))
    before = [each.grad for each in parameters]
    with gradients_on_one_mesh(parameters):
        assert all(each.grad is gradient for each, gradient in zip(parameters, before, strict=True))
