"""The methods of a trial's context."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trial_run import TrialRun
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, trial


class Still:
    """A transport that answers for all ranks with one's own words."""

    def __init__(self, size: int) -> None:
        self.size = size

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        return [stuff] * self.size

    def close(self) -> None: ...


def ranks(size: int) -> DistributedContext:
    return DistributedContext(
        rank=0, size=size, local_rank=0, local_size=size, cross_rank=0, cross_size=1, transport=Still(size)
    )


def make(host: FakeHost, *, peers: DistributedContext | None = None, **arguments: Any) -> PyTorchTrialContext:
    peers = peers or DistributedContext()
    return PyTorchTrialContext(TrialRun(host=host, peers=peers, device=torch.device("cpu"), **arguments))


@pytest.fixture
def context(host: FakeHost) -> Iterator[PyTorchTrialContext]:
    with use_host(host), pytorch.init(hparams={"lr": 0.1, "global_batch_size": 9}) as context:
        yield context


@pytest.mark.api("2.1")
def test_hyperparameters_are_found_by_name(context: PyTorchTrialContext) -> None:
    assert context.get_hparams() == {"lr": 0.1, "global_batch_size": 9}
    assert context.get_hparam("lr") == 0.1


@pytest.mark.api("2.1")
def test_the_global_batch_size_as_a_hyperparameter_warns(
    context: PyTorchTrialContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert context.get_hparam("global_batch_size") == 9
    assert "get_per_slot_batch_size" in caplog.text


@pytest.mark.api("2.2")
def test_the_batch_is_split_over_the_slots(host: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    two = make(host, hparams={"global_batch_size": 9}, peers=ranks(2))
    assert (two.get_per_slot_batch_size(), two.get_global_batch_size()) == (4, 8)
    assert "from 9 to 8" in caplog.text


@pytest.mark.api("2.4")
def test_the_experiments_config_and_its_data_section(host: FakeHost) -> None:
    assert make(host, config={"name": "x", "data": {"url": "u"}}).get_data_config() == {"url": "u"}
    assert make(host, config={"name": "x"}).get_data_config() == {}


@pytest.mark.api("2.5", "2.7", "2.8")
def test_what_the_host_knows_is_passed_on(context: PyTorchTrialContext, host: FakeHost) -> None:
    assert (context.get_experiment_id(), context.get_trial_id(), context.get_trial_seed()) == (4, 9, 1)
    assert isinstance(context.get_tensorboard_path(), Path)
    assert context.get_initial_batch() == 0
    assert context.distributed.get_size() == 1
    assert context.device.type in ("cpu", "cuda")


@pytest.mark.api("2.10", "2.12")
def test_tensorboard_logging_is_switched(host: FakeHost) -> None:
    context = make(host, enable_tensorboard_logging=False)
    assert not context.get_enable_tensorboard_logging()
    context.set_enable_tensorboard_logging(True)
    assert context.get_enable_tensorboard_logging()


@pytest.mark.api("2.13")
def test_where_training_is(fit: Fit) -> None:
    seen: list[tuple[Any, ...]] = []

    def at_batch(self: OneWeight, batch_idx: int) -> None:
        context = self.context
        where = context.current_train_epoch(), context.current_train_batch()
        seen.append((*where, context.is_epoch_start(), context.is_epoch_end()))

    fit(trial(at_batch=at_batch), max_length=Batch(6))
    assert seen == [(i // 5, i, i % 5 == 0, i % 5 == 4) for i in range(6)]


def test_the_private_names_that_determineds_examples_ask_for(fit: Fit) -> None:
    seen: list[tuple[Any, ...]] = []

    class Asking(OneWeight):
        def build_training_data_loader(self) -> Any:
            seen.append((self.context._epoch_len, self.context._current_batch_idx))  # noqa: SLF001
            return super().build_training_data_loader()

        def at_batch(self, batch_idx: int) -> None:
            seen.append((self.context._epoch_len, self.context._current_batch_idx))  # noqa: SLF001

    fit(Asking, max_length=Batch(2))
    assert seen == [(None, None), (5, 0), (5, 1)]


@pytest.mark.api("2.15", "2.17", "2.22")
def test_wrapping_returns_and_lists_what_was_wrapped(context: PyTorchTrialContext) -> None:
    model = nn.Linear(1, 1)
    assert context.wrap_model(model) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert context.wrap_optimizer(optimizer) is optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH) is schedule
    assert (context.models, context.optimizers) == ([model], [optimizer])
    assert context.lr_schedulers[0].get_last_lr() == [0.1]


@pytest.mark.api("2.18")
@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_takes_what_tensor_backward_takes(context: PyTorchTrialContext) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x**2
    context.backward(y, gradient=torch.tensor([1.0, 10.0]), retain_graph=True)
    context.backward(y.sum(), create_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 44.0]
    assert x.grad.requires_grad


@pytest.mark.api("3.7")
def test_the_flag_for_torch_distributed_needs_a_process_group(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_TORCH_DISTRIBUTED", "true")
    with use_host(host), pytest.raises(RuntimeError, match="init_process_group"), pytorch.init():
        pass
