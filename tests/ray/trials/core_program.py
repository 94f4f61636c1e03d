"""Programs with loops of their own, as they are written for Determined: one weight, w' = w + 2 lr (1 - w).

``python3 core_program.py epochs``: reports epochs, and asks whether to end. ``operations``: trains as far as the search
says. ``next_operation``: asks for its only operation by ``next()``, and is killed once that is completed. ``shards``:
two ranks, each with a file of its own in each checkpoint. ``deaf``: never asks whether to end.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import determined as det
import torch.distributed as dist
from core_hparams import LR

BATCHES = 5  # of an epoch


class Model:
    def __init__(self, lr: float) -> None:
        self.lr, self.weight, self.epoch = lr, 0.0, 0

    def train_epoch(self) -> float:
        for _ in range(BATCHES):
            loss = (1 - self.weight) ** 2
            self.weight += 2 * self.lr * (1 - self.weight)
        self.epoch += 1
        return loss

    @property
    def steps(self) -> int:
        return self.epoch * BATCHES

    @property
    def error(self) -> float:
        return abs(1 - self.weight)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps([self.weight, self.epoch]))

    def load(self, path: Path) -> None:
        self.weight, self.epoch = json.loads(path.read_text())


def note(record: str, **what: object) -> None:
    with open(record, "a") as file:
        file.write(json.dumps({"trial": det.get_cluster_info().trial.trial_id, "pid": os.getpid(), **what}) + "\n")


def first(file: str) -> bool:
    """Whether nobody has called this with the file before."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def restored(core_context, info, model: Model) -> None:
    if info.latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(info.latest_checkpoint) as path:
            model.load(path / "weight.json")
    note(info.trial.hparams["record"], began=model.epoch)


def save(core_context, model: Model) -> str:
    with core_context.checkpoint.store_path({"steps_completed": model.steps}) as (path, storage_id):
        model.save(path / "weight.json")
    return storage_id


def one_epoch(core_context, info, model: Model) -> None:
    hparams = info.trial.hparams
    loss = model.train_epoch()
    note(hparams["record"], epoch=model.epoch)
    core_context.train.report_training_metrics(steps_completed=model.steps, metrics={"loss": loss})
    time.sleep(hparams["pause_s"])
    if model.epoch == hparams.get("killed_at") and first(f"{hparams['record']}.killed"):
        os.kill(os.getpid(), signal.SIGKILL)


def epochs(info) -> None:
    model = Model(LR)
    with det.core.init() as core_context:
        restored(core_context, info, model)
        while model.epoch < 8:
            one_epoch(core_context, info, model)
            core_context.train.report_validation_metrics(model.steps, {"error": model.error, "epochs": model.epoch})
            save(core_context, model)
            if core_context.preempt.should_preempt():
                note(info.trial.hparams["record"], told=model.epoch)
                return


def operations(info) -> None:
    model = Model(info.trial.hparams["lr"])
    with det.core.init() as core_context:
        restored(core_context, info, model)
        for op in core_context.searcher.operations():
            while model.epoch < op.length:
                one_epoch(core_context, info, model)
                op.report_progress(model.epoch)
                save(core_context, model)
                if core_context.preempt.should_preempt():
                    return
            note(info.trial.hparams["record"], length=op.length)
            core_context.train.report_validation_metrics(model.steps, {"error": model.error})
            op.report_completed(model.error)


def shards(info) -> None:
    dist.init_process_group("gloo")
    distributed = det.core.DistributedContext.from_torch_distributed()
    model = Model(info.trial.hparams["lr"])
    with det.core.init(distributed=distributed) as core_context:
        rank = core_context.distributed.rank
        if info.latest_checkpoint is not None:
            with core_context.checkpoint.restore_path(info.latest_checkpoint) as path:
                assert sorted(file.name for file in path.glob("rank_*")) == ["rank_0.json", "rank_1.json"]
                model.load(path / f"rank_{rank}.json")
        note(info.trial.hparams["record"], began=model.epoch, rank=rank)
        while model.epoch < 8:
            loss = model.train_epoch()
            time.sleep(info.trial.hparams["pause_s"])
            if rank == 0:
                core_context.train.report_training_metrics(model.steps, {"loss": loss})
                core_context.train.report_validation_metrics(model.steps, {"error": model.error, "epochs": model.epoch})
            metadata = {"steps_completed": model.steps, f"of_{rank}": model.epoch}
            with core_context.checkpoint.store_path(metadata, shard=True) as (path, _):
                model.save(path / f"rank_{rank}.json")
            note(info.trial.hparams["record"], epoch=model.epoch, rank=rank)
            if info.trial.trial_id == 0 and model.epoch == 3 and rank == 1 and info.latest_checkpoint is None:
                os.kill(os.getpid(), signal.SIGKILL)
            if core_context.preempt.should_preempt():
                return
    dist.destroy_process_group()


def deaf(info) -> None:
    model = Model(info.trial.hparams["lr"])
    with det.core.init() as core_context:
        while True:
            one_epoch(core_context, info, model)
            core_context.distributed.allgather(model.weight)  # the others wait here for a rank that is ended
            if core_context.distributed.rank == 0:
                core_context.train.report_validation_metrics(model.steps, {"error": model.error, "epochs": model.epoch})


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    globals()[sys.argv[1]](det.get_cluster_info())
