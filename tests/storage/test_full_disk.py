"""A file that may not grow (EFBIG): training continues, and the previous checkpoint is intact."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dray.storage import CheckpointStore

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BATCHES = 8
TRAIN = textwrap.dedent(
    f"""
    import json, logging, resource, sys
    from pathlib import Path
    import torch
    from dray import pytorch
    from dray.hosts import LocalHost, use_host
    from dray.pytorch import Batch
    from tests.pytorch.fakes import OneWeight

    logging.basicConfig(level=logging.WARNING)
    directory = Path(sys.argv[1])

    class Large(OneWeight):
        def __init__(self, context):
            super().__init__(context)
            self.more = context.wrap_model(torch.nn.Linear(300, 300))  # 360 kB: a few of them fit
            self.optimizer.add_param_group({{"params": self.more.parameters()}})

        def train_batch(self, batch, epoch_idx, batch_idx):
            if batch_idx == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            return super().train_batch(batch, epoch_idx, batch_idx)

    with LocalHost(directory / "run") as host, use_host(host), pytorch.init() as context:
        host.code_dir = None
        trial = Large(context)
        try:
            pytorch.Trainer(trial, context).fit(max_length=Batch({BATCHES}), checkpoint_period=Batch(1))
        except OSError as error:
            ended = f"{{type(error).__name__}}: {{error}}"
        else:
            ended = "well"
    print(json.dumps({{"trained": len(trial.seen), "ended": ended, "run": str(host.directory)}}))
    """
)


def test_training_continues_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trained"] == BATCHES, "training went on"
    run = Path(found["run"])
    no_room = f"no room for a checkpoint in {run} on {platform.node()}: File too large; "
    assert no_room in done.stderr
    assert no_room in found["ended"]
    assert [batches for batches, _ in CheckpointStore(run).listed()] == [3, 2, 1]
    assert CheckpointStore(run).latest() == str(run / "checkpoint_3"), "the last that found room is whole"
    assert not list(run.glob(".*")), "what was written of the others is removed"
