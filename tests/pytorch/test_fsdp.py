"""Sharded and tensor-parallel models in two and four real processes: the same training as DDP's or one process's, on a
part of the memory. All scenarios of a number of processes share them; each is a few trainings.
"""

# ruff: noqa: SLF001 - looks into torch's FSDP

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, FullyShard
from dray.training.checkpoint import shard_file, sharded
from dray.training.checkpoint.export import whole_models, write_safetensors
from dray.training.parallel import sharding
from dray.worker.isolation.snapshot import ProcessSnapshot
from tests import queued
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import results_of, serve
from tests.pytorch.resuming import assert_equal
from tests.pytorch.sharding import foreach_by_default
from tests.pytorch.test_profiler import traced
from tests.training.test_usage import read

pytestmark = pytest.mark.slow

WIDTH, BLOCKS, GLOBAL_BATCH = 16, 3, 8
LOADED: list[int] = []
CALLS = {"forward": 0, "compile": 0}


class Block(nn.Module):
    skipped = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            CALLS["forward"] += 1
        if self.skipped:
            return x
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


UNITS, UNSYNCED = FullyShard(units=[Block]), FullyShard(units=[Block], sync_each_batch=False)
AGGREGATED = {"DDP": None, "synced": UNITS, "unsynced": UNSYNCED}


class Trial(pytorch.PyTorchTrial):
    """A regression of 24 records, shuffled, in global batches of 8; validated on 20 in batches of 4 a slot."""

    parallel: FullyShard | None = UNITS
    clip: float | None = None
    dtype = torch.float32
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.losses: list[torch.Tensor] = []
        self.model = self.wrapped()
        self.optimizer = context.wrap_optimizer(self.make_optimizer(self.model.parameters(), lr=0.01))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=400)
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.records = context.wrap_reducer(lambda values: sorted(values), name="records", for_training=False)

    def wrapped(self) -> nn.Module:
        torch.manual_seed(5)
        return self.context.wrap_model(Net().to(self.dtype), parallel=self.parallel)

    def data(self, records: int, batch_size: int, **kwargs: Any) -> pytorch.DataLoader:
        x = torch.linspace(-1, 1, records * 4).reshape(records, 4).to(self.dtype)
        dataset = torch.utils.data.TensorDataset(x, (x**2).sum(1, keepdim=True), torch.arange(records))
        return pytorch.DataLoader(dataset, batch_size=batch_size, **kwargs)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.data(24, self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.data(20, 4)

    def loss(self, batch: Any) -> torch.Tensor:
        # The outputs of a model in half precision are so too, of which older versions of torch have no `mse_loss`.
        return nn.functional.mse_loss(self.model(batch[0]).to(batch[1]), batch[1])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.context.backward(loss)
        norms = []

        def clip(parameters: Any) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, self.clip))  # type: ignore[arg-type]

        self.context.step_optimizer(self.optimizer, clip_grads=None if self.clip is None else clip)
        return {"loss": loss, **({} if self.clip is None else {"norm": sum(norms)})}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        for record in batch[2].tolist():
            self.records.update(record)
        return {"validation_loss": self.loss(batch)}


class Plain(Trial):
    parallel = None


def run(
    trial_class: Callable[[pytorch.PyTorchTrialContext], Any],
    directory: Path | None = None,
    *,
    distributed: DistributedContext | None = None,
    init: dict[str, Any] | None = None,
    look: Callable[[Any], Any] = lambda trial: None,
    **fit: Any,
) -> dict[str, Any]:
    """Train, and tell what came of it."""
    host, error = FakeHost(directory), None
    arguments = {"hparams": {"global_batch_size": GLOBAL_BATCH}, **(init or {})}
    with use_host(host), pytorch.init(distributed=distributed, **arguments) as context:
        trial = trial_class(context)
        try:
            pytorch.Trainer(trial, context).fit(**fit)
        except (Exception, SystemExit) as caught:
            error = f"{type(caught).__name__}: {caught}"
        return {
            "error": error,
            "losses": [float(loss) for loss in trial.losses],
            "reports": [(r.batches, r.training, r.validation, r.checkpoint) for r in host.reports],
            "checkpoints": host.checkpoints(),
            "seen": look(trial),
        }


def ranks(trial_class: Any, directory: Path, **kwargs: Any) -> dict[str, Any]:
    return run(trial_class, directory, distributed=DistributedContext.from_torch_distributed(), **kwargs)


def variant(base: type[Trial], **attributes: Any) -> type[Trial]:
    return type(base.__name__, (base,), attributes)


def compared(kind: type[Trial], directory: Path, **kwargs: Any) -> dict[str, dict[str, Any]]:
    """A trial sharded, and with DDP."""
    plain = variant(kind, parallel=None)
    return {name: ranks(each, directory / name, **kwargs) for name, each in {"Plain": plain, "Trial": kind}.items()}


# ------------------------------------------------------------------------------------------------------------ scenarios

FIT: dict[str, Any] = {"max_length": Batch(20), "validation_period": Batch(10)}
CLIPPED: dict[str, Any] = {"clip": 0.1, "dtype": torch.float64}
"""In float64: float32's rounding errors of the norm grow."""


def losses_of_four(directory: Path) -> dict[str, Any]:
    return compared(Trial, directory, **FIT)


def clipped(directory: Path) -> dict[str, Any]:
    return compared(variant(Trial, **CLIPPED), directory, **FIT)


def aggregated(directory: Path) -> dict[str, Any]:
    """With validations in the middle of aggregations."""
    # Adam's steps are the same whether gradients are averaged or not.
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    kinds = {name: variant(Trial, parallel=each, make_optimizer=staticmethod(sgd)) for name, each in AGGREGATED.items()}
    found = {}
    for averages in (True, False):
        optimizations = {"aggregation_frequency": 4, "average_aggregated_gradients": averages}
        init = {"exp_conf": {"optimizations": optimizations}}
        fit: dict[str, Any] = {"max_length": Batch(16), "validation_period": Batch(6), "init": init}
        for name, kind in kinds.items():
            found[name, averages] = ranks(kind, directory / f"{name} {averages}", **fit)
    return found


def gradient_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of gradients on this rank after a backward pass: all, and those that wait for an all-reduce."""
    groups = [group for module in sharding.fsdp_modules(model) for group in sharding.param_groups(module)]
    wholes = [parameter._unsharded_param.grad for group in groups for parameter in group.fsdp_params]
    shards = [getattr(parameter.grad, "_local_tensor", None) for parameter in model.parameters()]
    partial = [group._partial_reduce_output for group in groups]
    waiting, rest = (sum(each.nbytes for each in kept if each is not None) for kept in (partial, wholes + shards))
    return waiting + rest, waiting


class Watching(Trial):
    """Counts the sums over the ranks, and the bytes of gradients after each backward pass."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.share = sum(each.to_local().nbytes for each in self.model.parameters())
        self.held: list[tuple[int, int]] = []
        backward = context.backward
        context.backward = lambda loss: (backward(loss), self.held.append(gradient_bytes(self.model)))  # type: ignore

    def seen(self) -> dict[str, Any]:
        return {"held": [(of_all / self.share, partial > 0) for of_all, partial in self.held]}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what FSDP does in the block, and the all-reduces of DTensors."""
    count: Counter[str] = Counter()
    begins, reduces = _fsdp_param_group.record_function, funcol.all_reduce

    def record(name: str) -> Any:
        count[name.partition(" ")[0]] += 1
        return begins(name)

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        count["all_reduce"] += 1
        return reduces(*args, **kwargs)

    _fsdp_param_group.record_function, funcol.all_reduce = record, all_reduce
    try:
        yield count
    finally:
        _fsdp_param_group.record_function, funcol.all_reduce = begins, reduces


def held(directory: Path) -> dict[str, Any]:
    """Gradients in 8 batches of two aggregations; on four ranks also of two replicas."""
    kinds = {"default": (Watching, {}), "unsynced": (variant(Watching, parallel=UNSYNCED), {})}
    kinds["float8"] = variant(Watching, parallel=FullyShard(units=[Block], float8=True)), {}
    if dist.get_world_size() == 4:
        kinds["replicas"] = Watching, {"mesh": {"dp_replicate": 2}}
    fit: dict[str, Any] = {"max_length": Batch(8), "look": Watching.seen}
    found = {}
    for name, (kind, init) in kinds.items():
        with counted() as count:
            seen = ranks(kind, directory / name, init={"aggregation_frequency": 4, **init}, **fit)["seen"]
        found[name] = {**seen, "sums": count["FSDP::post_backward_reduce"], "scales": count["all_reduce"]}
    return found


class Skipping(Trial):
    """Only the first of the four batches of an aggregation uses the first block, and only the last the second one."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        net = self.model.module if self.parallel is None else self.model
        for block, used in ((0, batch_idx % 4 == 0), (1, batch_idx % 4 == 3)):
            net.blocks[block].skipped = not used
        return super().train_batch(batch, epoch_idx, batch_idx)


def skipping(directory: Path) -> dict[str, Any]:
    fit: dict[str, Any] = {"max_length": Batch(16), "checkpoint_period": Batch(6), "checkpoint_policy": "none"}
    found = {}
    for name, mesh in {"shards": {}, "replicas": {"dp_replicate": 2}}.items():
        init = {"aggregation_frequency": 4, "mesh": mesh}
        found[name] = ranks(Skipping, directory / name, init=init, **fit)
    latest = str(directory / "replicas" / "checkpoint_6")
    found["resumed"] = ranks(Skipping, directory / "resumed", init=init, latest_checkpoint=latest, **fit)
    return found


def local_bytes(trial: Trial) -> int:
    """Bytes of parameters, gradients and Adam's two moments on this rank."""
    # One more backward pass, for the gradients that the last step has zeroed.
    trial.loss(next(iter(trial.data(4, 4).get_data_loader()))).backward()  # type: ignore[no-untyped-call]
    found: list[Any] = []
    for parameter in trial.model.parameters():
        moments = trial.optimizer.state[parameter]
        found += [parameter, parameter.grad, moments["exp_avg"], moments["exp_avg_sq"]]
    parts = [getattr(tensor.detach(), "to_local", lambda tensor=tensor: tensor)() for tensor in found]
    return sum(part.numel() * part.element_size() for part in parts)


def memory(directory: Path) -> dict[str, Any]:
    return compared(Trial, directory, max_length=Batch(1), look=local_bytes)


class Leaving(Trial):
    """Rank 1 leaves in the third batch, or in its second validation batch, while the others wait for it."""

    error: Exception = pytorch.ShouldExit()
    where = "forward"

    def leave(self, where: str, batch_idx: int, at: int) -> None:
        if where == self.where and batch_idx == at and self.context.distributed.rank == 1:
            queued.gone_for(self.raise_error)

    def raise_error(self) -> None:
        raise self.error

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.leave("forward", batch_idx, 2)
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.context.backward(loss)
        self.leave("step", batch_idx, 2)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.leave("validation", batch_idx, 1)
        return super().evaluate_batch(batch, batch_idx)


def left(directory: Path) -> dict[str, Any]:
    found = {}
    for where in ("forward", "step", "validation"):
        for error in (pytorch.ShouldExit(), pytorch.InvalidHP("too wide"), LookupError("gone")):
            name = f"{where} {type(error).__name__}"
            kind = variant(Leaving, where=where, error=error)
            found[name] = ranks(kind, directory / name, max_length=Batch(9), validation_period=Batch(4))
            queued.init_again_if_aborted(directory / f"again {name}", dist.get_rank(), dist.get_world_size())
    return found


def left_tensor_parallel(directory: Path) -> dict[str, Any]:
    """The ranks share each layer of the blocks, and compute nothing without each other."""
    directory.mkdir(exist_ok=True)
    found = {}
    for where in ("forward", "step", "validation"):
        kind = variant(Leaving, where=where, error=LookupError("gone"), parallel=None, wrapped=TensorParallel.wrapped)
        fit: dict[str, Any] = {"max_length": Batch(9), "validation_period": Batch(4), "init": {"mesh": {"tp": 2}}}
        found[where] = ranks(kind, directory / where, **fit)
        queued.init_again_if_aborted(directory / f"again {where}", dist.get_rank(), dist.get_world_size())
    return found


class Stopping(Trial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 5 and self.context.distributed.rank == 1:
            self.context.set_stop_requested(True)
        return super().train_batch(batch, epoch_idx, batch_idx)


def stopped(directory: Path) -> dict[str, Any]:
    """A stop in the middle of an aggregation."""
    init = {"aggregation_frequency": 4}
    fit: dict[str, Any] = {"max_length": Batch(12), "reporting_period": Batch(6), "init": init}
    found = {}
    for name, parallel in AGGREGATED.items():
        place, latest = directory / name, str(directory / name / "first" / "checkpoint_6")
        trial, stopping = variant(Trial, parallel=parallel), variant(Stopping, parallel=parallel)
        whole = ranks(trial, place / "whole", checkpoint_period=Batch(6), **fit)
        first = ranks(stopping, place / "first", **fit)
        found[name] = {"whole": whole, "first": first, "again": ranks(trial, place, latest_checkpoint=latest, **fit)}
    return found


class Beside(Trial):
    """A sharded model beside a plain one, each with its optimizer and scaler's steps; forward passes without gradients
    between them."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        torch.manual_seed(6)
        self.scale = context.wrap_model(nn.Linear(1, 1))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.scale.parameters(), lr=0.01))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.scale(self.model(batch[0])), batch[1])
        self.losses.append(loss.detach())
        self.context.backward(loss)
        with torch.no_grad():
            self.model(batch[0])
        self.context.step_optimizer(self.optimizer)
        self.context.step_optimizer(self.sgd)
        with torch.no_grad():
            self.losses.append(self.model(batch[0]).mean())
        return {"loss": loss}


def beside(directory: Path) -> dict[str, Any]:
    return compared(Beside, directory, max_length=Batch(8))


def options(directory: Path) -> dict[str, Any]:
    """Each option against the plain model: what it computes stays the same, to the precision that it asks for."""
    given: dict[str, dict[str, Any]] = {
        "function": {"units": lambda module: isinstance(module, Block)},
        "names": {"units": "Block", "reshard_after_forward": False},
        "one unit": {},
        "checkpointing": {"units": [Block], "activation_checkpointing": True},
        "selective": {"units": [Block], "activation_checkpointing": "selective"},
        "compile": {"units": [Block], "activation_checkpointing": True, "compile": True},
        "bfloat16": {"units": [Block], "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
        "float8": {"units": [Block], "float8": True, "activation_checkpointing": "selective"},
    }
    kinds = {name: variant(Trial, parallel=FullyShard(**each)) for name, each in given.items()}
    compiler, calls = nn.Module.compile, {}

    def compiled(module: nn.Module) -> None:
        CALLS["compile"] += 1
        compiler(module, backend="eager")  # the compiler's own takes seconds

    found: dict[str, Any] = {}
    nn.Module.compile = compiled  # type: ignore[assignment, method-assign]
    try:
        for name, kind in {"plain": Plain, **kinds}.items():
            CALLS["forward"] = 0
            found[name] = ranks(kind, directory / name, max_length=Batch(8))
            calls[name] = CALLS["forward"]
    finally:
        nn.Module.compile = compiler  # type: ignore[method-assign]
    return {**found, "calls": calls, "compiled": CALLS["compile"]}


def offloaded(directory: Path) -> dict[str, Any]:
    """Weights in the CPU's memory, with what communicates them from there: clipping, and a whole checkpoint."""

    def look(trial: Trial) -> list[bool]:
        return [
            parameter.offload_to_cpu
            for module in sharding.fsdp_modules(trial.model)
            for group in sharding.param_groups(module)
            for parameter in group.fsdp_params
        ]

    kind = variant(Trial, parallel=FullyShard(units=[Block], cpu_offload=True), **CLIPPED)
    fit: dict[str, Any] = {"max_length": Batch(8), "init": {"exp_conf": {"checkpoint_format": "full"}}}
    return {
        "Plain": ranks(variant(Plain, **CLIPPED), directory / "Plain", **fit),
        "Trial": ranks(kind, directory / "Trial", look=look, **fit),
    }


class Norms(Trial):
    """With buffers that differ between ranks."""

    parallel = FullyShard()

    def wrapped(self) -> nn.Module:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return self.context.wrap_model(net, parallel=self.parallel)


def buffers(directory: Path) -> dict[str, Any]:
    return compared(Norms, directory, max_length=Batch(8), validation_period=Batch(3))


class Full(Trial):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        losses = [float(self.loss(batch)) for batch in data_loader]
        return {"validation_loss": sum(losses), "batches": len(losses)}


def full_dataset(directory: Path) -> dict[str, Any]:
    return compared(Full, directory, max_length=Batch(4))


class OfMeta(Trial):
    def wrapped(self) -> nn.Module:
        torch.manual_seed(5)
        with torch.device("meta"):
            net = Net()
        net = self.context.wrap_model(net, parallel=self.parallel)
        self.begun = full(net)
        return net


class Scaled(Trial):
    """Loss scaling; in the third batch a gradient in the last rank's shard overflows."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
        self.scales: list[float] = []
        super().__init__(context)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.context.backward(self.scaler.scale(loss))
        if batch_idx == 2 and self.context.distributed.rank == self.context.distributed.size - 1:
            gradient: Any = self.model.blocks[1].up.weight.grad
            getattr(gradient, "to_local", lambda: gradient)()[-1, -1] = float("inf")
        norms = []

        def clip(parameters: Any) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))

        self.scaler.unscale_(self.optimizer)
        self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.scaler)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        return {"loss": loss, "norm": norms[0]}


HALF = FullyShard(units=[Block], mp_policy={"param_dtype": "float16", "reduce_dtype": "float32"})


def scales(trial: Scaled) -> Any:
    return {"scales": trial.scales, "weights": weights(trial)}


def scaled(directory: Path) -> dict[str, Any]:
    fit: dict[str, Any] = {"max_length": Batch(8), "look": scales}
    found = {"Trial": ranks(Scaled, directory / "Trial", checkpoint_period=Batch(4), checkpoint_policy="none", **fit)}
    latest = str(directory / "Trial" / "checkpoint_4")
    found["resumed"] = ranks(Scaled, directory / "resumed", latest_checkpoint=latest, **fit)
    found["half"] = ranks(variant(Scaled, parallel=HALF), directory / "half", **fit)
    fused = functools.partial(torch.optim.Adam, fused=True)
    for name, make_optimizer in {"tensor parallel": torch.optim.Adam, "tensor parallel, fused": fused}.items():
        kind = variant(Scaled, parallel=None, wrapped=TensorParallel.wrapped, make_optimizer=make_optimizer)
        found[name] = ranks(kind, directory / name, init={"mesh": {"tp": 2}}, **fit)
    return found


class Watched(Trial):
    """torchmetrics in evaluation, scalars for TensorBoard and a trace of two batches."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        import torchmetrics

        super().__init__(context)
        self.error = context.wrap_reducer(torchmetrics.MeanSquaredError(), name="error", for_training=False)
        self.both = context.wrap_reducer(
            torchmetrics.MetricCollection([torchmetrics.R2Score(), torchmetrics.SpearmanCorrCoef()]), for_training=False
        )
        schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
        context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.context.distributed.rank == 0:
            self.context.get_tensorboard_writer().add_scalar("own", batch_idx, batch_idx)
        with torch.profiler.record_function(f"batch {batch_idx}"):
            return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        predicted = self.model(batch[0])
        self.error.update(predicted, batch[1])
        self.both.update(predicted[:, 0], batch[1][:, 0])
        return {"validation_loss": nn.functional.mse_loss(predicted, batch[1])}


def watched(directory: Path) -> dict[str, Any]:
    return compared(Watched, directory, max_length=Batch(8), validation_period=Batch(4))


@pytorch.pretrained
def base(seed: int) -> nn.Module:
    LOADED.append(seed)
    torch.manual_seed(seed)
    return Net()


class Finetuned(Trial):
    """A head on a pretrained model, of which the first layer is trained too."""

    seed = 1

    def wrapped(self) -> nn.Module:
        frozen = base(self.seed)
        frozen.first.requires_grad_(True)  # type: ignore[union-attr]
        torch.manual_seed(5)
        return self.context.wrap_model(nn.Sequential(frozen, nn.Linear(1, 1)), parallel=self.parallel)


class Merging(Finetuned):
    """Rank 1 writes into its shard of a frozen weight."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.context.distributed.rank == 1:
            weight: Any = self.model[0].blocks[1].up.weight
            weight.data.to_local().fill_(0.5)
        return super().train_batch(batch, epoch_idx, batch_idx)


def finetuned(directory: Path) -> dict[str, Any]:
    fit: dict[str, Any] = {"max_length": Batch(6), "checkpoint_period": Batch(3), "checkpoint_policy": "none"}
    found = {
        "plain": ranks(variant(Finetuned, parallel=None), directory / "plain", **fit),
        "whole": ranks(Finetuned, directory / "whole", look=weights, **fit),
    }
    latest = str(directory / "whole" / "checkpoint_3")
    found["resumed"] = ranks(Finetuned, directory / "resumed", latest_checkpoint=latest, look=weights, **fit)
    found["other"] = ranks(variant(Finetuned, seed=2), directory / "other", latest_checkpoint=latest, **fit)
    found["merging"] = ranks(Merging, directory / "merging", look=weights, **fit)
    found["not sharded"] = ranks(variant(Finetuned, parallel=None), directory / "again", **fit)
    return {**found, "loaded": list(LOADED)}


@pytorch.pretrained
def large(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))


def bytes_of_tensors() -> int:
    """Bytes of all tensors in this process, without those in pages of files."""
    gc.collect()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "weights.pt" in line]
    pages = [range(*(int(address, 16) for address in fields[0].split("-"))) for fields in maps]
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if not sharding.is_dtensor(each)]
    found = {each.data_ptr(): each.nbytes() for each in storages}
    return sum(size for address, size in found.items() if not any(address in page for page in pages))


def kept(directory: Path) -> dict[str, Any]:
    """The share of a pretrained model that a rank has in memory while it trains a head on it."""
    shares, before = [], bytes_of_tensors()
    for _ in ("first trial", "next trial"):
        with (
            use_host(FakeHost(directory)),
            pytorch.init(distributed=DistributedContext.from_torch_distributed()) as context,
        ):
            whole = sum(each.nbytes for each in large(256).parameters())
            model = nn.Sequential(large(256), nn.Linear(256, 1))
            model = context.wrap_model(model, parallel=FullyShard(units=[nn.Linear]))
            shares.append((bytes_of_tensors() - before) / whole)
            del context, model
    return {"shares": shares}


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    return {name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in tensors.items()}


def weights(trial: Trial) -> dict[str, torch.Tensor]:
    return full(trial.model)


def begun(trial: Any) -> Any:
    return trial.begun


def on_meta(directory: Path) -> dict[str, Any]:
    return ranks(OfMeta, directory, max_length=Batch(1), look=begun)


class Own(Trial):
    """Ranks that come with weights of their own."""

    def wrapped(self) -> nn.Module:
        torch.manual_seed(40 + self.context.distributed.rank)
        net = Net()
        drawn = net.first.weight.detach().clone()
        net = self.context.wrap_model(net, parallel=self.parallel)
        self.begun = drawn, full(net)["first.weight"]
        return net


def unseeded(directory: Path) -> dict[str, Any]:
    return ranks(Own, directory, max_length=Batch(1), look=begun)


# ---------------------------------------------------------------------------------------------------- tensor parallel


class TensorParallel(Trial):
    """The first and the last layer are not in the plan."""

    parallel = None

    def wrapped(self) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(5)
        net = Net().to(self.dtype)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, self.context.device_mesh["tp"], plan)
        return self.context.wrap_model(net, parallel=self.parallel)


class Both(TensorParallel):
    parallel = UNITS


def tensor_parallel(directory: Path) -> dict[str, Any]:
    return ranks(variant(TensorParallel, **CLIPPED), directory, init={"mesh": {"tp": 2}}, **FIT)


def without_replicas(directory: Path) -> dict[str, Any]:
    """Tensor-parallel over fewer ranks than there are, without anything that averages gradients over the others."""
    with (
        use_host(FakeHost(directory)),
        pytorch.init(distributed=DistributedContext.from_torch_distributed()) as context,
    ):
        try:
            TensorParallel(context)
        except ValueError as error:
            return {"error": str(error)}
    return {"error": None}


def both(directory: Path) -> dict[str, Any]:
    """Two shards of two tensor-parallel ranks each."""
    return ranks(variant(Both, **CLIPPED), directory, init={"mesh": {"tp": 2}}, **FIT)


def replicated(directory: Path) -> dict[str, Any]:
    return ranks(Trial, directory, init={"mesh": {"dp_replicate": 2}}, **FIT)


class ByHand(Leaving):
    """Sharded by the user's code: over all ranks, or, if there are four, over two and two (HSDP)."""

    def wrapped(self) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(5)
        net, size = Net().to(self.dtype), dist.get_world_size()
        names = ("dp_replicate", "dp_shard")
        mesh = None if size < 4 else init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        return self.context.wrap_model(fully_shard(net, mesh=mesh))


class Staying(ByHand):
    train_batch, evaluate_batch = Trial.train_batch, Trial.evaluate_batch


def by_hand(directory: Path) -> dict[str, Any]:
    """Gradients that are clipped and aggregated, cut in the middle of that; then a rank leaves, and another trial
    follows."""
    fit: dict[str, Any] = {"max_length": Batch(12), "checkpoint_policy": "none", "init": {"aggregation_frequency": 4}}
    found = {
        "plain": ranks(variant(Plain, **CLIPPED), directory / "plain", **fit),
        "whole": ranks(variant(Staying, **CLIPPED), directory / "whole", checkpoint_period=Batch(6), **fit),
    }
    latest = str(directory / "whole" / "checkpoint_6")
    found["resumed"] = ranks(variant(Staying, **CLIPPED), directory / "resumed", latest_checkpoint=latest, **fit)
    found["left"] = ranks(ByHand, directory / "left", max_length=Batch(9))
    found["after"] = ranks(Staying, directory / "after", max_length=Batch(3))
    return found


# ---------------------------------------------------------------------------------------------------------------- tests

Runs = dict[str, Any]


class Operators(TorchDispatchMode):
    """Counts calls of tanh, and reduce-scatters."""

    tanh = scatters = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tanh += operator is torch.ops.aten.tanh.default
        self.scatters += "reduce_scatter_tensor" in str(operator)
        return operator(*args, **(kwargs or {}))


def runs_of(size: int, backend: str = "gloo") -> Any:
    def made(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
        return results_of(size, __file__, tmp_path_factory.mktemp("ranks"), backend)

    # Seventy seconds of CPU: `make test` has test_sharded_ranks.py, whose ranks train what one process trains.
    return pytest.fixture(scope="module", params=[pytest.param(backend, marks=pytest.mark.long)])(made)


two, four = runs_of(2), runs_of(4)
as_nccl = runs_of(2, "queued")  # treats its ranks as NCCL does, see `tests.queued`


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same trial in this process alone, with clipped gradients."""
    return run(variant(Plain, **CLIPPED), tmp_path_factory.mktemp("one"), **FIT)


def close(run: Runs, other: Runs, rel: float = 1e-5) -> bool:
    assert (run["error"], other["error"]) == (None, None)
    assert len(run["losses"]) == len(other["losses"]) > 0
    return run["losses"] == pytest.approx(other["losses"], rel=rel, abs=1e-6)


def assert_same_metrics(run: Runs, other: Runs, rel: float) -> None:
    assert len(run["reports"]) == len(other["reports"]) > 0
    for mine, theirs in zip(run["reports"], other["reports"], strict=True):
        for metrics, expected in zip(mine[1:3], theirs[1:3], strict=True):
            numbers = {name: value for name, value in (expected or {}).items() if name != "records"}
            assert {name: (metrics or {})[name] for name in numbers} == pytest.approx(numbers, rel=rel)
            assert (metrics or {}).get("records") == (expected or {}).get("records")


def test_sharded_model_trains_as_with_ddp(two: list[Runs]) -> None:
    for rank in two:
        assert close(rank["clipped"]["Trial"], rank["clipped"]["Plain"], 1e-6)
        assert len(rank["clipped"]["Trial"]["losses"]) == 20


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("kind", ["synced", "unsynced"])
def test_sharded_model_trains_as_with_ddp_also_if_gradients_are_aggregated(
    two: list[Runs], kind: str, averages: bool
) -> None:
    for rank in two:
        assert close(rank["aggregated"][kind, averages], rank["aggregated"]["DDP", averages], 1e-3)


@pytest.mark.long
def test_a_rank_holds_only_its_shards_of_aggregated_gradients(two: list[Runs], four: list[Runs]) -> None:
    for rank in (*two, *four):
        assert rank["held"]["default"]["held"] == [(pytest.approx(1, rel=0.1), False)] * 8
        # A reduce-scatter of each block and of the rest.
        assert rank["held"]["default"]["sums"] == 8 * (BLOCKS + 1)


@pytest.mark.long
def test_replicas_of_shards_are_summed_only_in_batches_that_step(four: list[Runs]) -> None:
    waits = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.13; older ones sum in each batch
    for rank in four:
        expected = [(pytest.approx(1, rel=0.1), waits and batch % 4 != 3) for batch in range(8)]
        assert rank["held"]["replicas"]["held"] == expected


def test_gradients_are_summed_only_in_batches_that_step_if_asked_for(two: list[Runs]) -> None:
    for rank in two:
        assert rank["held"]["unsynced"]["held"] == [
            (pytest.approx(1 + (batch % 4 != 3), rel=0.1), False) for batch in range(8)
        ]
        assert rank["held"]["unsynced"]["sums"] == 2 * (BLOCKS + 1)


@pytest.mark.long
def test_units_that_some_batches_of_an_aggregation_do_not_use_train_in_replicas_too(four: list[Runs]) -> None:
    for rank in four:
        assert close(rank["skipping"]["replicas"], rank["skipping"]["shards"])
        assert rank["skipping"]["resumed"]["losses"] == rank["skipping"]["replicas"]["losses"][6:]
    saved = Path(four[0]["skipping"]["replicas"]["checkpoints"][0], "sharded")
    pieces = [shard_file.read(saved / Path(sharded.file_of(rank)).name) for rank in range(2)]
    assert all(any(name.startswith("models_state_dict") for name in piece) for piece in pieces)
    assert not any((saved / Path(sharded.file_of(rank)).name).exists() for rank in (2, 3)), "they have the same shards"


def test_scales_of_weights_in_float8_are_agreed_on_once_a_forward_pass(two: list[Runs]) -> None:
    # Eight batches of training, and three of validation.
    assert [rank["held"]["float8"]["scales"] for rank in two] == [8 + 3] * 2


def test_metrics_of_sharded_model_are_those_of_ddp(two: list[Runs]) -> None:
    assert_same_metrics(two[0]["clipped"]["Trial"], two[0]["clipped"]["Plain"], 1e-5)
    assert two[0]["clipped"]["Trial"]["reports"][0][1]["norm"] > 0


def test_validation_counts_each_record_once_though_ranks_have_different_numbers_of_batches(two: list[Runs]) -> None:
    # Five batches on two ranks: the second waits in the last forward pass, with a batch that does not count.
    for trained, validations in ((two[0]["clipped"]["Trial"], 2), (two[0]["tensor_parallel"], 2)):
        assert [each[2]["records"] for each in trained["reports"] if each[2]] == [list(range(20))] * validations


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.long
def test_memory_of_a_rank_is_its_share(two: list[Runs], four: list[Runs], size: int) -> None:
    for rank in two if size == 2 else four:
        share = rank["memory"]["Trial"]["seen"] / rank["memory"]["Plain"]["seen"]
        assert share <= {2: 0.55, 4: 0.30}[size]


@pytest.mark.long
def test_four_ranks_train_as_with_ddp(four: list[Runs]) -> None:
    for rank in four:
        plain = rank["losses_of_four"]["Plain"]
        assert close(rank["losses_of_four"]["Trial"], plain)
        assert close(rank["replicated"], plain)


def test_tensor_parallel_ranks_train_as_one_process(two: list[Runs], one: Runs) -> None:
    for rank in two:
        assert close(rank["tensor_parallel"], one, 1e-6)
    assert_same_metrics(two[0]["tensor_parallel"], one, 1e-5)


@pytest.mark.long
def test_shards_of_tensor_parallel_ranks_train_as_two_processes(two: list[Runs], four: list[Runs]) -> None:
    for index, rank in enumerate(four):
        assert close(rank["both"], two[index // 2]["clipped"]["Plain"])
    reports = [each[2]["records"] for each in four[0]["both"]["reports"] if each[2]]
    assert reports == [list(range(20))] * 2


def test_tensor_parallel_model_whose_gradients_nothing_averages_is_refused(two: list[Runs]) -> None:
    for rank in two:
        assert "its 2 copies would never average their gradients" in rank["without_replicas"]["error"]


@pytest.mark.parametrize("where", ["forward", "step", "validation"])
@pytest.mark.parametrize("backend", ["gloo", "queued"])
def test_rank_that_leaves_ends_all(two: list[Runs], as_nccl: list[Runs], backend: str, where: str) -> None:
    runs = [rank["left"] for rank in (two if backend == "gloo" else as_nccl)]
    assert [run[f"{where} ShouldExit"]["error"] for run in runs] == [None] * 2
    assert [run[f"{where} InvalidHP"]["error"] for run in runs] == ["InvalidHP: too wide"] * 2
    assert [run[f"{where} LookupError"]["error"] for run in runs] == [
        "PeerFailed: rank 1 failed while training: LookupError('gone')",
        "LookupError: gone",
    ]


@pytest.mark.parametrize("backend", ["gloo", "queued"])
def test_rank_that_leaves_a_tensor_parallel_model_ends_all(
    two: list[Runs], as_nccl: list[Runs], one: Runs, backend: str
) -> None:
    runs = [rank["left_tensor_parallel"] for rank in (two if backend == "gloo" else as_nccl)]
    for where in ("forward", "step", "validation"):
        assert [run[where]["error"] for run in runs] == [
            "PeerFailed: rank 1 failed while training: LookupError('gone')",
            "LookupError: gone",
        ]
    # In float32, and without clipping; the first loss is of the same weights.
    assert [run["validation"]["losses"] for run in runs] == [two[0]["left_tensor_parallel"]["validation"]["losses"]] * 2
    assert runs[0]["validation"]["losses"][0] == pytest.approx(one["losses"][0], rel=1e-5)


def test_what_was_trained_is_saved_unless_some_shards_are_a_step_older(two: list[Runs]) -> None:
    for error in ("ShouldExit", "InvalidHP"):
        saved = {
            where: two[0]["left"][f"{where} {error}"]["reports"][-1] for where in ("forward", "step", "validation")
        }
        assert (saved["forward"][0], Path(saved["forward"][3]).name) == (2, "checkpoint_2")
        assert (saved["validation"][0], Path(saved["validation"][3]).name) == (4, "checkpoint_4")
        assert saved["step"][3] is None


def test_nothing_is_saved_of_collectives_that_were_aborted(as_nccl: list[Runs]) -> None:
    assert [run["checkpoints"] for run in as_nccl[0]["left"].values()] == [[]] * 9


@pytest.mark.parametrize("kind", AGGREGATED)
def test_stop_in_the_middle_of_an_aggregation_loses_no_gradient(two: list[Runs], kind: str) -> None:
    for rank in two:
        whole, first, again = (rank["stopped"][kind][name] for name in ("whole", "first", "again"))
        assert len(first["losses"]) == 6
        assert first["losses"] + again["losses"] == whole["losses"]


def test_sharded_model_beside_a_plain_one(two: list[Runs]) -> None:
    for rank in two:
        assert close(rank["beside"]["Trial"], rank["beside"]["Plain"])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.long
def test_models_sharded_by_the_users_code_train_and_a_rank_that_leaves_ends_all(
    two: list[Runs], four: list[Runs], size: int
) -> None:
    runs = [rank["by_hand"] for rank in (two if size == 2 else four)]
    for each in runs:
        assert close(each["whole"], each["plain"], 1e-6)
        assert each["resumed"]["losses"] == each["whole"]["losses"][6:]
        assert each["left"]["error"] is None
        assert len(each["after"]["losses"]) == 3
    assert runs[0]["left"]["reports"][-1][0] == 2


ROUNDED = {"bfloat16": 0.01, "float8": 0.1}
"""How far the losses of options that compute in another precision may be from the plain model's."""


@pytest.mark.parametrize("option", ["function", "names", "one unit", "checkpointing", "selective", "compile", *ROUNDED])
def test_options_change_no_result(two: list[Runs], option: str) -> None:
    for rank in two:
        plain, run = rank["options"]["plain"], rank["options"][option]
        assert close(run, plain, ROUNDED.get(option, 1e-5))
        assert (run["losses"] != plain["losses"]) is (option in ROUNDED)


def test_offloaded_weights_are_clipped_and_saved_whole(two: list[Runs]) -> None:
    for rank in two:
        mine = rank["offloaded"]["Trial"]
        assert close(mine, rank["offloaded"]["Plain"], 1e-12)
        assert mine["seen"] == [True] * (4 + 4 * BLOCKS)
    mine, plain = (
        torch.load(f"{two[0]['offloaded'][kind]['checkpoints'][0]}/state-dict.pth", weights_only=True)
        for kind in ("Trial", "Plain")
    )
    torch.testing.assert_close(mine["models_state_dict"], plain["models_state_dict"])


def test_what_options_are_for(two: list[Runs]) -> None:
    calls = two[0]["options"]["calls"]
    # Forward passes of a block in 8 batches, and in 3 of validation; with checkpointing again in backward.
    assert calls["names"] == BLOCKS * (8 + 3)
    assert calls["checkpointing"] == BLOCKS * (8 + 8 + 3)
    assert two[0]["options"]["compiled"] == BLOCKS


def test_buffers_of_the_chief_validate_on_all_ranks(two: list[Runs]) -> None:
    mine, plain = (two[0]["buffers"][kind] for kind in ("Trial", "Plain"))
    assert close(mine, plain)
    assert_same_metrics(mine, plain, 1e-5)


def test_evaluate_full_dataset_runs_on_all_ranks(two: list[Runs], tmp_path: Path) -> None:
    for rank in two:
        assert rank["full_dataset"]["Trial"]["error"] is None
    mine, plain = (two[0]["full_dataset"][kind]["reports"][-1][2] for kind in ("Trial", "Plain"))
    assert mine["batches"] == 5
    assert mine["validation_loss"] == pytest.approx(plain["validation_loss"])


@pytest.mark.long
def test_model_on_meta_begins_with_the_same_weights_on_any_number_of_ranks(
    two: list[Runs], four: list[Runs], tmp_path: Path
) -> None:
    alone = run(OfMeta, tmp_path, max_length=Batch(1), look=begun)["seen"]
    for rank in (*two, *four):
        assert_equal(rank["on_meta"]["seen"], alone)
    assert len({float(value.detach().sum()) for value in alone.values()}) == len(alone)


def test_all_ranks_begin_with_the_chiefs_weights(two: list[Runs]) -> None:
    drawn = two[0]["unseeded"]["seen"][0]
    assert not torch.equal(drawn, two[1]["unseeded"]["seen"][0])
    assert all(torch.equal(rank["unseeded"]["seen"][1], drawn) for rank in two)


def test_a_gradient_that_overflows_in_one_shard_skips_the_step_on_all(two: list[Runs], tmp_path: Path) -> None:
    alone = run(variant(Scaled, parallel=None), tmp_path, max_length=Batch(8), look=scales)["seen"]
    assert alone["scales"] == [1024, 1024, 512, 512, 512, 1024, 1024, 1024]
    for rank in two:
        for name in ("Trial", "half", "tensor parallel", "tensor parallel, fused"):
            found = rank["scaled"][name]
            assert found["error"] is None
            assert found["seen"]["scales"] == alone["scales"]
            if name != "half":
                torch.testing.assert_close(found["seen"]["weights"], alone["weights"], rtol=1e-5, atol=1e-5)
        assert close(rank["scaled"]["half"], rank["scaled"]["Trial"], 0.01)
        resumed = rank["scaled"]["resumed"]
        assert resumed["losses"] == rank["scaled"]["Trial"]["losses"][4:]
        assert resumed["seen"]["scales"] == alone["scales"][4:]


def test_torchmetrics_tensorboard_and_profiler_show_what_they_show_with_ddp(two: list[Runs]) -> None:
    mine, plain = (two[0]["watched"][kind] for kind in ("Trial", "Plain"))
    assert mine["error"] is None
    assert_same_metrics(mine, plain, 1e-5)
    assert plain["reports"][-1][2].keys() >= {"error", "R2Score", "SpearmanCorrCoef"}
    for kind in ("Trial", "Plain"):
        directory = Path(two[0]["watched"][kind]["checkpoints"][0]).parent / "tensorboard"
        shown = read(directory)
        assert [(s.step, s.value) for s in shown.Scalars("own")] == [(batch, batch) for batch in range(8)]
        assert len(shown.Scalars("Determined/loss")) == 8
        errors = [s.value for s in shown.Scalars("Determined/val_error")]
        assert errors == pytest.approx([each[2]["error"] for each in plain["reports"] if each[2]])
        assert traced(directory) == [["batch 3", "batch 4"]] * 2, "a trace of each rank"


def saved(directory: Path) -> tuple[set[str], set[str]]:
    """The names in a checkpoint's state of the model, and in its shards."""
    state = torch.load(directory / "state-dict.pth", weights_only=True)
    shards = [shard_file.read(directory / sharded.file_of(rank)) for rank in (0, 1)]
    prefix = "models_state_dict.0."
    return set(state["models_state_dict"][0]), {
        name.removeprefix(prefix) for shard in shards for name in shard if name.startswith(prefix)
    }


TRAINED = {f"{layer}.{name}" for layer in ("0.first", "1") for name in ("weight", "bias")}


def test_frozen_weights_are_sharded_and_no_checkpoint_has_them(two: list[Runs], tmp_path: Path) -> None:
    for rank in two:
        runs = rank["finetuned"]
        assert close(runs["whole"], runs["plain"])
        assert runs["resumed"]["losses"] == runs["whole"]["losses"][3:]
        assert_equal(runs["resumed"]["seen"], runs["whole"]["seen"])
        assert runs["not sharded"]["losses"] == runs["plain"]["losses"]
        assert runs["loaded"] == [1, 2], "once a process, not once a trial"
    [first, _] = two[0]["finetuned"]["whole"]["checkpoints"]
    assert saved(Path(first)) == (TRAINED, TRAINED)
    # On another number of ranks, and whole.
    fit: Any = {"max_length": Batch(6), "latest_checkpoint": first}
    for parallel in (UNITS, None):
        alone = run(variant(Finetuned, parallel=parallel), tmp_path / str(parallel is None), **fit)
        assert alone["error"] is None
        assert len(alone["losses"]) == 3
        assert alone["reports"][-1][2]["validation_loss"] == pytest.approx(
            two[0]["finetuned"]["whole"]["reports"][-1][2]["validation_loss"], rel=1e-4
        )
    trial: Any = pytorch.load_trial_from_checkpoint_path(first, Finetuned)
    assert torch.equal(trial.model[0].last.weight, two[0]["finetuned"]["whole"]["seen"]["0.last.weight"])


def test_a_rank_has_only_its_shards_of_a_pretrained_model_in_memory(two: list[Runs]) -> None:
    for rank in two:
        assert rank["kept"]["shares"] == [pytest.approx(0.5, abs=0.05)] * 2


def test_other_frozen_weights_are_refused(two: list[Runs]) -> None:
    for rank in two:
        error = rank["finetuned"]["other"]["error"]
        assert re.search(r"model 0 .* other pretrained weights than the trial has loaded: '0\.", error)


def test_a_frozen_weight_of_which_one_rank_has_changed_its_shard_is_saved(two: list[Runs]) -> None:
    changed = "0.blocks.1.up.weight"
    [first, _] = two[0]["finetuned"]["merging"]["checkpoints"]
    assert saved(Path(first)) == (TRAINED | {changed}, TRAINED | {changed})
    weight = two[0]["finetuned"]["merging"]["seen"][changed]
    half = len(weight) // 2
    assert torch.equal(weight[half:], torch.full_like(weight[half:], 0.5))
    assert torch.equal(weight[:half], two[0]["finetuned"]["whole"]["seen"][changed][:half])


def test_selective_checkpointing_computes_no_matrix_product_again(tmp_path: Path) -> None:
    class Counted(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            with FlopCounterMode(display=False) as self.flops, Operators() as self.operators:
                return super().train_batch(batch, epoch_idx, batch_idx)

    def look(trial: Any) -> tuple[int, int]:
        return trial.flops.get_total_flops(), trial.operators.tanh

    found = {}
    for option in (False, True, "selective"):
        parallel = pytorch.FullyShard(units="Block", activation_checkpointing=option)  # type: ignore[arg-type]
        kind = variant(Counted, parallel=parallel)
        found[option] = run(kind, tmp_path / str(option), max_length=Batch(1), look=look)
    (flops, tanh), (recomputed_flops, recomputed), selective = (found[option]["seen"] for option in found)
    assert recomputed_flops > 1.1 * flops
    assert (tanh, recomputed) == (BLOCKS, 2 * BLOCKS)
    assert selective == (flops, recomputed)
    assert found["selective"]["losses"] == found[False]["losses"]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_selective_checkpointing_repeats_no_reduce_scatter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(block: Block, x: torch.Tensor) -> torch.Tensor:  # as with a tensor-parallel plan
        down = block.down(block.up(x))
        return torch.tanh(funcol.reduce_scatter_tensor_autograd(down, "sum", 0, dist.group.WORLD))

    class Counted(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            with Operators() as self.operators:
                return super().train_batch(batch, epoch_idx, batch_idx)

    monkeypatch.setattr(Block, "forward", forward)
    found = []
    for option in (False, True, "selective"):
        parallel = pytorch.FullyShard(units="Block", activation_checkpointing=option)  # type: ignore[arg-type]
        kind = variant(Counted, parallel=parallel)
        look = run(kind, tmp_path / str(option), max_length=Batch(1), look=lambda trial: trial.operators.scatters)
        found.append(look["seen"])
    assert found == [BLOCKS, 2 * BLOCKS, BLOCKS]


def test_weights_in_float8_are_saved_in_their_own_precision_and_leave_nothing_in_the_process(tmp_path: Path) -> None:
    kind = variant(Trial, parallel=pytorch.FullyShard(units="Block", float8=True))
    fit: dict[str, Any] = {"max_length": Batch(6), "checkpoint_period": Batch(3), "checkpoint_policy": "none"}

    def train(kind: Any = kind, name: str = "whole", **more: Any) -> Runs:
        return run(kind, tmp_path / name, look=weights, **fit, **more)

    whole, reasons = ProcessSnapshot().run(train)
    assert reasons == []
    [latest, last] = whole["checkpoints"]
    resumed = train(name="resumed", latest_checkpoint=latest)
    assert resumed["losses"] == whole["losses"][3:]
    assert train(Plain, "plain", latest_checkpoint=latest)["losses"][0] == pytest.approx(whole["losses"][3], rel=0.1)
    (tmp_path / "scratch").mkdir()
    [model] = whole_models(Path(last), tmp_path / "scratch")
    write_safetensors(model, tmp_path / "weights.safetensors")
    exported = load_file(tmp_path / "weights.safetensors")
    torch.testing.assert_close(exported, whole["seen"], rtol=0, atol=0)


def test_one_process_trains_a_sharded_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dray")
    fit: Any = {"max_length": Batch(8)}
    plain = run(Plain, tmp_path / "plain", **fit)
    sharded = run(Trial, tmp_path / "sharded", **fit)
    assert sharded["losses"] == plain["losses"]
    assert [record.message for record in caplog.records].count(
        "wrap_model: one slot has nothing to share the model with, and holds all of it"
    ) == 1
    assert run(variant(Full), tmp_path / "full", **fit)["error"] is None


OF_TWO = [
    *(clipped, aggregated, held, memory, stopped, beside, options, offloaded, buffers, full_dataset, on_meta, unseeded),
    *(by_hand, finetuned, kept, scaled, watched, tensor_parallel, without_replicas),
]
OF_FOUR = [losses_of_four, held, skipping, memory, on_meta, both, replicated, by_hand]
# The ranks' computations are tested on gloo alone, and the ends of training on both backends.
ENDS = [left, left_tensor_parallel]

if __name__ == "__main__":
    foreach_by_default()
    if os.environ["WORLD_SIZE"] == "4":
        serve(OF_FOUR)
    else:
        serve(ENDS + (OF_TWO if os.environ["TEST_BACKEND"] == "gloo" else []))
