"""A model over several processes, as far as one process shows it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dray.training.optimisation import Optimisation
from dray.training.parallel.ddp import (
    DDPModel,
    broadcast_weights,
    data_parallel,
    disconnect,
    is_disconnected,
    queues_collectives,
)
from dray.training.parallel.device import CPU
from dray.training.progress import Position


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.api("2.16")
def test_attributes_of_the_model_within_stay_reachable(world: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 1))
    net.tag = "mine"  # type: ignore[assignment]
    spread = DDPModel(net)
    assert spread.tag == "mine"
    with pytest.raises(AttributeError, match="no attribute 'lable'"):
        spread.lable  # noqa: B018


def test_parts_of_the_model_within_are_indexed_as_with_one_slot(world: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    spread = DDPModel(net)
    assert spread[0] is net[0]
    assert list(spread) == list(net)
    assert "module[0]" in spread.passed_through, "named where its gradients are not averaged"
    with pytest.raises(TypeError, match="'Linear' object is not subscriptable"):
        DDPModel(nn.Linear(2, 1))[0]


def test_unused_parameters_are_explained_by_what_the_trial_has_called(world: Any) -> None:
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: torch.Tensor) -> Any:
            return self.parts["used"](x)

    spread = DDPModel(Net())
    spread(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"context.wrap_model\(model, ddp_kwargs=\{\"find_unused_parameters\": True"):
        spread(torch.ones(1, 2))


def test_what_is_set_on_a_wrapped_model_is_set_on_the_model_within(world: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale, self.before = nn.Linear(2, 1), 1.0, nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.scale * self.layer(self.before(x))
            return out

    net, x = Net(), torch.ones(1, 2)
    spread = DDPModel(net)
    once = net(x)
    spread.scale = 3.0
    assert torch.equal(spread(x), 3 * once)
    spread.before = nn.ReLU()
    assert isinstance(net.before, nn.ReLU)
    spread.own = 7
    assert spread.own == 7
    assert not hasattr(net, "own")
    with pytest.raises(RuntimeError, match=r"can't set 'layer' of a wrapped model .* set it before context.wrap_model"):
        spread.layer = nn.Linear(2, 1)
    spread.eval()
    assert not net.training


def test_gradients_have_a_group_of_their_own_with_the_programs_patience(world: Any) -> None:
    one, two = DDPModel(nn.Linear(2, 1)), DDPModel(nn.Linear(2, 1))
    assert one.process_group is two.process_group is not world
    backend = one.process_group._get_backend(torch.device("cpu"))  # noqa: SLF001 - torch has no public way to ask it
    assert backend.options._timeout == timedelta(seconds=77)  # noqa: SLF001


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kept_apart", [False, True])
def test_gradients_are_in_memory_once_unless_the_trial_says_otherwise(
    world: Any, kept_apart: bool, compress: bool
) -> None:
    ddp_kwargs = {"gradient_as_bucket_view": False} if kept_apart else {}
    spread = data_parallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), CPU, ddp_kwargs, compress_gradients=compress
    )
    for _ in range(2):  # the first pass finds the buckets
        spread.zero_grad()
        spread(torch.ones(1, 64)).sum().backward()
    gradients = [parameter.grad for parameter in spread.parameters() if parameter.grad is not None]
    storages = {gradient.untyped_storage().data_ptr(): gradient.untyped_storage().nbytes() for gradient in gradients}
    nbytes = sum(gradient.nbytes for gradient in gradients)
    assert len(storages) == (4 if kept_apart else 1), "beside the bucket, or in it"
    assert sum(storages.values()) == nbytes
    optimisation = Optimisation(Position())
    optimisation.models.append(spread)
    saved = optimisation.pending_gradients()
    assert len(pickle.dumps(saved)) < 1.5 * nbytes
    torch.testing.assert_close(saved, [gradients])


def test_synchronised_batch_norms_communicate_where_the_gradients_do(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch has them for GPUs alone.
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
    seen = []

    class Norm(nn.SyncBatchNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.process_group)
            return self.weight * x

    own = dist.new_group([0])
    spread = DDPModel(nn.Sequential(Norm(2), Norm(2, process_group=own)))
    spread(torch.ones(1, 2))
    assert seen == [spread.process_group, own]
    copy.deepcopy(spread[0])  # in which no group may be: they can't be copied


class Broadcasts(TorchDispatchMode):
    """Counts the broadcasts of a block."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "broadcast" in str(function)
        return function(*args, **(kwargs or {}))


def test_buffers_are_shared_together_also_those_that_the_model_has_replaced(world: Any) -> None:
    net = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(10)])
    spread = DDPModel(net)
    net[0].running_mean = torch.ones(3)
    with torch.no_grad(), Broadcasts() as broadcasts:
        spread.sync_buffers()
    assert broadcasts.count == 2, "the floats and the integers of 30 buffers"
    assert any(buffer is net[0].running_mean for buffer in spread.modules_buffers)


def test_weights_are_shared_together(world: Any) -> None:
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)]).requires_grad_(False)
    net[3].weight.data = torch.ones(3, 3).t()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with Broadcasts() as broadcasts:
        broadcast_weights(net)
    assert broadcasts.count == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_model_that_was_cut_off_is_the_model_within(world: Any) -> None:
    net = nn.Linear(2, 1)
    spread = DDPModel(net)
    group = spread.process_group
    disconnect(CPU)
    disconnect(CPU)  # as each rank does, of those that leave
    x = torch.ones(3, 2)
    assert torch.equal(spread(x), net(x))
    spread(x).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[3.0, 3.0]]
    assert DDPModel(nn.Linear(2, 1)).process_group is not group, "the next model is connected anew"


def test_a_group_that_the_program_has_ended_is_not_ended_again() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DDPModel(nn.Linear(2, 1))
    group = model.process_group
    dist.destroy_process_group()
    disconnect(CPU)
    assert not model.connected
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert DDPModel(nn.Linear(2, 1)).process_group is not group
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_gloos_collectives_are_over_when_they_return(backend: str | None) -> None:
    assert not queues_collectives(CPU)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not queues_collectives(CPU)
    finally:
        dist.destroy_process_group()


def test_only_what_a_connection_says_is_another_ranks_doing() -> None:
    gloo = "[.../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26000"
    assert is_disconnected(RuntimeError(gloo))
    assert is_disconnected(dist.DistBackendError("NCCL communicator was aborted"))
    assert not is_disconnected(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_disconnected(ValueError(gloo))


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
