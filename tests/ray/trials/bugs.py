"""Trials with a bug each, which the hyperparameter ``bug`` names: ``bugs:Buggy``, or ``python3 bugs.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from recorded import Recorded

import dray
from dray import pytorch


def in_a_batch(bug: str) -> None:
    if bug == "exception":
        raise ArithmeticError("in a batch")
    if bug == "exit 3":
        sys.exit(3)
    if bug == "exit 0":
        sys.exit()
    if bug == "exit text":
        sys.exit("no data")
    if bug == "end":
        os._exit(5)
    if bug == "cancelled":
        raise KeyboardInterrupt


class Buggy(Recorded):
    """Does it at its sixth batch, or when it is made; the last rank alone."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.last = context.distributed.rank == context.distributed.size - 1
        self.bug = context.get_hparam("bug") if self.last else "none"
        if self.bug == "init":
            raise ArithmeticError("in the constructor")
        if self.bug == "exit in init":
            sys.exit(3)
        if self.bug == "lazy syntax":
            import bugs_syntax  # noqa: F401
        if self.bug == "lazy import":
            import bugs_import  # noqa: F401

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 5:
            in_a_batch(self.bug)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.bug == "evaluate":
            raise ArithmeticError("in the validation")
        return super().evaluate_batch(batch, batch_idx)


def main() -> None:
    info = dray.get_cluster_info()
    assert info is not None
    bug, last = info.trial.hparams["bug"], int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and bug.startswith("before: "):
        in_a_batch(bug.removeprefix("before: "))
    with pytorch.init() as context:
        trainer = pytorch.Trainer(Buggy(context), context)
        trainer.fit(latest_checkpoint=info.latest_checkpoint)
        if bug == "fit twice":
            trainer.fit(latest_checkpoint=info.latest_checkpoint)
    if last and bug.startswith("after: "):
        in_a_batch(bug.removeprefix("after: "))


if __name__ == "__main__":
    main()
