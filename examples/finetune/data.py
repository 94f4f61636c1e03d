"""The training text: the sources of Python's standard library, which every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from dray import pytorch


@pytorch.cached  # several trials run in one process: read and tokenize once
def blocks(model: str, block: int, most: int) -> tuple[TensorDataset, TensorDataset]:
    """Blocks to train on, and held-out blocks from every tenth module: int64 tensors (blocks, block).

    Args:
        model: a Hugging Face model, for its tokenizer; "" for bytes.
        block: tokens per block.
        most: the maximum number of held-out blocks.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    parts = [
        "\n".join(text for number, text in enumerate(texts) if (number % 10 == 9) is held) for held in (False, True)
    ]
    training, held_out = (encode(model, part)[:-1] for part in parts)
    return (
        TensorDataset(training[: len(training) // block * block].view(-1, block)),
        TensorDataset(held_out[: len(held_out) // block * block].view(-1, block)[:most]),
    )


def encode(model: str, text: str) -> torch.Tensor:
    """A text as tokens: int64 tensor (tokens,)."""
    if model:
        from transformers import AutoTokenizer

        return torch.tensor(AutoTokenizer.from_pretrained(model)(text)["input_ids"])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
