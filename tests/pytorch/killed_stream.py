"""`python killed_stream.py <directory> <kind> <batches>`: train on a stream in one process after another, each from the
last checkpoint in the directory; SIGKILL ends each within one of these batches, and the last one trains to the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from tests.pytorch.fakes import FakeHost, state_of
from tests.pytorch.test_streams import LOADERS, kind_of


def train(directory: Path, kind: str, kill_at: int | None) -> None:
    base: Any = kind_of(LOADERS[kind], directory / "parquet")

    class Killed(base):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            result = super().train_batch(batch, epoch_idx, batch_idx)
            with (directory / "seen.jsonl").open("a") as file:
                file.write(json.dumps(self.seen[-1][1:]) + "\n")
            if batch_idx == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    found = sorted(directory.glob("checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    with use_host(FakeHost(directory)), pytorch.init(hparams={"global_batch_size": 4}) as context:
        made = Killed(context)
        pytorch.Trainer(made, context).fit(
            max_length=Batch(40),
            checkpoint_period=Batch(3),
            validation_period=Batch(5),
            checkpoint_policy="none",
            latest_checkpoint=str(found[-1]) if found else None,
        )
        torch.save(state_of(context), directory / "state.pth")


def main(directory: Path, kind: str, kills: list[int]) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # which imports a thousand modules
    if "Hugging" in kind:
        import datasets  # noqa: F401 - before the forks, because it takes seconds
    os.environ["HF_HOME"] = str(directory / "hf")
    for kill_at in [*kills, None]:
        if (child := os.fork()) == 0:
            train(directory, kind, kill_at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == (0 if kill_at is None else signal.SIGKILL), status


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
