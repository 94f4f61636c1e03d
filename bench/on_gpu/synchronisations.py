"""How often the host waits for the GPU in a batch, by torch's own debug mode; dray, and the same loop by hand.

Only between reports: a report fetches the metrics, so it waits once. torch's mode does not see every way to wait
(cudaMalloc, an explicit synchronize), and says so; what copies a value to the host, it sees.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from part import DEVICE, doing, figure, note
from torch.utils._python_dispatch import TorchDispatchMode

from dray import pytorch

WAITS = "called a synchronizing CUDA operation"
WARM_UP = 20
"""Batches before counting begins: allocations, libraries that load, the first steps of the gradients' scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A kind of loop."""

    amp: torch.dtype | None = None
    fused: bool = False
    aggregation: int = 1
    clips: bool = False
    schedules: bool = False
    metrics: int = 1
    tensorboard: bool = False
    reports_every: int = 10_000
    reads_loss: bool = False


WAYS = {
    "plain": Way(),
    "bf16": Way(amp=torch.bfloat16),
    "fp16, GradScaler": Way(amp=torch.float16),
    "fp16, GradScaler, fused AdamW": Way(amp=torch.float16, fused=True),
    "aggregation over 4 batches": Way(aggregation=4),
    "clipping": Way(clips=True),
    "a schedule": Way(schedules=True),
    "12 metrics": Way(metrics=12),
    "12 metrics, TensorBoard": Way(metrics=12, tensorboard=True),
    "bf16 and all of these": Way(
        amp=torch.bfloat16, aggregation=4, clips=True, schedules=True, metrics=12, tensorboard=True
    ),
}


def main(tiny: bool) -> None:
    """Count each way."""
    sizes = Sizes(width=32, records=64, batch=8, batches=8) if tiny else Sizes()
    control = by_hand(Way(reads_loss=True), sizes).total() / sizes.batches
    figure("the counter: a loop by hand with loss.item()", f"{control:.2f}", goal=">= 1", reached=control >= 1)
    if control < 1:
        raise SystemExit("torch's debug mode has not seen loss.item(): what it counts elsewhere would mean nothing")
    for name, way in WAYS.items():
        doing(name)
        there, here = by_hand(way, sizes), by_dray(way, sizes)
        dray, hand = here.total() / sizes.batches, there.total() / sizes.batches
        # Without a fused optimizer, a scaler has to know whether the gradients are finite before it steps.
        most = hand if way.amp is torch.float16 and not way.fused else 0.0
        goal = "<= by hand" if most else "0"
        figure(name, f"{dray:.2f}, by hand {hand:.2f}", goal=goal, reached=dray <= most)
        if dray > most:
            note(f"{name}: waits at {', '.join(f'{place} ({times}x)' for place, times in here.most_common(4))}.")
    reports = sizes.batches // 4
    waits = by_dray(Way(reports_every=4), sizes).total() / reports
    figure("a report every 4 batches", f"{waits:.2f} a report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model and its data. A batch is large enough to be copied on a separate stream."""

    width: int = 1024
    records: int = 4096
    batch: int = 256
    batches: int = 100

    @property
    def last(self) -> int:
        """The number of the batch before which counting ends."""
        return WARM_UP + self.batches


class Counting(TorchDispatchMode):
    """Counts while it is switched on. On a CPU, what would wait for a GPU warns as it would there."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def switch(self, on: bool) -> None:
        self.on = on
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn" if on else "default")

    def at(self, batch_idx: int, sizes: Sizes) -> None:
        """Switch at the batches where counting begins and ends."""
        if batch_idx in (WARM_UP, sizes.last):
            self.switch(batch_idx == WARM_UP)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and func is torch.ops.aten._local_scalar_dense.default:
            warnings.warn(WAITS, stacklevel=2)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(found: Counter[str]) -> Iterator[Counting]:
    """Collects the places of the waits in the block."""
    counting = Counting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # As a mode it slows each operation down, and only a CPU needs it.
            with counting if DEVICE.type == "cpu" else contextlib.nullcontext():
                yield counting
        finally:
            counting.switch(False)
    for warning in caught:
        if WAITS in str(warning.message):
            found[f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"] += 1


def made(way: Way, sizes: Sizes) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """A model, on the device; its loss; and what makes its optimizer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(sizes.width, sizes.width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(sizes.width, 1)).to(DEVICE)
    # On a CPU only the fused one reads no numbers.
    fused = way.fused or DEVICE.type == "cpu"
    return model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)


def data(sizes: Sizes) -> torch.utils.data.Dataset[Any]:
    return torch.utils.data.TensorDataset(torch.randn(sizes.records, sizes.width), torch.randn(sizes.records, 1))


def metrics_of(way: Way, loss: torch.Tensor) -> dict[str, Any]:
    """Losses, and what other trials return: parts of a batch's result, and numbers."""
    more = {f"metric {n}": loss.detach() * n if n % 2 else float(n) for n in range(1, way.metrics)}
    return {"loss": loss, **more}


def by_hand(way: Way, sizes: Sizes) -> Counter[str]:
    """The places where a loop by hand waits."""
    model, loss_of, optimizer = made(way, sizes)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=way.amp is torch.float16 and DEVICE.type == "cuda")
    loader = torch.utils.data.DataLoader(data(sizes), batch_size=sizes.batch, pin_memory=DEVICE.type == "cuda")
    found: Counter[str] = Counter()
    kept: list[dict[str, Any]] = []
    batches = (batch for _ in range(sizes.last + 1) for batch in loader)
    with counted(found) as counting:
        for batch_idx in range(sizes.last + 1):
            counting.at(batch_idx, sizes)
            x, y = (part.to(DEVICE, non_blocking=True) for part in next(batches))
            with torch.autocast(DEVICE.type, dtype=way.amp or torch.bfloat16, enabled=way.amp is not None):
                loss = loss_of(model(x), y)
            scaler.scale(loss / way.aggregation).backward()
            if (batch_idx + 1) % way.aggregation == 0:
                if way.clips:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if way.schedules:
                schedule.step()
            kept.append({name: getattr(value, "detach", lambda v=value: v)() for name, value in
                         metrics_of(way, loss).items()})  # fmt: skip
            if way.reads_loss:
                loss.item()
    return found


class Trial(pytorch.PyTorchTrial):
    """The same for dray."""

    def __init__(self, context: pytorch.PyTorchTrialContext, way: Way, sizes: Sizes, counting: Counting) -> None:
        self.context, self.way, self.sizes, self.counting = context, way, sizes, counting
        if way.amp is not None:
            context.experimental.use_amp(way.amp)
        model, self.loss, optimizer = made(way, sizes)
        self.model, self.optimizer = context.wrap_model(model), context.wrap_optimizer(optimizer)
        if way.schedules:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1000)
            context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.clip = (lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)) if way.clips else None

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(self.sizes), batch_size=self.sizes.batch, pin_memory=DEVICE.type == "cuda")

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.counting.at(batch_idx, self.sizes)
        x, y = batch
        loss = self.loss(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return metrics_of(self.way, loss)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 0.0}


def by_dray(way: Way, sizes: Sizes) -> Counter[str]:
    """The places where dray waits."""
    found: Counter[str] = Counter()
    with (
        counted(found) as counting,
        pytorch.init(aggregation_frequency=way.aggregation, enable_tensorboard_logging=way.tensorboard) as context,
    ):
        trial = Trial(context, way, sizes, counting)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(sizes.last + 1),
            reporting_period=pytorch.Batch(way.reports_every),
            checkpoint_policy="none",
        )
    return found
