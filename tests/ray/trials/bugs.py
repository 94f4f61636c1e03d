"""Trials with a bug each, which the hyperparameter ``bug`` names: ``bugs:Buggy``, or ``python3 bugs.py``.

As a user of Determined has them, under whose name dray is imported. On two slots the last rank alone has the bug.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from typing import Any

import determined as det
import torch
import torch.distributed as dist
from determined import core, pytorch
from recorded import Recorded


def do(bug: str) -> None:
    if bug == "exception":
        raise ArithmeticError("went wrong")
    if bug == "exit 0":
        sys.exit()
    if bug == "exit 3":
        sys.exit(3)
    if bug == "exit text":
        sys.exit("no data")
    if bug == "end":
        print("just before its end")
        os._exit(5)
    if bug == "segfault":
        ctypes.string_at(0)
    if bug == "sleep":
        time.sleep(600)
    if bug == "syntax":
        importlib.import_module("bugs_syntax")
    if bug == "import":
        importlib.import_module("bugs_import")


class Buggy(Recorded):
    """Does it at its sixth batch, or where the hyperparameter says; on the last rank, or if it says so on the first."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.bug = context.get_hparam("bug")
        first = self.bug.startswith("first ")
        self.bug = self.bug.removeprefix("first ")
        self.last = context.distributed.rank == (0 if first else context.distributed.size - 1)
        self.do("made")

    def do(self, when: str) -> None:
        where, _, bug = self.bug.rpartition(": ")
        if self.last and where == when:
            do(bug)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 5:
            self.do("batch")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.do("validation")
        return super().evaluate_batch(batch, batch_idx)


def fit(info: Any, distributed: Any) -> None:
    config = info.trial._config  # noqa: SLF001 - as in Determined's examples
    with pytorch.init(hparams=info.trial.hparams, exp_conf=config, distributed=distributed) as context:
        trial = Buggy(context)
        trainer = pytorch.Trainer(trial, context)
        if info.trial.hparams["bug"] == "no fit" and trial.last:
            return
        for _ in range(2 if info.trial.hparams["bug"] == "fit twice" else 1):
            trainer.fit(max_length=pytorch.Batch(8), latest_checkpoint=info.latest_checkpoint)


def loop(where: str, bug: str, distributed: Any) -> None:
    """A loop of its own."""
    with core.init(distributed=distributed) as context:
        if where == "core" and context.distributed.rank == context.distributed.size - 1:
            do(bug)
        if context.distributed.rank == 0 and bug == "barrier":
            dist.barrier()
        if context.distributed.rank == 0 and bug == "pause":  # as long as it likes: it may train alone
            time.sleep(3)
        if context.distributed.rank == 0 and bug != "nothing":
            context.train.report_validation_metrics(steps_completed=8, metrics={"error": 1.0})


def main() -> None:
    info = det.get_cluster_info()
    where, _, bug = info.trial.hparams["bug"].rpartition(": ")
    assert info.trial._steps_completed == 0  # noqa: SLF001 - as in Determined's examples
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if where == "before" and last:
        do(bug)
    dist.init_process_group("gloo")  # as a program under torchrun has to
    distributed = core.DistributedContext.from_torch_distributed()
    if where == "core":
        loop(where, bug, distributed)
    else:
        fit(info, distributed)
    dist.destroy_process_group()
    if where == "after" and last:
        do(bug)


if __name__ == "__main__":
    main()
