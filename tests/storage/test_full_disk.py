"""The disk is really full while a checkpoint is written: training continues, and the previous checkpoint is intact."""

from __future__ import annotations

import json
import os
import platform
import shutil
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
    import json, logging, resource, shutil, subprocess, sys
    from pathlib import Path
    import torch
    from dray import pytorch
    from dray.hosts import LocalHost, use_host
    from dray.pytorch import Batch
    from tests.pytorch.fakes import OneWeight

    logging.basicConfig(level=logging.WARNING)
    kind, directory = sys.argv[1], Path(sys.argv[2])
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", directory], check=True)

    class Large(OneWeight):
        def __init__(self, context):
            super().__init__(context)
            self.more = context.wrap_model(torch.nn.Linear(300, 300))  # 360 kB: a few of them fit
            self.optimizer.add_param_group({{"params": self.more.parameters()}})

        def train_batch(self, batch, epoch_idx, batch_idx):
            if kind == "limit" and batch_idx == 3:
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
    if kind == "tmpfs":
        shutil.copytree(directory / "run", Path(sys.argv[3]) / "run")
    print(json.dumps({{"trained": len(trial.seen), "ended": ended, "run": str(host.directory)}}))
    """
)


@pytest.mark.parametrize(
    "kind",
    [
        "limit",
        pytest.param(
            "tmpfs", marks=pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root")
        ),
    ],
)
def test_training_continues_on_a_full_disk(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(TRAIN)
    (tmp_path / "disk").mkdir()
    # In a mount namespace of its own: nobody else sees that disk, and it goes with the process.
    alone = ["unshare", "--mount"] if kind == "tmpfs" else []
    done = subprocess.run(
        [*alone, sys.executable, str(tmp_path / "script.py"), kind, str(tmp_path / "disk"), str(tmp_path / "copy")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if kind == "tmpfs" and "mount" in done.stderr and "permission denied" in done.stderr.lower():
        pytest.skip("no mounts here")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trained"] == BATCHES, "training went on"
    message = "File too large" if kind == "limit" else "No space left on device"
    assert message in done.stderr
    assert (
        f"no room for a checkpoint in {found['run']} on {platform.node()}: {message}; " in done.stderr + found["ended"]
    )
    run = Path(found["run"]) if kind == "limit" else tmp_path / "copy" / "run"
    saved = [batches for batches, _ in CheckpointStore(run).listed()]
    assert 0 < len(saved) < BATCHES
    assert CheckpointStore(run).latest() == str(run / f"checkpoint_{max(saved)}"), "the last that found room is whole"
    if kind == "limit":
        assert max(saved) == 3
    assert not list(run.glob(".*")), "what was written of the others is removed"
