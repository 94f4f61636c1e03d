"""Training with its checkpoints in a local S3: saved while training goes on, also while the store is away; resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.storage.checkpoints import RemoteStore
from tests.pytorch.fakes import OneWeight, RemoteHost, one_weight
from tests.storage.s3 import LocalS3

pytestmark = pytest.mark.slow

PERIOD, LENGTH = 4, 12


@pytest.fixture(scope="module")
def s3() -> Iterator[LocalS3]:
    server = LocalS3()
    yield server
    server.stop()


def train(
    store: RemoteStore, directory: Path, before_batch: Callable[[int], None] = lambda batch_idx: None, **fit: Any
) -> tuple[OneWeight, RemoteHost]:
    class Watched(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            before_batch(batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    host = RemoteHost(store, directory)
    with use_host(host), pytorch.init() as context:
        trial = Watched(context)
        pytorch.Trainer(trial, context).fit(max_length=Batch(LENGTH), checkpoint_period=Batch(PERIOD), **fit)
    return trial, host


def test_training_continues_while_the_store_is_unreachable(s3: LocalS3, tmp_path: Path) -> None:
    """It goes away before the first checkpoint, and comes back two batches later: if one waited, it never would."""
    store = RemoteStore(s3.place(tmp_path.name), tmp_path / "scratch")

    def away_and_back(batch_idx: int) -> None:
        if batch_idx == PERIOD - 1:
            s3.stop()
        elif batch_idx == PERIOD + 2:
            s3.start()

    trial, _ = train(store, tmp_path / "trial", away_and_back)
    assert trial.weight == one_weight(LENGTH)
    assert [batches for batches, _ in store.listed()] == [12, 8, 4]
    assert store.latest() == store.id_of(LENGTH)


def test_a_run_resumes_from_a_checkpoint_in_the_object_store(s3: LocalS3, tmp_path: Path) -> None:
    store = RemoteStore(s3.place(tmp_path.name), tmp_path / "scratch")
    train(store, tmp_path / "first")
    for batches in (8, 12):
        store.delete(batches)
    latest = store.latest()
    assert latest is not None
    trial, _ = train(store, tmp_path / "second", latest_checkpoint=latest)
    assert trial.seen[0] == divmod(PERIOD, 5)
    assert trial.weight == one_weight(LENGTH)
    loaded = pytorch.load_trial_from_checkpoint_path(store.open(store.id_of(8)), trial_class=OneWeight)
    assert isinstance(loaded, OneWeight)
    assert loaded.weight == one_weight(8)
