"""torch's profiler around a training: stepped batch by batch, traces where TensorBoard looks for them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, schedule

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training.profiling import Window
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, fails, one_weight

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


class Marked(OneWeight):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        with torch.profiler.record_function(f"batch {batch_idx}"):
            return super().train_batch(batch, epoch_idx, batch_idx)


def profiled(base: type[OneWeight] = OneWeight, **profiler: Any) -> type[Any]:
    """A trial with a profiler of its own."""

    def at_init(self: OneWeight) -> None:
        self.context.set_profiler(activities=[ProfilerActivity.CPU], **profiler)

    return type("Profiled", (Marked, base), {"at_init": at_init})


def traced(directory: Path, prefix: str = "batch ") -> list[list[str]]:
    """The names of ranges in each trace, in the order of the traces."""
    paths = sorted(directory.glob("*.pt.trace.json*"))
    texts = [gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in paths]
    events = [json.loads(text)["traceEvents"] for text in texts]
    return [sorted({e["name"] for e in trace if e["name"].startswith(prefix)}) for trace in events]


@pytest.mark.api("2.15", "2.23")
def test_a_schedule_counts_batches_and_its_traces_are_shown_by_tensorboard(fit: Fit, host: FakeHost) -> None:
    # Reports and validations between batches do not count.
    scheduled = profiled(schedule=schedule(wait=1, warmup=1, active=2, repeat=2))
    trial = fit(scheduled, max_length=Batch(10), reporting_period=Batch(3), validation_period=Batch(2))
    assert isinstance(trial.context.profiler, torch.profiler.profile)
    assert trial.context.profiler.step_num == 10
    assert traced(host.tensorboard_path) == [["batch 2", "batch 3"], ["batch 6", "batch 7"]]
    assert trial.weight == pytest.approx(one_weight(10))


@pytest.mark.api("2.23")
def test_a_training_that_fails_leaves_its_trace(fit: Fit, host: FakeHost) -> None:
    with pytest.raises(KeyError):
        fit(profiled(fails(KeyError("gone"), at=2)), max_length=Batch(5))
    assert traced(host.tensorboard_path) == [["batch 0", "batch 1", "batch 2"]]


@pytest.mark.api("2.23")
def test_traces_go_where_the_trial_wants_them(fit: Fit, host: FakeHost) -> None:
    seen: list[int] = []

    own = profiled(
        schedule=lambda step: ProfilerAction.RECORD_AND_SAVE if step == 1 else ProfilerAction.NONE,
        on_trace_ready=lambda profile: seen.append(profile.step_num),
    )
    fit(own, max_length=Batch(4))
    assert seen == [2]
    assert traced(host.tensorboard_path) == []


def config(**profiling: Any) -> dict[str, Any]:
    return {"exp_conf": {"profiling": {"enabled": True, **profiling}}}


def test_a_window_of_the_config_is_traced_also_after_a_resume(fit: Fit, host: FakeHost) -> None:
    window = config(begin_on_batch=2, end_after_batch=5)
    trial = fit(Marked, init=window, max_length=Batch(4))
    assert traced(host.tensorboard_path) == [["batch 2", "batch 3"]]
    assert trial.weight == pytest.approx(one_weight(4))
    fit(Marked, init=window, max_length=Batch(8), latest_checkpoint=host.checkpoints()[-1])
    assert traced(host.tensorboard_path) == [["batch 2", "batch 3"], ["batch 4", "batch 5"]]
    fit(Marked, init=window, max_length=Batch(9), latest_checkpoint=host.checkpoints()[-1])
    assert len(traced(host.tensorboard_path)) == 2, "the window is over"


def test_an_enabled_window_has_ten_batches_after_the_first_ten(fit: Fit, host: FakeHost) -> None:
    fit(Marked, init=config(), max_length=Batch(30))
    assert traced(host.tensorboard_path) == [[f"batch {number}" for number in range(10, 20)]]
    assert traced(host.tensorboard_path, "enumerate(DataLoader)") == [["enumerate(DataLoader)#next"]], "waits show"


def test_a_window_that_is_not_enabled_is_not_traced(fit: Fit, host: FakeHost) -> None:
    fit(Marked, init=config(enabled=False, begin_on_batch=0), max_length=Batch(2))
    assert traced(host.tensorboard_path) == []


@pytest.mark.parametrize(
    ("profiling", "message"),
    [
        (True, r"exp_conf\['profiling'\] must be a dict, got True"),
        ({"enabled": True, "begin_on_batch": "2"}, "profiling.begin_on_batch must be an int >= 0, got '2'"),
        ({"enabled": True, "begin_on_batch": -2}, "profiling.begin_on_batch must be an int >= 0, got -2"),
        (
            {"enabled": True, "begin_on_batch": 3, "end_after_batch": 2},
            r"must be 3 .* to 1002, .*, got 2",
        ),
        ({"enabled": True, "end_after_batch": 12.5}, r"must be 10 \(begin_on_batch\) to 1009, .*, got 12.5"),
    ],
)
def test_a_programs_window_that_makes_no_sense_is_refused(fit: Fit, profiling: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(OneWeight, max_length=Batch(1), init={"exp_conf": {"profiling": profiling}})


def test_a_trials_own_profiler_takes_the_place_of_the_configs(fit: Fit, host: FakeHost) -> None:
    own = profiled(schedule=schedule(wait=1, warmup=1, active=1, repeat=1))
    fit(own, init=config(begin_on_batch=0), max_length=Batch(4))
    assert traced(host.tensorboard_path) == [["batch 2"]]


def test_a_window_on_a_gpu_records_its_memory_also_if_it_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path)))
    gpu = torch.device("cuda:0")
    window = Window(first=0, rank=3, directory=tmp_path, device=gpu, begin_on_batch=1, end_after_batch=8)
    with pytest.raises(torch.OutOfMemoryError), window:
        assert calls == [], "before the window"
        window.step()
        [began] = calls
        raise torch.OutOfMemoryError
    assert began["max_entries"] == 100_000
    assert calls[1:] == [tmp_path / "rank3.memory.pickle", {"enabled": None}]


def test_a_window_that_can_not_be_written_ends_no_training(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.tensorboard_path.parent.mkdir(parents=True)
    host.tensorboard_path.write_text("a file")
    init = {**config(begin_on_batch=0, end_after_batch=1), "enable_tensorboard_logging": False}
    assert fit(Marked, init=init, max_length=Batch(3)).weight == pytest.approx(one_weight(3))
    assert "a profile could not be written to" in caplog.text


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
