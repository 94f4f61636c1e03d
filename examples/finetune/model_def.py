"""LoRA fine-tuning of a causal language model from `transformers` with `peft`.

The frozen model is loaded once per worker process: later trials of a search start with their first batch, and
checkpoints contain only the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from data import blocks
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from dray import pytorch


@pytorch.pretrained
def base_model(path: str) -> PreTrainedModel:
    """The model to fine-tune, from a directory or by its name on the Hugging Face Hub; "" for a small random one."""
    if path:
        return AutoModelForCausalLM.from_pretrained(path).train()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def is_layer(module: torch.nn.Module) -> bool:
    """Whether this is one of the model's layers, by the names that `transformers` gives them."""
    return type(module).__name__.endswith(("DecoderLayer", "Block"))


class FinetuneTrial(pytorch.PyTorchTrial):
    """An adapter of `rank` for the attention, trained with AdamW."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        hparam = context.get_hparam
        if context.device.type == "cuda":
            context.experimental.use_amp(dtype=torch.bfloat16)
        self.training, self.held_out = blocks(hparam("model"), hparam("block"), most=128)
        adapter = LoraConfig(
            r=hparam("rank"), lora_alpha=2 * hparam("rank"), target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        model = get_peft_model(base_model(hparam("model")), adapter)
        parallel = pytorch.FullyShard(units=is_layer) if hparam("fully_shard") else None
        self.model = context.wrap_model(model, parallel=parallel)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(trained, lr=hparam("lr")))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        batch_size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.training, batch_size=batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.held_out, batch_size=32)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        [tokens] = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        )
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        [tokens] = batch
        return {"validation_loss": self.model(input_ids=tokens, labels=tokens).loss}
