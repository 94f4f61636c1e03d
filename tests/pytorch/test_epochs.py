"""Data sets that change by epoch: each record is loaded with its epoch's number, in whichever process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from dray import pytorch
from dray.pytorch import Batch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, callback, trial

WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}]


class Curriculum(Dataset[torch.Tensor]):
    """Every record is the number of the epoch, and what was drawn at its start."""

    def __init__(self, records: int = 10, fails_at: int | None = None) -> None:
        self.records, self.fails_at = records, fails_at
        self.level, self.drawn = -1, -1.0
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.level), self.drawn])

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.fails_at and torch.utils.data.get_worker_info() is not None:
            raise LookupError(f"no level for epoch {epoch}")
        self.level, self.drawn = epoch, random.random()
        self.epochs.append(epoch)


class Wrapper(Dataset[torch.Tensor]):
    """A data set of the user's own over another one."""

    def __init__(self, base: Dataset[torch.Tensor]) -> None:
        self.base = base

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.base[index]


class TwoApart(torch.utils.data.Sampler[tuple[int, int]]):
    """Batches that are no lists."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter([(record, record + 5) for record in range(5)])


def seeing(data: Any, **loader: Any) -> type[Any]:
    """A trial that notes what each epoch saw."""

    def at_init(self: Any) -> None:
        self.saw = {}

    def train_batch(self: Any, batch: torch.Tensor, epoch_idx: int, batch_idx: int) -> Any:
        self.saw.setdefault(epoch_idx, set()).update(map(tuple, batch.tolist()))
        return OneWeight.train_batch(self, torch.ones(len(batch), 1), epoch_idx, batch_idx)

    loader = loader if "batch_sampler" in loader else {"batch_size": 2, **loader}
    return trial(
        at_init=at_init,
        train_batch=train_batch,
        build_training_data_loader=lambda self: pytorch.DataLoader(data, **loader),
    )


def levels(made: Any) -> dict[int, set[float]]:
    return {epoch: {level for level, *_ in seen} for epoch, seen in made.saw.items()}


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_data_set_gets_each_epoch_before_its_first_record_also_in_a_resumed_run(
    fit: Fit, host: FakeHost, workers: dict[str, Any]
) -> None:
    data = Curriculum()
    whole = fit(seeing(data, shuffle=True, **workers), max_length=Batch(15))
    assert levels(whole) == {0: {0}, 1: {1}, 2: {2}}
    assert data.epochs == [0, 1, 2], "the training process's data set, whatever the workers do"
    assert all(len(seen) == 1 for seen in whole.saw.values()), "what set_epoch draws is the same in all workers"
    for stop in (7, 10):  # within an epoch, and at the end of one
        fit(seeing(Curriculum(), shuffle=True, **workers), max_length=Batch(stop))
        made = seeing(Curriculum(), shuffle=True, **workers)  # as in a new process
        resumed = fit(made, max_length=Batch(15), latest_checkpoint=host.checkpoints()[-1])
        assert resumed.saw == {epoch: seen for epoch, seen in whole.saw.items() if epoch >= stop // 5}


@pytest.mark.parametrize(
    ("wrap", "loader"),
    [
        (lambda data: Subset(Wrapper(data), range(10)), {}),
        (lambda data: ConcatDataset([Subset(data, range(6)), Wrapper(data)]), {"sampler": range(10)}),
        (lambda data: data, {"batch_sampler": TwoApart()}),
    ],
    ids=["subset", "concat", "tuples"],
)
def test_wrapped_data_sets_and_samplers_get_the_epoch_too(fit: Fit, wrap: Any, loader: dict[str, Any]) -> None:
    for workers in WORKERS[:2]:
        data = Curriculum()
        assert levels(fit(seeing(wrap(data), **loader, **workers), max_length=Batch(10))) == {0: {0}, 1: {1}}
        assert data.epochs == [0, 1], "once an epoch"


def test_the_random_numbers_of_set_epoch_leave_those_of_training_as_they_are(fit: Fit) -> None:
    states = []
    for made in (seeing(Curriculum()), OneWeight):
        fit(made, max_length=Batch(7))
        states.append((random.random(), torch.rand(()).item()))
    assert len(set(states)) == 1


def test_an_error_of_set_epoch_in_a_worker_is_raised_in_training(fit: Fit) -> None:
    with pytest.raises(LookupError, match="no level for epoch 1"):
        fit(seeing(Curriculum(fails_at=1), num_workers=1), max_length=Batch(15))


@pytest.mark.parametrize("epoch_length", [5, 1])
def test_the_epoch_start_hook_runs_before_the_first_batch_of_the_epoch_is_drawn(fit: Fit, epoch_length: int) -> None:
    class Plain(Curriculum):
        set_epoch = None  # type: ignore[assignment]

    data = Plain(2 * epoch_length)
    hook = callback(on_training_epoch_start=lambda epoch_idx: setattr(data, "level", epoch_idx))
    made = fit(seeing(data), callbacks=hook, max_length=Batch(2 * epoch_length), reporting_period=Batch(1))
    assert levels(made) == {0: {0}, 1: {1}}


def test_workers_see_the_data_set_as_restored_callbacks_have_left_it(fit: Fit, host: FakeHost) -> None:
    class Level(pytorch.PyTorchCallback):
        def __init__(self, data: Curriculum) -> None:
            self.data = data

        def state_dict(self) -> dict[str, Any]:
            return {"level": 7}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.data.level = state_dict["level"]

    class Plain(Curriculum):
        set_epoch = None  # type: ignore[assignment]

    data = Plain()
    fit(seeing(data, num_workers=1), callbacks={"level": Level(data)}, max_length=Batch(2))
    made = fit(
        seeing(data, num_workers=1),
        callbacks={"level": Level(data)},
        max_length=Batch(4),
        latest_checkpoint=host.checkpoints()[-1],
    )
    assert levels(made) == {0: {7}}
