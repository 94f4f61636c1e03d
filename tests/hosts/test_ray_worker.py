"""What a worker's host tells of its trial, as far as that needs no cluster."""

from __future__ import annotations

from pathlib import Path

from dray.hosts.ray_worker import Experiment, Lease, RayHost
from dray.storage import CheckpointStore


def test_its_pulse_changes_with_every_batch_and_while_it_waits_for_its_store(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    lease = Lease(number=1, trial_id=1, trial_seed=0, hparams={}, trial_dir=tmp_path, store=store, last_step=None)
    experiment = Experiment(
        experiment_id=1,
        config={},
        metric="loss",
        smaller_is_better=True,
        max_length=None,
        rungs=(),
        validation_period=None,
        checkpoint_period=None,
        checkpoint_policy="best",
    )
    host = RayHost(desk=None, lease=lease, experiment=experiment, code_dir=None)
    progress = (0, 0)
    host.watch(lambda: progress)
    first = host.pulse()
    assert host.pulse() == first
    progress = (1, 0)
    assert host.pulse() != first
    store.activity.heard()
    assert host.pulse() != host.pulse()
    store.activity.over()
    assert host.pulse() == host.pulse()
