"""What test_fsdp.py runs in two or four real processes: `python fsdp_ranks.py <directory>`, once a rank. Each scenario
is a few trainings, which the ranks share.
"""

# ruff: noqa: SLF001 - looks into torch's FSDP

from __future__ import annotations

import functools
import gc
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
from dray.pytorch import Batch, FullyShard
from dray.training.parallel import agreement, sharding
from tests import queued
from tests.pytorch.fakes import FakeHost
from tests.pytorch.sharding import foreach_by_default

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
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

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


# ------------------------------------------------------------------------------------------------------------ scenarios

LONG: dict[str, Any] = {"max_length": Batch(60), "validation_period": Batch(15)}


SHORT: dict[str, Any] = {"max_length": Batch(40), "validation_period": Batch(20)}


CLIPPED: dict[str, Any] = {"clip": 0.1, "dtype": torch.float64}
"""In float64: float32's rounding errors of the norm grow to whole numbers over hundreds of batches."""


def losses_of_four(directory: Path) -> dict[str, Any]:
    return {kind.__name__: ranks(kind, directory / kind.__name__, **SHORT) for kind in (Plain, Trial)}


def clipped(directory: Path) -> dict[str, Any]:
    kinds = [variant(kind, **CLIPPED) for kind in (Plain, Trial)]
    return {kind.__name__: ranks(kind, directory / kind.__name__, **LONG) for kind in kinds}


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
    groups = [group for module in sharding.fsdp_modules(model) for group in sharding._param_groups(module)]
    wholes = [parameter._unsharded_param.grad for group in groups for parameter in group.fsdp_params]
    shards = [getattr(parameter.grad, "_local_tensor", None) for parameter in model.parameters()]
    partial = [group._partial_reduce_output for group in groups]
    waiting, rest = (sum(each.nbytes for each in kept if each is not None) for kept in (partial, wholes + shards))
    return waiting + rest, waiting


class Watching(Trial):
    """Counts the sums over the ranks, and the bytes of gradients after each backward pass."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.set_profiler(on_trace_ready=lambda profiler: None)
        self.share = sum(each.to_local().nbytes for each in self.model.parameters())
        self.held: list[tuple[int, int]] = []
        backward = context.backward
        context.backward = lambda loss: (backward(loss), self.held.append(gradient_bytes(self.model)))  # type: ignore

    def seen(self) -> dict[str, Any]:
        names = [event.name for event in self.context.profiler.events()]  # type: ignore[union-attr]
        return {
            "sums": sum("FSDP::post_backward_reduce" in name for name in names),
            "scales": names.count("_c10d_functional::all_reduce"),
            "held": [(of_all / self.share, partial > 0) for of_all, partial in self.held],
        }


def held(directory: Path) -> dict[str, Any]:
    """Gradients in 8 batches of two aggregations; on four ranks also of two replicas."""
    kinds = {"default": (Watching, {}), "unsynced": (variant(Watching, parallel=UNSYNCED), {})}
    kinds["float8"] = variant(Watching, parallel=FullyShard(units=[Block], float8=True)), {}
    if dist.get_world_size() == 4:
        kinds["replicas"] = Watching, {"mesh": {"dp_replicate": 2}}
    return {
        name: ranks(
            kind, directory / name, init={"aggregation_frequency": 4, **init}, max_length=Batch(8), look=Watching.seen
        )["seen"]
        for name, (kind, init) in kinds.items()
    }


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
    return {
        kind.__name__: ranks(kind, directory / kind.__name__, max_length=Batch(1), look=local_bytes)
        for kind in (Plain, Trial)
    }


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
    kinds = {"Plain": variant(Beside, parallel=None), "Trial": Beside}
    return {name: ranks(kind, directory / name, max_length=Batch(20)) for name, kind in kinds.items()}


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
            for group in module._get_fsdp_state()._fsdp_param_groups
            for parameter in group.fsdp_params
        ]

    exact = {"clip": 0.1, "dtype": torch.float64}
    kind = variant(Trial, parallel=FullyShard(units=[Block], cpu_offload=True), **exact)
    fit: dict[str, Any] = {"max_length": Batch(8), "init": {"exp_conf": {"checkpoint_format": "full"}}}
    return {
        "Plain": ranks(variant(Plain, **exact), directory / "Plain", **fit),
        "Trial": ranks(kind, directory / "Trial", look=look, **fit),
    }


class Norms(Trial):
    """With buffers that differ between ranks."""

    def wrapped(self) -> nn.Module:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return self.context.wrap_model(net, parallel=self.parallel)


def buffers(directory: Path) -> dict[str, Any]:
    kinds = {"Plain": variant(Norms, parallel=None), "Trial": variant(Norms, parallel=FullyShard())}
    return {
        name: ranks(kind, directory / name, max_length=Batch(8), validation_period=Batch(3))
        for name, kind in kinds.items()
    }


class Full(Trial):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        losses = [float(self.loss(batch)) for batch in data_loader]
        return {"validation_loss": sum(losses), "batches": len(losses)}


def full_dataset(directory: Path) -> dict[str, Any]:
    kinds = {"Plain": variant(Full, parallel=None), "Trial": Full}
    return {name: ranks(kind, directory / name, max_length=Batch(4)) for name, kind in kinds.items()}


class OfMeta(Trial):
    def wrapped(self) -> nn.Module:
        torch.manual_seed(5)
        with torch.device("meta"):
            net = Net()
        return self.context.wrap_model(net, parallel=self.parallel)


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


def scaled(directory: Path) -> dict[str, Any]:
    def look(trial: Scaled) -> Any:
        return {"scales": trial.scales, "weights": weights(trial)}

    fit: dict[str, Any] = {"max_length": Batch(8), "look": look}
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
    kinds = {"Plain": variant(Watched, parallel=None), "Trial": Watched}
    return {
        name: ranks(kind, directory / name, max_length=Batch(8), validation_period=Batch(4))
        for name, kind in kinds.items()
    }


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
    """What a rank has in memory of a pretrained model that it trains a head on, as a share of the model."""
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


def weights(trial: Trial) -> dict[str, torch.Tensor]:
    return {
        name: getattr(value.detach(), "full_tensor", value.detach)().clone()
        for name, value in trial.model.named_parameters()
    }


def on_meta(directory: Path) -> dict[str, Any]:
    class Begun(OfMeta):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.begun = weights(self)

    return ranks(Begun, directory, max_length=Batch(1), look=lambda trial: trial.begun)


def unseeded(directory: Path) -> dict[str, Any]:
    """Ranks that come with weights of their own."""

    class Own(Trial):
        def wrapped(self) -> nn.Module:
            torch.manual_seed(40 + self.context.distributed.rank)
            net = Net()
            self.begun = net.first.weight.detach().clone()
            return self.context.wrap_model(net, parallel=self.parallel)

    def look(trial: Any) -> Any:
        return trial.begun

    class Begun(Own):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.begun = (self.begun, weights(self)["first.weight"])

    return ranks(Begun, directory, max_length=Batch(1), look=look)


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
    return ranks(variant(TensorParallel, **CLIPPED), directory, init={"mesh": {"tp": 2}}, **SHORT)


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
    return ranks(variant(Both, **CLIPPED), directory, init={"mesh": {"tp": 2}}, **SHORT)


def replicated(directory: Path) -> dict[str, Any]:
    return ranks(Trial, directory, init={"mesh": {"dp_replicate": 2}}, **SHORT)


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


SCENARIOS: dict[int, list[Callable[[Path], dict[str, Any]]]] = {
    2: [
        clipped,
        aggregated,
        held,
        memory,
        left,
        left_tensor_parallel,
        stopped,
        beside,
        options,
        offloaded,
        buffers,
        full_dataset,
        on_meta,
        unseeded,
        by_hand,
        finetuned,
        kept,
        scaled,
        watched,
        tensor_parallel,
        without_replicas,
    ],
    4: [losses_of_four, held, skipping, memory, on_meta, both, replicated, by_hand],
}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    foreach_by_default()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    queued.init(directory / "rendezvous", rank, size)
    agreement.LEAVE_S = 0.5
    results = {}
    # What ranks compute is tested on gloo alone, and how they end on both backends.
    for scenario in SCENARIOS[size] if os.environ["TEST_BACKEND"] == "gloo" else [left, left_tensor_parallel]:
        results[scenario.__name__] = scenario(directory / scenario.__name__)
        queued.init_again_if_aborted(directory / f"rendezvous_after_{scenario.__name__}", rank, size)
    torch.save(results, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
