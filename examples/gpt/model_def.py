"""A GPT that learns Python's standard library character by character.

Shows gradient accumulation, learning rate warm-up by optimizer steps, gradient clipping, and bf16 on GPUs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from data import CHARACTERS, Blocks, texts
from gpt import GPT
from torch.nn import functional as F

from dray import pytorch


class GPTTrial(pytorch.PyTorchTrial):
    """Trained with AdamW on blocks of text; validated on modules that were held out."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        hparam = context.get_hparam
        self.block = hparam("block")
        if context.device.type == "cuda":
            context.experimental.use_amp(dtype=torch.bfloat16)
        model = GPT(
            characters=len(CHARACTERS),
            block=self.block,
            layers=hparam("layers"),
            width=hparam("width"),
            heads=hparam("heads"),
            dropout=hparam("dropout"),
        )
        parallel = pytorch.FullyShard(units=["Layer"]) if context.get_hparams().get("fsdp") else None
        self.model = context.wrap_model(model, parallel=parallel)
        # Weight decay for matrices only, not for biases and scales.
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(groups, lr=hparam("lr"), betas=(0.9, 0.95)))
        warm_up = hparam("warm_up_steps")
        steps = context.get_total_batches(self.build_training_data_loader) // hparam("aggregation_frequency")
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: share_of_lr(step, warm_up, steps)),
            pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        batch_size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(Blocks(texts()[0], self.block), batch_size=batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Blocks(texts()[1], self.block, most=512), batch_size=64)

    def loss(self, batch: Any) -> torch.Tensor:
        """Mean cross entropy of the next character, in nats."""
        text, following = batch
        scores = self.model(text)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        )
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.loss(batch)
        return {"validation_loss": loss, "bits_per_character": loss / math.log(2)}


def share_of_lr(step: int, warm_up: int, steps: int) -> float:
    """The learning rate's factor at an optimizer step: linear warm-up, then half a cosine down to a tenth.

    >>> [round(share_of_lr(step, 2, 10), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
