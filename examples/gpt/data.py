"""The training text: the sources of Python's standard library, which every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dray import pytorch

#: The vocabulary. Any other character in the sources (a few names in comments) is read as the last one.
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1))) + "\N{REPLACEMENT CHARACTER}"


def encode(text: str) -> torch.Tensor:
    """Characters as numbers: uint8 tensor (characters,)."""
    table = torch.full((256,), len(CHARACTERS) - 1, dtype=torch.uint8)
    table[[ord(c) for c in CHARACTERS[:-1]]] = torch.arange(len(CHARACTERS) - 1, dtype=torch.uint8)
    codes = text.expandtabs(4).encode("latin-1", errors="replace")
    return table[torch.frombuffer(bytearray(codes), dtype=torch.uint8).long()]


def decode(codes: torch.Tensor) -> str:
    """The inverse of `encode`."""
    return "".join(CHARACTERS[code] for code in codes.tolist())


@pytorch.cached  # several trials run in one process: read the sources once
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out text: every tenth module is held out; packages are left out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[str], list[str]] = ([], [])
    for number, file in enumerate(files):
        parts[number % 10 == 9].append(file.read_text(encoding="utf-8", errors="replace"))
    training, held_out = (encode("\n".join(part)) for part in parts)
    return training, held_out


class Blocks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of a text, each with the next character for each of its characters: int64 tensors (block,) and (block,).

    Args:
        text: from `encode`.
        block: characters per block.
        most: the maximum number of blocks, evenly spread; None for all.
    """

    def __init__(self, text: torch.Tensor, block: int, most: int | None = None) -> None:
        self.text, self.block = text, block
        pieces = (len(text) - 1) // block
        self.starts = torch.arange(pieces) * block
        if most is not None and most < pieces:
            self.starts = self.starts[torch.arange(most) * pieces // most]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.starts[index])
        piece = self.text[start : start + self.block + 1].long()
        return piece[:-1], piece[1:]
