"""What tests/api/test_faults_of_one_rank.py runs in two real processes: `python faulty_ranks.py <directory> all`.

Each scenario is a trial whose one rank does something that the other one does not, somewhere in a stretch of training.
All scenarios share one pair of processes, so that each also shows that the ones before left nothing behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch
from dray.training.parallel import agreement
from tests import queued
from tests.pytorch.fakes import FakeHost
from tests.pytorch.regression import Regression, two

Hook = Callable[[], None]
Scenario = tuple[str, int, str, int]


class Faulty(Regression):
    """Two models, of which the second is used after the first; `faults` are raised on one rank, at one place."""

    def __init__(self, context: pytorch.PyTorchTrialContext, faults: dict[str, Hook]) -> None:
        super().__init__(context)
        self.faults = faults
        self.seen: list[Any] = []
        self.head = context.wrap_model(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
        self.second = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.05))

    def at(self, place: str) -> None:
        if place in self.faults:
            self.faults[place]()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"faults": FaultyCallback(self)}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.at("build_training_data_loader")
        return super().build_training_data_loader()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.at(f"before forward {batch_idx}")
        hidden = self.model(batch[0])
        self.at(f"between models {batch_idx}")
        loss = nn.functional.mse_loss(self.head(hidden), batch[1])
        self.at(f"before backward {batch_idx}")
        self.context.backward(loss)
        self.at(f"before step {batch_idx}")
        self.context.step_optimizer(self.optimizer)
        self.context.step_optimizer(self.second)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.at(f"evaluate {batch_idx}")
        self.seen.append(next(self.head.buffers()).tolist())
        loss = nn.functional.mse_loss(self.head(self.model(batch[0])), batch[1])
        return {"validation_loss": loss, "batches_seen": 1.0, "rank": float(self.context.distributed.rank)}


class FaultyCallback(pytorch.PyTorchCallback):
    def __init__(self, trial: Faulty) -> None:
        self.at = trial.at

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.at("on_trial_startup")

    def on_training_start(self) -> None:
        self.at("on_training_start")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.at(f"on_training_epoch_start {epoch_idx}")

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.at("on_training_workload_end")

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.at("on_validation_end")

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.at("on_checkpoint_upload_end")


def raising(kind: type[BaseException], *arguments: Any) -> Hook:
    def hook() -> None:
        raise kind(*arguments)

    return hook


FAULTS = {
    "leave": raising(pytorch.ShouldExit),
    "drop": raising(pytorch.ShouldExit, True),
    "invalid": raising(pytorch.InvalidHP, "too wide"),
    "fail": raising(KeyError, "gone"),
    "exit": raising(SystemExit, 3),
}

#: (what is raised, on which rank, where, aggregation frequency)
SCENARIOS: list[Scenario] = [
    *((kind, rank, "before backward 4", 1) for kind in ("leave", "fail") for rank in (0, 1)),
    ("drop", 0, "before backward 4", 1),
    *((kind, 1, "before backward 4", 1) for kind in ("invalid", "exit")),
    *(("fail", 1, place, 1) for place in ("before forward 4", "between models 4", "before step 4")),
    ("leave", 1, "on_training_epoch_start 1", 1),
    # The other one goes on for a batch before it needs anything of this rank.
    *((kind, 1, "before backward 4", 2) for kind in ("leave", "fail")),
    ("fail", 1, "on_trial_startup", 1),
    ("invalid", 0, "build_training_data_loader", 1),
    ("leave", 1, "on_training_start", 1),
    ("leave", 1, "on_training_workload_end", 1),
    ("fail", 1, "evaluate 1", 1),
    ("invalid", 0, "on_validation_end", 1),
    ("fail", 1, "on_checkpoint_upload_end", 1),
]


def in_training(place: str) -> bool:
    """Whether the other rank waits for this one's gradients."""
    return place.startswith(("before ", "between ", "on_training_epoch_start"))


def scenarios(backend: str) -> list[Scenario]:
    """Outside of training ranks meet in exchanges alone, which are the same with each backend."""
    return [scenario for scenario in SCENARIOS if backend == "gloo" or in_training(scenario[2])]


def name(scenario: Scenario) -> str:
    return "-".join(map(str, scenario)).replace(" ", "_")


def faulty(directory: Path, kind: str, rank: int, place: str, aggregation: int) -> dict[str, Any]:
    leave = (lambda: queued.gone_for(FAULTS[kind])) if in_training(place) else FAULTS[kind]
    mine = {place: leave} if int(os.environ["RANK"]) == rank else {}
    return two(
        lambda context: Faulty(context, mine),
        directory,
        max_length=Batch(9),
        reporting_period=Batch(6),
        aggregation_frequency=aggregation,
    )


def sound(directory: Path, batches: int) -> dict[str, Any]:
    return two(lambda context: Faulty(context, {}), directory, max_length=Batch(batches))


def restarted(directory: Path, rank: int) -> dict[str, Any]:
    """A run that one rank leaves in its fifth batch, and another from its last checkpoint."""
    mine = {"before backward 4": lambda: queued.gone_for(FAULTS["leave"])} if rank == 1 else {}
    first = two(lambda context: Faulty(context, mine), directory, max_length=Batch(9), checkpoint_period=Batch(3))
    queued.init_again_if_aborted(directory / "rendezvous", rank, 2)
    mine_kept = [checkpoint for *_, checkpoint in first["reports"] if checkpoint is not None]
    kept = DistributedContext.from_torch_distributed().broadcast(mine_kept)
    again = two(lambda context: Faulty(context, {}), directory, max_length=Batch(9), latest_checkpoint=kept[-1])
    return {"kept": kept, **again}


def data_of_different_lengths(directory: Path) -> dict[str, Any]:
    """Bare loaders: rank 0 has six batches, rank 1 four."""

    class Bare(Regression):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            records = 24 - 8 * self.context.distributed.rank
            x = torch.linspace(-1, 1, records * 4).reshape(records, 4)
            dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
            return torch.utils.data.DataLoader(dataset, batch_size=4)

    return two(Bare, directory, max_length=Batch(9))


def shards_of_different_lengths(directory: Path) -> dict[str, Any]:
    """Five batches an epoch: rank 0 has three of them, rank 1 two."""

    class Uneven(Regression):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.seen: list[Any] = []

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"logging": Logging(self.seen)}

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return self.data(20)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.seen.append((epoch_idx, batch_idx, self.context.is_epoch_start(), self.context.is_epoch_end()))
            return super().train_batch(batch, epoch_idx, batch_idx)

    return two(Uneven, directory, max_length=Epoch(2), validation_period=Epoch(1))


class Logging(pytorch.PyTorchCallback):
    """Which epochs end on a rank."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.seen.append(f"epoch {epoch_idx} ends")


def constructor(directory: Path) -> None:
    """Before `fit()`: the rank that fails does not come to it, and its process ends."""
    with use_host(FakeHost(directory)):
        distributed = DistributedContext.from_torch_distributed()
        with pytorch.init(hparams={"global_batch_size": 8}, distributed=distributed) as context:
            trial = Regression(context)
            if context.distributed.rank == 1:
                raise pytorch.InvalidHP("too wide")
            pytorch.Trainer(trial, context).fit(max_length=Batch(3))


def main(directory: Path, what: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    queued.init(directory / f"rendezvous_{what}", rank, 2)
    agreement.LEAVE_S = 0.5
    if what == "constructor":
        constructor(directory / what)
        return
    results: dict[str, Any] = {}
    for scenario in scenarios(os.environ["TEST_BACKEND"]):
        results[name(scenario)] = faulty(directory / name(scenario), *scenario)
        again = directory / f"rendezvous_after_{name(scenario)}"
        results[name(scenario)]["aborted"] = queued.init_again_if_aborted(again, rank, 2)
    results["restarted"] = restarted(directory / "restarted", rank)
    results["data_of_different_lengths"] = data_of_different_lengths(directory / "data")
    queued.init_again_if_aborted(directory / "rendezvous_after_data", rank, 2)
    results["shards_of_different_lengths"] = shards_of_different_lengths(directory / "shards")
    results |= {f"sound_{batches}": sound(directory / f"sound_{batches}", batches) for batches in (4, 9)}
    torch.save(results, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
