"""All GPUs: DDP and FullyShard against loops by hand with torch's own, with and without `device_id`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from part import DEVICE, ON_GPU, attempt, check, clock, figure, joined, on_ranks, several, well
from small_gpt import TINY, OnTokens, Sizes, clip, data, loss_of, made, optimizer_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dray import pytorch

BATCHES, WARM_UP = (30, 8) if ON_GPU else (6, 2)
GOAL = 0.97
WAYS = ("DDP", "FullyShard")


def main(tiny: bool) -> None:
    """Each way in processes of its own, first as NCCL's groups are by default, then bound to their GPU."""
    size = several()
    for bound in ("0", "1") if ON_GPU else ("0",):
        for way in WAYS if size else ():
            with attempt(f"{way}, DRAY_BIND_DEVICE={bound}"):
                for child in on_ranks(size, "parallel", "compare", way, tiny, DRAY_BIND_DEVICE=bound):
                    well(child, f"{way}, DRAY_BIND_DEVICE={bound}")


def compare(way: str, tiny: str) -> None:
    """One rank: first by hand, then with dray, on the same batches."""
    peers, sizes = joined(), TINY if tiny == "True" else Sizes(records=32)
    by_hand, hands_loss = train_by_hand(way, sizes)
    with pytorch.init(distributed=peers, enable_tensorboard_logging=False) as context:
        trial = Trial(context, way, sizes)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(BATCHES), checkpoint_policy="none")
    if peers.rank == 0:
        bound = ", with device_id" if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id else ""
        ratio, what = by_hand / trial.batch_s, f"{way} on {peers.size} ranks{bound}"
        figure(f"{what}: dray's speed by that by hand", f"{ratio:.3f}", goal=f">= {GOAL:g}", reached=ratio >= GOAL)
        figure(f"{what}: a batch", f"{trial.batch_s * 1e3:.1f} ms with dray, {by_hand * 1e3:.1f} ms by hand")
        check(f"{what}: the last loss is that by hand", abs(trial.loss - hands_loss) < 0.02, True)
    dist.destroy_process_group()


def train_by_hand(way: str, sizes: Sizes) -> tuple[float, float]:
    """Seconds of a batch, and the last loss of rank 0."""
    model: Any = made(sizes)
    if way == "DDP":
        model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if ON_GPU else None)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = optimizer_of(model)
    share = torch.utils.data.distributed.DistributedSampler(data(sizes), shuffle=False)  # type: ignore[var-annotated, arg-type]
    loader = torch.utils.data.DataLoader(data(sizes), batch_size=sizes.batch, sampler=share, pin_memory=ON_GPU)
    done, since = 0, clock()
    while done < BATCHES:
        for batch in loader:
            since = clock() if done == WARM_UP else since
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = loss_of(model, [part.to(DEVICE, non_blocking=True) for part in batch])
            loss.backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if (done := done + 1) == BATCHES:
                break
    return (clock() - since) / (BATCHES - WARM_UP), loss.item()


class Trial(OnTokens):
    """The same with dray."""

    def __init__(self, context: pytorch.PyTorchTrialContext, way: str, sizes: Sizes) -> None:
        self.context, self.sizes = context, sizes
        self.since = self.batch_s = self.loss = 0.0
        context.experimental.use_amp(torch.bfloat16)
        parallel = pytorch.FullyShard(units="Layer") if way == "FullyShard" else None
        self.model = context.wrap_model(made(sizes), parallel=parallel)
        self.optimizer = context.wrap_optimizer(optimizer_of(self.model))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == WARM_UP:
            self.since = clock()
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=clip)
        if batch_idx == BATCHES - 1:
            self.batch_s, self.loss = (clock() - self.since) / (BATCHES - WARM_UP), loss.item()
        return {"loss": loss}
