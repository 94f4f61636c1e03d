"""Trials on a number of processes that changes: each step has the records that it would have in one process."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, FullyShard
from dray.training.checkpoint import sharded
from tests import queued
from tests.pytorch.fakes import FakeHost, state_of
from tests.pytorch.processes import gloo_first, results_of, serve  # noqa: F401 - a fixture
from tests.pytorch.resuming import Numbered
from tests.pytorch.sharding import foreach_by_default

pytestmark = pytest.mark.slow

RECORDS, BATCH_SIZE, BATCHES = 42, 12, 14
PARTS = [(2, 5), (4, 9), (3, BATCHES)]
"""The processes, and the batch that they train up to."""
SHARDED = ("sharded", "tensor parallel")
"""With two batches a step too."""
KINDS = ("partial batches", "two batches a step", *SHARDED)


class Trial(pytorch.PyTorchTrial):
    """Shuffled data, momentum, and no random numbers of a process's own in the model."""

    drop_last = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = self.wrapped(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        #: (batch, records, a random number) of each batch that was trained here.
        self.seen: list[tuple[int, list[int], float]] = []

    def wrapped(self, model: nn.Module) -> nn.Module:
        return self.context.wrap_model(model)

    def build_training_data_loader(self) -> Any:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(Numbered(RECORDS), size, shuffle=True, drop_last=self.drop_last)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbered(RECORDS), batch_size=6)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append((batch_idx, batch[0].tolist(), random.random()))
        loss = nn.functional.mse_loss(self.model(batch[1]), batch[2])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[1]), batch[2])}


class Partial(Trial):
    """The last batch of an epoch has six records."""

    drop_last = False


class Sharded(Trial):
    def wrapped(self, model: nn.Module) -> nn.Module:
        return self.context.wrap_model(model, parallel=FullyShard(units=[nn.Linear]))


class TensorParallel(Sharded):
    def wrapped(self, model: nn.Module) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, self.context.device_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return super().wrapped(model)


TRIALS = {"partial batches": Partial, "sharded": Sharded, "tensor parallel": TensorParallel}


def sharing(kind: str, size: int) -> int:
    """How many of so many ranks have the same data."""
    return 2 if kind == "tensor parallel" and size % 2 == 0 else 1


def run(kind: str, directory: Path, until: int, latest: str | None, **init: Any) -> dict[str, Any]:
    """Train up to a batch, and save there."""
    host = FakeHost(directory, stop_at=until)
    elastic = {"resources": {"slots_per_trial": {"min": 1, "max": 4}}}
    steps = 1 if kind == "partial batches" else 2
    size = init["distributed"].size if "distributed" in init else 1
    init["mesh"] = {"tp": sharing(kind, size)}
    with (
        use_host(host),
        pytorch.init(
            hparams={"global_batch_size": BATCH_SIZE}, exp_conf=elastic, aggregation_frequency=steps, **init
        ) as context,
    ):
        trial = TRIALS.get(kind, Trial)(context)
        pytorch.Trainer(trial, context).fit(
            max_length=Batch(BATCHES), checkpoint_period=Batch(1), checkpoint_policy="none", latest_checkpoint=latest
        )
        return {"seen": trial.seen, "state": sharded.gathered(state_of(context), keep=True)}


def changing(directory: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """One trial after another, each on a number of processes that changes."""
    foreach_by_default()
    rank = dist.get_rank()
    dist.barrier()  # nobody leaves while another still connects, or receives
    dist.destroy_process_group()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for kind in KINDS:
        place, latest = directory / kind, None
        for part, (size, until) in enumerate(PARTS):
            # Whoever has no part in it goes on, and waits for the others where it has.
            if rank < size:
                os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
                queued.init(directory.with_name(f"{kind}-{until}".replace(" ", "")), rank, size)
                peers = DistributedContext.from_torch_distributed()
                found[kind, part] = run(kind, place, until, latest, distributed=peers)
                dist.barrier()
                dist.destroy_process_group()
            latest = str(place / f"checkpoint_{until}")
    queued.init(directory.with_name("end"), rank, 4)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(directory: Path, backend: str) -> list[dict[tuple[str, int], dict[str, Any]]]:
    """Each rank's observations of the parts in which it trained."""
    return [found["changing"] for found in results_of(4, __file__, directory, backend)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same trials in one process from their beginning to their end; sharded ones whole."""
    directory = tmp_path_factory.mktemp("alone")
    found = {kind: run(kind, directory / kind, BATCHES, None) for kind in KINDS if kind not in SHARDED}
    return {**found, **dict.fromkeys(SHARDED, found["two batches a step"])}


def steps(ranks: list[Any], kind: str) -> list[list[int]]:
    """The records of each step, over all processes."""
    found: dict[int, list[int]] = {}
    for part, (size, _) in enumerate(PARTS):
        for rank in ranks[: size : sharing(kind, size)]:
            for batch, records, _ in rank[kind, part]["seen"]:
                found.setdefault(batch, []).extend(records)
    return [sorted(found[batch]) for batch in range(BATCHES)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_the_records_that_it_has_in_one_process(
    ranks: list[Any], alone: dict[str, dict[str, Any]], kind: str
) -> None:
    assert steps(ranks, kind) == [sorted(records) for _, records, _ in alone[kind]["seen"]]


@pytest.mark.parametrize("kind", ["two batches a step", "sharded", "tensor parallel"])
def test_weights_and_momenta_are_those_of_one_process(
    ranks: list[Any], alone: dict[str, dict[str, Any]], kind: str
) -> None:
    found, expected = ranks[0][kind, 2]["state"], alone[kind]["state"]
    torch.testing.assert_close(found["models_state_dict"], expected["models_state_dict"])
    torch.testing.assert_close(found["optimizers_state_dict"], expected["optimizers_state_dict"])


def test_processes_that_had_no_random_numbers_get_some_of_their_own(ranks: list[Any]) -> None:
    [(before, _), (size, _), _] = PARTS
    # Those that were there from the beginning have the trial's seed, all of them.
    drawn = [{draw for _, _, draw in rank["partial batches", 1]["seen"]} for rank in (ranks[0], *ranks[before:size])]
    assert len(set.union(*drawn)) == sum(map(len, drawn))
    first = {draw for _, _, draw in ranks[0]["partial batches", 0]["seen"]}
    assert first.isdisjoint(set.union(*drawn)), "nobody begins again with the first batch's"


def test_tensor_parallel_ranks_draw_the_same_random_numbers_and_others_do_not(ranks: list[Any]) -> None:
    for part, (size, _) in enumerate(PARTS):
        step = sharing("tensor parallel", size)
        draws = [[draw for *_, draw in rank["tensor parallel", part]["seen"]] for rank in ranks[:size]]
        groups = [draws[first : first + step] for first in range(0, size, step)]
        assert all(each == group[0] for group in groups for each in group)
        if part > 0:  # at the beginning all have the trial's seed
            assert len({draw for group in groups for draw in group[0]}) == sum(len(group[0]) for group in groups)


if __name__ == "__main__":
    serve([changing])
