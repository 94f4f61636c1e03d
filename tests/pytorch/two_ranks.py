"""What tests/pytorch/test_two_ranks.py runs in two real processes: `python two_ranks.py <directory>`, once a rank.

Each scenario returns what its rank saw; all of them are saved to <directory>/rank_<n>.pt. A scenario is a function of a
directory that both ranks share.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.storage.manifest import Listed
from dray.training.checkpoint import saver
from dray.training.host import Report
from dray.training.parallel import agreement
from dray.training.parallel.transport import TorchTransport
from tests import queued
from tests.pytorch.fakes import FakeHost, state_of

Init = dict[str, Any]


class Regression(pytorch.PyTorchTrial):
    """24 records, shuffled, in global batches of 8."""

    dropout = 0.0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.callbacks: dict[str, pytorch.PyTorchCallback] = {}
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1))
        self.model = context.wrap_model(net)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.callbacks

    def data(self, records: int, **kwargs: Any) -> pytorch.DataLoader:
        x = torch.linspace(-1, 1, records * 4).reshape(records, 4)
        dataset = torch.utils.data.TensorDataset(x, (x**2).sum(1, keepdim=True))
        return pytorch.DataLoader(dataset, batch_size=self.context.get_per_slot_batch_size(), **kwargs)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.data(24, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.data(20)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch), "batches_seen": 1.0, "rank": float(self.context.distributed.rank)}

    def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
        reducers = pytorch.Reducer
        return {"validation_loss": reducers.AVG, "batches_seen": reducers.SUM, "rank": reducers.AVG}


def run(
    trial_class: Callable[[pytorch.PyTorchTrialContext], Any],
    host: FakeHost,
    *,
    distributed: DistributedContext | None = None,
    aggregation_frequency: int = 1,
    global_batch_size: int = 8,
    exp_conf: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] = lambda trial: None,
    **fit: Any,
) -> dict[str, Any]:
    """Train, on one process or on this rank's share, and tell what came of it."""
    error = None
    with (
        use_host(host),
        pytorch.init(
            hparams={"global_batch_size": global_batch_size},
            exp_conf=exp_conf,
            distributed=distributed,
            aggregation_frequency=aggregation_frequency,
        ) as context,
    ):
        trial = trial_class(context)
        prepare(trial)
        try:
            pytorch.Trainer(trial, context).fit(**fit)
        except (Exception, SystemExit) as caught:
            error = f"{type(caught).__name__}: {caught}"
        return {
            "error": error,
            "weights": state_of(context)["models_state_dict"][0],
            "opened": len(host.opened),
            "reports": [(r.batches, r.training, r.validation, r.checkpoint) for r in host.reports],
            "epochs": host.reports[-1].epochs if host.reports else None,
            "trial": getattr(trial, "seen", None),
        }


def two(trial_class: Any, directory: Path, **kwargs: Any) -> dict[str, Any]:
    return run(trial_class, FakeHost(directory), distributed=DistributedContext.from_torch_distributed(), **kwargs)


# ------------------------------------------------------------------------------------------------------------ scenarios


def training(directory: Path) -> dict[str, Any]:
    return two(Regression, directory, max_length=Batch(7), reporting_period=Batch(3), checkpoint_period=Batch(2))


def aggregation(directory: Path) -> dict[str, Any]:
    return two(Regression, directory, max_length=Batch(6), aggregation_frequency=3)


COMPRESSED = {"optimizations": {"gradient_compression": True}}


class Grouped(Regression):
    """Notes which process groups its gradients are summed in."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.seen: set[str] = set()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        reduce = dist.all_reduce

        def noted(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            own = group is self.model.process_group and group is not dist.group.WORLD
            self.seen.add(f"{tensor.dtype}, {'own' if own else 'another'} group")
            return reduce(tensor, *args, group=group, **kwargs)

        dist.all_reduce = noted
        try:
            return super().train_batch(batch, epoch_idx, batch_idx)
        finally:
            dist.all_reduce = reduce


def compressed(directory: Path) -> dict[str, Any]:
    return two(Grouped, directory, max_length=Batch(7), exp_conf=COMPRESSED)


def compressed_and_left(directory: Path) -> dict[str, Any]:
    class Leaving(Regression):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if self.context.distributed.rank == 1 and batch_idx == 2:
                queued.gone_for(invalid)
            return super().train_batch(batch, epoch_idx, batch_idx)

    def invalid() -> None:
        raise pytorch.InvalidHP("too wide")

    return two(Leaving, directory, max_length=Batch(7), exp_conf=COMPRESSED)


def last(directory: Path) -> list[tuple[int, str | None]]:
    """Three local runs that train on; each rank with results of its own."""
    os.environ["DRAY_HOME"] = str(directory / os.environ["RANK"])
    begun: list[tuple[int, str | None]] = []

    class Started(pytorch.PyTorchCallback):
        def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
            begun.append((first_batch_idx, checkpoint_uuid))

    class Starting(Regression):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"started": Started()}

    for length in (1, 3, 4):
        peers = DistributedContext.from_torch_distributed()
        with pytorch.init(hparams={"global_batch_size": 8}, distributed=peers) as context:
            pytorch.Trainer(Starting(context), context).fit(max_length=Batch(length), latest_checkpoint="last")
    return begun


def unseeded(directory: Path) -> dict[str, Any]:
    """A local run, whose ranks come with random numbers of their own."""
    os.environ["DRAY_HOME"] = str(directory)
    peers = DistributedContext.from_torch_distributed()
    torch.manual_seed(40 + peers.rank)
    with pytorch.init(distributed=peers) as context:
        trained, frozen = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        nn.init.normal_(frozen[1].running_mean)
        drawn = [tensor.clone() for tensor in (trained.weight, frozen[0].weight, frozen[1].running_mean)]
        trained, frozen = context.wrap_model(trained), context.wrap_model(frozen)
        begun = [trained.module.weight, frozen[0].weight, frozen[1].running_mean]
        return {"drawn": drawn, "begun": [each.detach() for each in begun], "seed": context.get_trial_seed()}


@pytorch.pretrained
def embedding(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def pretrained_weights(directory: Path) -> dict[str, Any]:
    """A frozen part that each rank loads, its buffers different on each, and a head."""
    peers = DistributedContext.from_torch_distributed()
    with use_host(FakeHost(directory)), pytorch.init(distributed=peers) as context:
        torch.manual_seed(40 + peers.rank)
        net = nn.Sequential(embedding(1), nn.Linear(4, 1))
        nn.init.normal_(net[0][1].running_mean)
        address = net[0][0].weight.data_ptr()
        net = context.wrap_model(net)
        is_shared = net.module[0][0].weight.data_ptr() == address == embedding(1)[0].weight.data_ptr()
        state = {name: value.clone() for name, value in net.module.state_dict().items()}
        context.backward(net(torch.randn(8, 4)).sum())
        gradient = net.module[1].weight.grad

    class Different(Regression):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.wrap_model(nn.Sequential(embedding(peers.rank), nn.Linear(4, 1)))

    error = two(Different, directory / "different", max_length=Batch(1))["error"]
    return {"state": state, "shared": is_shared, "gradient": gradient, "error": error}


@contextmanager
def all_are_large() -> Iterator[None]:
    """Checkpoints of any size are written while training goes on."""
    before, saver.AT_ONCE_BYTES = saver.AT_ONCE_BYTES, 0
    yield
    saver.AT_ONCE_BYTES = before


def failure_behind(directory: Path) -> dict[str, Any]:
    class Broken(FakeHost):
        def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
            raise LookupError("the store is gone")

    peers = DistributedContext.from_torch_distributed()
    with all_are_large():
        return run(Regression, Broken(directory), distributed=peers, max_length=Batch(7), checkpoint_period=Batch(2))


def hook_on_one_rank(directory: Path) -> dict[str, Any]:
    class Hearing(pytorch.PyTorchCallback):
        def __init__(self, seen: list[str]) -> None:
            self.seen = seen

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            self.seen.append(uuid)

    def prepare(trial: Any) -> None:
        trial.seen = []
        if trial.context.distributed.rank == 1:
            trial.callbacks.update(hearing=Hearing(trial.seen))

    with all_are_large():
        return two(Regression, directory, max_length=Batch(4), checkpoint_period=Batch(2), prepare=prepare)


def custom_metrics(directory: Path) -> dict[str, Any]:
    class Custom(Regression):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.seen: list[Any] = []
            self.order = context.wrap_reducer(lambda values: "".join(map(str, values)), name="order")

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.order.update(2 * batch_idx + self.context.distributed.rank)
            return super().train_batch(batch, epoch_idx, batch_idx)

    class Watching(pytorch.PyTorchCallback):
        def __init__(self, seen: list[Any]) -> None:
            self.seen = seen

        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
            self.seen.append((avg_metrics, [float(row["loss"]) for row in batch_metrics]))

        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            self.seen.append(dict(metrics))

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            self.seen.append(uuid)

    return two(Custom, directory, max_length=Batch(3), prepare=lambda t: t.callbacks.update(w=Watching(t.seen)))


def full_dataset(directory: Path) -> dict[str, Any]:
    class Full(Regression):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.seen: list[int] = []

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            self.seen.append(len(data_loader.dataset))
            return {"validation_loss": 2.0}

    return two(Full, directory, max_length=Batch(1))


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self(x), y)


class Parted(Regression):
    """Its model has buffers, which a forward pass in training exchanges."""

    def wrap(self, model: nn.Module) -> Any:
        return self.context.wrap_model(model)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context, self.callbacks, self.seen = context, {}, list[Any]()
        self.model = self.wrap(Forces())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.data(12)  # two batches on one rank, one on the other


def gradients_in_validation(directory: Path) -> dict[str, Any]:
    def force(trial: Any, x: torch.Tensor) -> float:
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            (found,) = torch.autograd.grad(trial.model(x).sum(), x)
        return float(found.pow(2).mean())

    class Batches(Parted):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": force(self, batch[0])}

        def evaluation_reducer(self) -> pytorch.Reducer:  # type: ignore[override]
            return pytorch.Reducer.AVG

    class Full(Parted):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"validation_loss": sum(force(self, x) for x, _ in data_loader)}

    found = {}
    for kind in (Batches, Full):
        found[kind.__name__] = two(kind, directory / kind.__name__, max_length=Batch(4), validation_period=Batch(2))
    return found


def unaveraged(directory: Path) -> dict[str, Any]:
    """Ways to train with gradients that are each rank's own, and one that only looks like it."""

    class Method(Parted):
        def loss(self, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = self.model.loss(*batch)
            return loss

    class Later(Parted):
        def loss(self, batch: Any) -> torch.Tensor:
            if self.context.current_train_batch() >= 3:
                return nn.functional.mse_loss(self.model.head(self.model.body(batch[0])), batch[1])
            return super().loss(batch)

    class Unfrozen(Parted):
        def wrap(self, model: nn.Module) -> Any:
            model.body.requires_grad_(False)  # type: ignore[operator, union-attr]
            return super().wrap(model)

        def loss(self, batch: Any) -> torch.Tensor:
            self.model.body.requires_grad_(self.context.current_train_batch() >= 1)
            return super().loss(batch)

    class Unwrapped(Parted):
        def wrap(self, model: nn.Module) -> Any:
            super().wrap(nn.Linear(1, 1))
            return model

    class FrozenAfterWrapping(Parted):
        def wrap(self, model: nn.Module) -> Any:
            model = self.context.wrap_model(model, ddp_kwargs={"find_unused_parameters": True})
            model.body.requires_grad_(False)  # type: ignore[operator, union-attr]
            return model

        def loss(self, batch: Any) -> torch.Tensor:
            self.model.body.requires_grad_(self.context.current_train_batch() >= 1)
            return super().loss(batch)

    kinds = (Method, Later, Unfrozen, Unwrapped, FrozenAfterWrapping)
    return {kind.__name__: two(kind, directory / kind.__name__, max_length=Batch(6)) for kind in kinds}


def copies(directory: Path) -> dict[str, Any]:
    class Target(Parted):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.target = context.wrap_model(copy.deepcopy(self.model).requires_grad_(False))
            self.average = torch.optim.swa_utils.AveragedModel(self.model)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            self.average.update_parameters(self.model)
            if batch_idx == 2:
                self.target.load_state_dict(self.model.state_dict())
                self.seen = [
                    list(self.model.state_dict()),
                    list(self.target.state_dict()),
                    list(self.average.state_dict()),
                ]
                self.seen.append(torch.equal(self.target.head.weight, self.model.head.weight))
                if self.context.distributed.rank == 0:
                    self.target(batch[0].requires_grad_(True)).sum().backward()  # waits for no other rank
            return metrics

    return two(Target, directory, max_length=Batch(3))


def words_of_all_lengths(directory: Path) -> list[list[Any]]:
    """What each rank has to say may fit into the one exchange that there mostly is, or not, on one rank or on both."""
    peers = DistributedContext.from_torch_distributed()
    room = TorchTransport.ROOM
    told: list[Any] = []
    for lengths in ((1, 2), (room - 30, 3), (room, 1), (2, 3 * room), (9 * room, room), (1, 1)):
        told.append([len(word) for word in peers.allgather("x" * lengths[peers.rank])] == list(lengths))
    return told


class Heard:
    """How many of these this rank has received."""

    count = 0

    def __setstate__(self, state: Any) -> None:
        Heard.count += 1


def gathered(directory: Path) -> tuple[int, Any]:
    """How many objects came to this rank, and what of them."""
    peers = DistributedContext.from_torch_distributed()
    heard = Heard()
    heard.of = peers.rank  # type: ignore[attr-defined]
    rows = peers.gather([heard, "x" * TorchTransport.ROOM, peers.rank])
    return Heard.count, rows and [row[2] for row in rows]


SCENARIOS = [
    words_of_all_lengths,
    gathered,
    training,
    aggregation,
    compressed,
    compressed_and_left,
    last,
    unseeded,
    pretrained_weights,
    gradients_in_validation,
    unaveraged,
    copies,
    failure_behind,
    hook_on_one_rank,
    custom_metrics,
    full_dataset,
]


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    queued.init(directory / "rendezvous", rank, 2)
    agreement.LEAVE_S = 0.5
    results = {}
    for scenario in SCENARIOS:
        results[scenario.__name__] = scenario(directory / scenario.__name__)
        queued.init_again_if_aborted(directory / f"rendezvous_after_{scenario.__name__}", rank, 2)
    torch.save(results, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
