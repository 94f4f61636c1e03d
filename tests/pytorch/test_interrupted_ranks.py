"""Ctrl-C on one of two ranks: both stop at the same batch and raise it; and only the chief says anything."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dray import pytorch
from dray.core import DistributedContext
from tests.pytorch.fakes import OneWeight
from tests.pytorch.processes import serve

pytestmark = pytest.mark.slow


class Interrupted(OneWeight):
    def at_batch(self, batch_idx: int) -> None:
        if batch_idx == 12 and self.context.distributed.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(directory: Path) -> dict[str, Any]:
    os.environ["DRAY_HOME"] = str(directory)
    raised = False
    with pytorch.init(distributed=DistributedContext.from_torch_distributed()) as context:
        trial = Interrupted(context)
        try:
            # An explicit "best" is warned about.
            pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(1_000_000), checkpoint_policy="best")
        except KeyboardInterrupt:
            raised = True
    dist.barrier()
    return {"raised": raised, "begun": len(trial.seen), "level": logging.getLogger("dray").level}


def test_both_stop_at_the_same_batch_save_and_raise(ranks: list[dict[str, Any]], directory: Path) -> None:
    assert [rank["interrupted"]["raised"] for rank in ranks] == [True, True]
    begun = {rank["interrupted"]["begun"] for rank in ranks}
    assert len(begun) == 1
    [run] = (directory / "interrupted" / "local").iterdir()
    assert (run / f"checkpoint_{begun.pop()}" / "manifest.json").exists()


def test_only_the_chief_says_anything(ranks: list[dict[str, Any]], directory: Path) -> None:
    told = (directory / "said_by_0").read_text()
    assert told.count("this run uses 'all'") == 1
    assert "training 1,000,000 batches" in told
    assert f"stopped after {ranks[0]['interrupted']['begun']:,} of 1,000,000 batches" in told
    assert (directory / "said_by_1").read_text() == ""
    assert [rank["interrupted"]["level"] for rank in ranks] == [0, 0]


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # So that each rank's are kept apart: the tests read what this one says.
    sys.stderr = (Path(sys.argv[1]) / f"said_by_{os.environ['RANK']}").open("w", buffering=1)
    serve([interrupted])
