"""Context and expert parallelism by the trial's own code, on four processes: the training of one process.

Along `cp` each process has a part of every sequence, and attention passes keys and values around the ring. Along `ep`
each has some of the experts, as parts of DTensors.
"""

from __future__ import annotations

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
from tests.pytorch.fakes import FakeHost, state_of
from tests.pytorch.processes import results_of, serve

pytestmark = pytest.mark.slow

WIDTH, HEADS, EXPERTS, TOKENS, VOCABULARY, RECORDS = 8, 2, 4, 8, 11, 12
HALF, WHOLE = 2, 4
"""Batches up to the checkpoint, and in all."""


class Passed(torch.autograd.Function):
    """What the rank before has, in a ring; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return pass_on(x, group, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return pass_on(gradient, ctx.group, -1), None


def pass_on(x: torch.Tensor, group: Any, step: int) -> torch.Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent, received = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    sending = dist.isend(sent, group=group, group_dst=(rank + step) % size)
    dist.recv(received, group=group, group_src=(rank - step) % size)
    sending.wait()
    return received


class Entered(torch.autograd.Function):
    """The same tensor on all ranks, which each compute a part from it: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The sum of the ranks' parts, from which all compute the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Attention(nn.Module):
    """Causal attention. This rank has the tokens from `rank * length` on."""

    def __init__(self, ring: Any) -> None:
        super().__init__()
        self.ring = ring
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        size, rank = dist.get_world_size(self.ring), dist.get_rank(self.ring)
        qkv = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, pair = qkv[0], qkv[1:]
        place = torch.arange(length)
        total, norm, largest = torch.zeros_like(query), 0.0, torch.tensor(-1e30, dtype=x.dtype)
        for step in range(size):
            keys, values = pair
            scores = query @ keys.mT / keys.shape[-1] ** 0.5
            seen = place[:, None] + rank * length >= place + (rank - step) % size * length
            scores = scores.masked_fill(~seen, -1e30)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True)).detach()
            weights, shrink = (scores - new).exp() * seen, (largest - new).exp()
            total, norm, largest = total * shrink + weights @ values, norm * shrink + weights.sum(-1, True), new
            if step + 1 < size:
                pair = Passed.apply(pair, self.ring)
        return self.out((total / norm).transpose(1, 2).reshape(batch, length, WIDTH))


class Experts(nn.Module):
    """Each token goes to its best expert."""

    def __init__(self, mesh: Any, *, as_dtensor: bool, sums_gradients: bool) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.group, self.sums_gradients = mesh.get_group(), sums_gradients
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        for name in ("up", "down"):
            weight = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
            setattr(self, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]) if as_dtensor else weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, best = self.router(x).softmax(-1).max(-1, keepdim=True)
        if not hasattr(self.up, "to_local"):
            return some(x, gate, best, 0, self.up, self.down)
        up, down = self.up.to_local(), self.down.to_local()
        if self.sums_gradients:
            x, gate = Entered.apply(x, self.group), Entered.apply(gate, self.group)
        return Summed.apply(some(x, gate, best, dist.get_rank(self.group) * len(up), up, down), self.group)


def some(x: Any, gate: Any, best: Any, first: int, up: Any, down: Any) -> torch.Tensor:
    """What the experts from `first` on add to the tokens that are theirs."""
    parts = [torch.tanh(x @ up[own]) @ down[own] * gate * (best == first + own) for own in range(len(up))]
    return torch.stack(parts).sum(0)


class Block(nn.Module):
    def __init__(self, ring: Any, experts: Experts) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.experts = Attention(ring), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.experts(self.second(x))


class Net(nn.Module):
    def __init__(self, mesh: Any, **experts: Any) -> None:
        super().__init__()
        self.ring = mesh["cp"].get_group()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.block = Block(self.ring, Experts(mesh["ep"], **experts))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.token(tokens) + self.place(places)))


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record: int) -> torch.Tensor:
        return (torch.arange(TOKENS + 1) * (record + 1) + record) % VOCABULARY


class Trial(pytorch.PyTorchTrial):
    parallel: FullyShard | None = FullyShard(units=[Block])
    as_dtensor = sums_gradients = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(7)
        net = self.built().double()
        self.model = context.wrap_model(net, parallel=self.parallel)
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.02))

    def built(self) -> nn.Module:
        mesh = self.context.device_mesh
        return Net(mesh, as_dtensor=self.as_dtensor, sums_gradients=self.sums_gradients)

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(Texts(), self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Texts(), batch_size=RECORDS // 2)

    def loss(self, texts: torch.Tensor) -> torch.Tensor:
        """Of this rank's part of the sequences."""
        places = torch.arange(TOKENS).chunk(dist.get_world_size(self.model.ring))[dist.get_rank(self.model.ring)]
        logits = self.model(texts[:, places], places)
        return nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, places + 1].flatten())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        norms = []
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: norms.append(nn.utils.clip_grad_norm_(parameters, 0.5))
        )
        return {"loss": loss, "norm": norms[0]}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


class Replicated(Trial):
    """By DistributedDataParallel: every process has all experts."""

    parallel, as_dtensor = None, False


class Forgetful(Trial):
    """Without the sum over `ep` of the gradients that enter the experts."""

    sums_gradients = False


class Stages(Replicated):
    """A model of which each process has other layers."""

    def built(self) -> nn.Module:
        return nn.ModuleDict({f"layer{self.context.distributed.rank}": nn.Linear(1, 1)})


def run(kind: type[Trial], directory: Path, mesh: dict[str, int], latest: Path | None = None) -> dict[str, Any]:
    host = FakeHost(directory)
    peers = DistributedContext.from_torch_distributed() if dist.is_initialized() else None
    init: dict[str, Any] = {"hparams": {"global_batch_size": 4}, "mesh": mesh, "distributed": peers}
    with use_host(host), pytorch.init(**init) as context:
        try:
            trial = kind(context)
            pytorch.Trainer(trial, context).fit(
                max_length=Batch(WHOLE),
                validation_period=Batch(HALF),
                checkpoint_period=Batch(HALF),
                checkpoint_policy="none",
                latest_checkpoint=None if latest is None else str(latest / f"checkpoint_{HALF}"),
            )
        except (RuntimeError, ValueError) as error:
            return {"error": str(error)}
        return {
            "state": sharded.gathered(state_of(context), keep=True),
            "reports": [(each.batches, each.training, each.validation) for each in host.reports],
        }


def four(directory: Path) -> dict[str, Any]:
    own = {"cp": 2, "ep": 2}
    return {
        "own": run(Trial, directory / "own", own),
        "resumed": run(Trial, directory / "resumed", own, directory / "own"),
        "other mesh": run(Trial, directory / "other mesh", {"ep": 4, "cp": 1}, directory / "own"),
        "replicated": run(Replicated, directory / "replicated", own),
        "forgetful": run(Forgetful, directory / "forgetful", own),
        "stages": run(Stages, directory / "stages", {"pp": 4}),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("ranks")
    found, alone = results_of(4, __file__, place)[0]["four"], {"cp": 1, "ep": 1}
    found["one"] = run(Trial, place / "one", alone)
    found["resumed by one"] = run(Trial, place / "resumed by one", alone, place / "four" / "own")
    return found


def assert_close(run: Any, other: Any) -> None:
    torch.testing.assert_close(run, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["own", "resumed", "other mesh", "replicated", "resumed by one"])
def test_training_is_that_of_one_process(runs: dict[str, Any], name: str) -> None:
    run, one = runs[name], runs["one"]
    for part in ("models_state_dict", "optimizers_state_dict"):
        assert_close(run["state"][part], one["state"][part])
    assert_close(run["reports"], one["reports"][-len(run["reports"]) :])


def test_gradients_that_differ_along_a_dimension_of_the_trials_own_are_an_error(runs: dict[str, Any]) -> None:
    assert "dray does not average over ep" in runs["forgetful"]["error"]
    assert "'token.weight'" in runs["forgetful"]["error"]


def test_parameters_of_one_rank_alone_are_an_error(runs: dict[str, Any]) -> None:
    assert "on rank 1, 2, 3 the model's parameters have other names" in runs["stages"]["error"]


if __name__ == "__main__":
    serve([four])
