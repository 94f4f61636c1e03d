"""torch's profiler around a training: stepped batch by batch, traces where TensorBoard looks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, schedule

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


class Profiled(OneWeight):
    profiler: dict[str, Any]

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.set_profiler(activities=[ProfilerActivity.CPU], **self.profiler)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        with torch.profiler.record_function(f"batch {batch_idx}"):
            return super().train_batch(batch, epoch_idx, batch_idx)


def traced(directory: Path) -> list[list[str]]:
    """The batches in each trace, in the order of the traces."""
    events = [json.loads(path.read_text())["traceEvents"] for path in sorted(directory.glob("*.pt.trace.json"))]
    return [sorted({e["name"] for e in trace if e["name"].startswith("batch ")}) for trace in events]


@pytest.mark.api("2.15", "2.23")
def test_a_schedule_counts_batches_and_its_traces_are_shown_by_tensorboard(fit: Fit, host: FakeHost) -> None:
    class Scheduled(Profiled):
        profiler = {"schedule": schedule(wait=1, warmup=1, active=2, repeat=2)}  # noqa: RUF012

    # Reports and validations between batches do not count.
    trial = fit(Scheduled, max_length=Batch(10), reporting_period=Batch(3), validation_period=Batch(2))
    assert isinstance(trial.context.profiler, torch.profiler.profile)
    assert trial.context.profiler.step_num == 10
    assert traced(host.tensorboard_path) == [["batch 2", "batch 3"], ["batch 6", "batch 7"]]
    assert trial.weight == pytest.approx(one_weight(10))


@pytest.mark.api("2.23")
def test_a_training_that_fails_leaves_its_trace(fit: Fit, host: FakeHost) -> None:
    class Failing(Profiled):
        profiler = {}  # noqa: RUF012

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise KeyError("gone")
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(KeyError):
        fit(Failing, max_length=Batch(5))
    assert traced(host.tensorboard_path) == [["batch 0", "batch 1"]]


@pytest.mark.api("2.23")
def test_traces_go_where_the_trial_wants_them(fit: Fit, host: FakeHost) -> None:
    seen: list[int] = []

    class Own(Profiled):
        profiler = {  # noqa: RUF012
            "schedule": lambda step: ProfilerAction.RECORD_AND_SAVE if step == 1 else ProfilerAction.NONE,
            "on_trace_ready": lambda profile: seen.append(profile.step_num),
        }

    fit(Own, max_length=Batch(4))
    assert seen == [2]
    assert traced(host.tensorboard_path) == []


@pytest.mark.api("2.15")
def test_without_set_profiler_there_is_none(fit: Fit) -> None:
    assert fit(OneWeight, max_length=Batch(1)).context.profiler is None


@pytest.mark.api("8.14")
def test_configure_profiler_is_accepted_and_logs_that_it_has_no_effect(
    host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    with use_host(host), pytorch.init() as context:
        trial = OneWeight(context)
        trainer = pytorch.Trainer(trial, context)
        trainer.configure_profiler(sync_timings=True, enabled=False, begin_on_batch=0, end_after_batch=None)
        assert not caplog.records
        trainer.configure_profiler(enabled=True, begin_on_batch=1, end_after_batch=2)
        trainer.fit(max_length=Batch(3), profiling_enabled=True)
    assert [(record.levelname, "context.set_profiler()" in record.message) for record in caplog.records] == [
        ("ERROR", True),
        ("ERROR", True),
    ]
    assert trial.weight == pytest.approx(one_weight(3))
    assert traced(host.tensorboard_path) == []
