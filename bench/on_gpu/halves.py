"""All GPUs: tensor parallelism of size 2, sharded over the rest, saved as shards, and resumed on half of the GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import tp
from part import attempt, check, figure, joined, on_ranks, several, well
from tp import BATCHES


def main(tiny: bool) -> None:
    """Train on one rank; on all, for two thirds and to the end; and to the end on half of them, from two thirds."""
    if not (size := several()):
        return
    saved: dict[str, dict[str, Any]] = {}
    for name, ranks, length, latest in (
        ("one rank", 1, BATCHES, ""),
        ("all", size, BATCHES, ""),
        ("all, for two thirds", size, 2 * BATCHES // 3, ""),
        ("half, from there on", max(size // 2, 1), BATCHES, "all, for two thirds"),
    ):
        with attempt(name):
            checkpoint = saved[latest]["checkpoint"] if latest else ""
            for child in on_ranks(ranks, "halves", "train", name, length, checkpoint):
                well(child, name)
            saved[name] = torch.load(f"{name}.pt", weights_only=True)
            one = saved["one rank"]["weights"]
            differ = max(float((saved[name]["weights"][each] - one[each]).abs().max()) for each in one)
            if length == BATCHES:
                figure(f"{name}: weights differ from those of one rank by at most", f"{differ:.1e}")
                check(f"{name}: weights of one rank", differ < 1e-4, True)


def train(name: str, length: str, latest: str) -> None:
    """One rank of a run."""
    peers = joined()
    several_ranks = name != "one rank"
    weights, checkpoint = tp.train(
        tp.OPTIMIZERS["SGD with momentum"],
        distributed=peers,
        tp=2 if peers.size > 1 else 1,
        length=int(length),
        latest_checkpoint=latest or None,
        divided=several_ranks,
        sharded=several_ranks,
    )
    if peers.rank == 0:
        torch.save({"weights": weights, "checkpoint": str(checkpoint)}, f"{name}.pt")
    dist.destroy_process_group()
