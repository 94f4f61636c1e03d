"""The loop on a GPU: batches that travel beside the computation, and a host that never waits for the device.

What of it can be told without a GPU is tested everywhere.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.pytorch.batch_functions import SideStream, ToDevice, leaves, worth_a_stream
from dray.training import executor
from dray.training.batch_loop import BatchLoop
from dray.training.callback import Hooks
from dray.training.checkpoint import checkpointer, snapshot
from dray.training.checkpoint.plain_state import check_savable
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, Ones, OneWeight

FEATURES = 4096  # a batch of 8 is 128 KiB: worth a stream of its own


class Foreign:
    """A batch of the user's own type."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Foreign:
        return Foreign(self.x.to(device))

    def __len__(self) -> int:
        return len(self.x)


class Summing(pytorch.PyTorchTrial):
    """Sums up the batches that it gets, in an order that matters: s' = 2 s + x, in integers that float64 holds."""

    num_workers = 0
    pin_memory = False
    collate = staticmethod(torch.stack)
    amp: torch.dtype | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        if self.amp is not None:
            context.experimental.use_amp(self.amp)
        self.model = context.wrap_model(nn.Linear(FEATURES, 1, bias=False))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=1e-3))
        self.sum = torch.zeros(FEATURES, dtype=torch.float64, device=context.device)

    def data(self, records: int) -> pytorch.DataLoader:
        x = torch.arange(records * FEATURES, dtype=torch.float32).reshape(records, FEATURES) % 251
        return pytorch.DataLoader(
            x,  # type: ignore[arg-type]
            batch_size=8,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=self.collate,
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.data(64)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.data(16)

    def get_batch_length(self, batch: Any) -> int:
        return len(batch) if isinstance(batch, Foreign) else super().get_batch_length(batch)

    def x(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = (
            batch.x if isinstance(batch, Foreign) else batch["x"][0] if isinstance(batch, dict) else batch
        )
        assert found.device == self.context.device
        return found

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x = self.x(batch)
        if x.is_cuda:
            # Work that the next batch's copy has to run beside.
            busy = torch.ones(1500, 1500, device=x.device)
            for _ in range(20):
                busy = busy @ busy * 1e-4
        self.sum = 2 * self.sum + x.double().sum(0)
        loss = self.model(x / 251).float().pow(2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "largest": x.max()}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.x(batch).sum()}


def expected_sum(batches: int) -> torch.Tensor:
    x = torch.arange(64 * FEATURES, dtype=torch.float64).reshape(8, 8, FEATURES) % 251
    total = torch.zeros(FEATURES, dtype=torch.float64)
    for batch_idx in range(batches):
        total = 2 * total + x[batch_idx % 8].sum(0)
    return total


COLLATES = {
    "as it is": torch.stack,
    "dict": lambda batch: {"x": [torch.stack(batch)], "names": ["a"] * len(batch)},
    "array": lambda batch: {"x": [torch.stack(batch).numpy()]},
    "foreign": lambda batch: Foreign(torch.stack(batch)),
}


@pytest.mark.parametrize("collate", COLLATES)
def test_batches_arrive_as_they_are_and_in_order(fit: Fit, collate: str) -> None:
    trial = type("Trial", (Summing,), {"collate": staticmethod(COLLATES[collate])})
    assert torch.equal(fit(trial, max_length=Batch(3)).sum.cpu(), expected_sum(3))


@pytest.mark.gpu
@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize(("num_workers", "pin_memory"), [(0, False), (0, True), (2, False), (2, True)])
def test_batches_that_travel_ahead_arrive_as_they_are_and_in_order(
    fit: Fit, collate: str, num_workers: int, pin_memory: bool
) -> None:
    how = {"num_workers": num_workers, "pin_memory": pin_memory}
    trial = type("Trial", (Summing,), {"collate": staticmethod(COLLATES[collate]), **how})
    assert torch.equal(fit(trial, max_length=Batch(20)).sum.cpu(), expected_sum(20))


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("tensorboard", [True, False])
def test_between_reports_the_host_never_waits_for_the_device(
    fit: Fit, amp: torch.dtype | None, tensorboard: bool
) -> None:
    class Watched(Summing):
        pin_memory = True

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            # The first batches make what is there for the whole training; after the last one comes the report.
            torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx < 150 else "default")
            return super().train_batch(batch, epoch_idx, batch_idx)

    Watched.amp, init = amp, {"enable_tensorboard_logging": tensorboard}
    try:
        fit(Watched, init=init, max_length=Batch(151), reporting_period=Batch(200))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_large_batches_are_moved_by_a_stream_of_their_own(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        mover = context._run.batch_mover()  # noqa: SLF001 - as the trainer does
        assert isinstance(mover, SideStream)
        moved = mover({"x": torch.ones(8, FEATURES), "y": np.arange(8)})
        assert (moved["x"].sum().item(), moved["y"].sum().item()) == (8 * FEATURES, 28)
        assert {tensor.device for tensor in moved.values()} == {context.device}


@pytest.mark.gpu
def test_checkpoints_are_copied_into_memory_that_a_thread_has_pinned(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "AT_ONCE_BYTES", 0)
    buffer, threads = snapshot.new_buffer, []

    def noted(nbytes: int, pinned: bool) -> torch.Tensor:
        if pinned:
            threads.append(threading.current_thread().name)
        return buffer(nbytes, pinned)

    monkeypatch.setattr(snapshot, "new_buffer", noted)
    fit(Summing, max_length=Batch(6), checkpoint_period=Batch(4))
    assert set(threads) == {"dray-pin"}


@pytest.mark.parametrize("flops", [None, "count"])
def test_memory_for_checkpoints_is_reserved_once_after_the_first_optimizer_step(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, flops: Any
) -> None:
    """All tensors seem to be on a GPU."""
    buffer, sizes, reserved = snapshot.new_buffer, [], []
    hooks = Hooks(batch_metrics=False, checkpoints=False)

    def noted(nbytes: int, pinned: bool) -> torch.Tensor:
        sizes.append(nbytes)
        return buffer(nbytes, False)

    class Loop(BatchLoop):
        def __post_init__(self) -> None:
            self.after_step = self.reserve
            super().__post_init__()

        def reserve(self) -> None:
            mine = checkpointer.Checkpointer(rank=self.rank, host=FakeHost(Path()), description=dict, hooks=hooks)
            mine.reserve()
            state = self.rank.optimisation.state_dict()
            mine.saver.snapshots.take(state)
            reserved.append((self.rank.position.trained, check_savable(state), sum(sizes)))

    monkeypatch.setattr(snapshot, "is_on_gpu", lambda storage: True)
    monkeypatch.setattr(snapshot, "recorded_event", lambda device: None)
    monkeypatch.setattr(snapshot, "new_buffer", noted)
    monkeypatch.setattr(executor, "BatchLoop", Loop)
    fit(
        Summing,
        init={"aggregation_frequency": 3},
        prepare=lambda trial: trial.context.set_flops_per_record(flops) if flops else None,
        max_length=Batch(9),
    )
    [(batches, state_bytes, allocated)] = reserved
    assert batches == 2, "in the third batch"
    assert state_bytes == 3 * FEATURES * 4 + 4, "with Adam's moments"
    assert state_bytes <= allocated < 2 * (state_bytes + 512), "and not a second time for the copy"


class LaggingGpu:
    """Computes nothing until it is waited for. Stands in for `torch.cuda`, with one stream and its events."""

    def __init__(self) -> None:
        self.begun = self.computed = 0

    def Event(self, blocking: bool) -> Any:
        gpu = self

        class Event:
            def record(self, stream: Any) -> None:
                self.batches = gpu.begun

            def synchronize(self) -> None:
                gpu.computed = self.batches

        return Event()

    def Stream(self, device: Any) -> LaggingGpu:
        return self

    def current_stream(self, device: Any) -> LaggingGpu:
        return self

    def stream(self, stream: LaggingGpu) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def wait_stream(self, stream: LaggingGpu) -> None: ...


class OnGpu(torch.Tensor):
    """A tensor on that GPU: the stream that its memory waits for before it is used again."""

    waits_for: Any = None

    def record_stream(self, stream: Any) -> None:
        self.waits_for = stream


def test_batches_of_which_copies_exist_are_limited_however_slow_the_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LaggingGpu()
    monkeypatch.setattr(torch, "cuda", gpu)
    move = SideStream(lambda batch: batch.as_subclass(OnGpu), torch.device("cuda", 0))
    ahead = []
    for _ in range(20):
        assert move(torch.zeros(SideStream.MIN_BYTES // 4)).waits_for is gpu
        ahead.append(gpu.begun - gpu.computed)
        gpu.begun += 1
    assert ahead == [0, 1, 2, *[3] * 17]


def test_small_and_sparse_batches_travel_with_the_computation() -> None:
    large = torch.zeros(SideStream.MIN_BYTES // 4)
    assert worth_a_stream([large])
    assert worth_a_stream({"x": (large.numpy(), ["text", 1])})
    assert not worth_a_stream([large[:-1]])
    assert worth_a_stream([large[:-1], torch.zeros(1)])
    assert not worth_a_stream(collections.UserDict(x=large[:-1]))
    assert worth_a_stream(collections.UserDict(x=large, y=collections.UserDict(y=large)))
    assert worth_a_stream([1, Foreign(large[:1])]), "its size is not known"
    assert not worth_a_stream([large, torch.eye(3).to_sparse()])
    assert worth_a_stream([large, nn.utils.rnn.pack_sequence([large, large])])


class Hidden:
    """Has tensors where nobody looks for them, one of them made by the computation before."""

    def __init__(self, x: torch.Tensor, computed: torch.Tensor) -> None:
        self.parts, self.computed = ({"x": x},), computed

    def to(self, device: torch.device, non_blocking: bool = False) -> Hidden:
        assert non_blocking
        [part] = self.parts
        return Hidden(part["x"].to(device, non_blocking=True), self.computed * 2)


def test_memory_of_a_batch_that_moves_itself_is_kept_until_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, waits, kept = LaggingGpu(), [], list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("Event", "Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(gpu, "wait_stream", lambda stream: waits.append(len(kept)), raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(tensor))
    device = torch.device("meta")  # stands for the GPU's memory
    computed = torch.ones(3, device=device)
    moved = SideStream(ToDevice(device), device)({"a": Hidden(torch.ones(2), computed)})["a"]
    assert len(kept) == 2
    assert {id(tensor) for tensor in kept} == {id(moved.parts[0]["x"]), id(moved.computed)}
    assert waits == [0, 0], "it reads what is still computed, and then the computation reads it"


def test_leaves_are_found_at_any_depth() -> None:
    assert list(leaves({"a": [1, (2, {"b": 3})], "c": [], "d": "text"})) == [1, 2, 3, "text"]


@pytest.mark.api("2.28")
def test_a_trial_may_move_its_batches_by_itself(fit: Fit, tmp_path: Path) -> None:
    """Arrays become tensors on a CPU too."""

    class Arrays(OneWeight):
        by_itself = False

        def at_init(self) -> None:
            self.types: set[type] = set()
            if self.by_itself:
                self.context.experimental.disable_auto_to_device()

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Ones(10), batch_size=2, collate_fn=lambda rows: np.ones((2, 1), np.float32))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.types.add(type(batch))
            return super().train_batch(self.context.to_device(batch), epoch_idx, batch_idx)

    assert fit(Arrays, FakeHost(tmp_path / "moved"), max_length=Batch(2)).types == {torch.Tensor}
    Arrays.by_itself = True
    assert fit(Arrays, max_length=Batch(2)).types == {np.ndarray}
