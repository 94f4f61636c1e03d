"""A program with a loop of its own, as it is written for Determined: one weight, w' = w + 2 lr (1 - w).

It reports each epoch, saves, and asks whether to end. The first one to come to the epoch ``killed_at`` is killed there.
"""

from __future__ import annotations

import json
import os
import signal

import determined as det
from core_hparams import LR
from recorded import first, note

BATCHES = 5  # of an epoch


def main() -> None:
    info = det.get_cluster_info()
    hparams, weight, epoch = info.trial.hparams, 0.0, 0
    who = {"trial": info.trial.trial_id, "pid": os.getpid()}
    with det.core.init() as core_context:
        if info.latest_checkpoint is not None:
            with core_context.checkpoint.restore_path(info.latest_checkpoint) as path:
                weight, epoch = json.loads((path / "weight.json").read_text())
        note(hparams["record"], **who, began=epoch)
        while epoch < 8:
            for _ in range(BATCHES):
                loss = (1 - weight) ** 2
                weight += 2 * LR * (1 - weight)
            epoch += 1
            steps = epoch * BATCHES
            note(hparams["record"], **who, epoch=epoch)
            core_context.train.report_training_metrics(steps_completed=steps, metrics={"loss": loss})
            if epoch == hparams["killed_at"] and first(f"{hparams['record']}.killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            core_context.train.report_validation_metrics(steps, {"error": abs(1 - weight), "epochs": epoch})
            with core_context.checkpoint.store_path({"steps_completed": steps}) as (path, _):
                (path / "weight.json").write_text(json.dumps([weight, epoch]))
            if core_context.preempt.should_preempt():
                return


if __name__ == "__main__":
    main()
