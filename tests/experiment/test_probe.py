"""The probe of batch sizes: its processes, how their failures are told apart, and bad input."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from dray.errors import ConfigError, ExperimentError
from dray.experiment import probe, probe_rank
from dray.training.host import Report
from tests.cli.conftest import dray, home, simulated_once  # noqa: F401 - fixtures
from tests.cli.said import Said
from tests.model_code import imports_undone

TRIAL = """
import os, resource, signal, time
import torch
from torch.utils.data import TensorDataset
from dray import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
        self.size, self.steps = context.get_per_slot_batch_size(), 0

    def build_training_data_loader(self):
        return pytorch.DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=self.size)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(TensorDataset(torch.ones(2, 4)), batch_size=2)

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.spend(len(batch[0]))
        self.context.backward(self.model(batch[0]).sum())
        self.context.step_optimizer(self.optimizer)
        return {}

    def evaluate_batch(self, batch, batch_idx):
        raise AssertionError("a probe does not validate")

    def spend(self, records):
        pass

class TwoRanks(Trial):
    def spend(self, records):
        time.sleep(0.02)
        if self.context.distributed.get_rank() == 1 and records == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.context.distributed.get_rank() == 1 and records == 3:
            os.kill(os.getpid(), signal.SIGKILL)

class LittleMemory(Trial):
    def build_training_data_loader(self):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (5 << 29), resource.RLIM_INFINITY))  # 2.5 GiB more
        return super().build_training_data_loader()

    def spend(self, records):
        torch.empty(records, 1 << 30, dtype=torch.uint8)

class Faulty(Trial):
    def spend(self, records):
        self.context.get_hparam("learning_rate")
"""
CONFIG = {
    "entrypoint": "probed:TwoRanks",
    "hyperparameters": {"global_batch_size": 4, "lr": {"type": "double", "minval": 0.05, "maxval": 0.2}},
    "searcher": {"name": "random", "metric": "loss", "max_length": {"epochs": 1}, "max_trials": 2},
    "optimizations": {"aggregation_frequency": 2},
    "resources": {"slots_per_trial": 2, "slot": "cpu"},
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    level = logging.root.level
    (tmp_path / "probed.py").write_text(TRIAL)
    with imports_undone():
        yield tmp_path
    logging.root.setLevel(level)


@pytest.mark.slow
@pytest.mark.long
def test_a_size_fits_if_it_fits_on_every_rank(
    home: Path,  # noqa: F811
    dray: Callable[..., Said],  # noqa: F811
    model_dir: Path,
) -> None:
    (model_dir / "probed.yaml").write_text(json.dumps(CONFIG))
    found = dray("probe", model_dir / "probed.yaml", "--batches", 4, "--json").value
    # Rank 1 has no memory for 4 records, and is killed with 3.
    sizes = {each["per_slot"]: each for each in found["sizes"]}
    assert {size: each["records_per_second"] is not None for size, each in sizes.items()} == {
        2: True,
        3: False,
        4: False,
    }
    assert found["largest"] == found["suggestion"] == sizes[2]
    assert (sizes[2]["global_batch_size"], sizes[2]["aggregation_frequency"]) == (4, 2)
    assert 0 < sizes[2]["records_per_second"] <= 4 / 0.02  # a batch takes at least so long


@pytest.mark.slow
@pytest.mark.long
def test_an_allocation_that_fails_ends_a_size_and_not_the_probe(model_dir: Path) -> None:
    one_slot = {"entrypoint": "probed:LittleMemory", "resources": {"slots_per_trial": 1, "slot": "cpu"}}
    hyperparameters = {"global_batch_size": 1, "lr": 0.1}
    found = probe.probe({**CONFIG, **one_slot, "hyperparameters": hyperparameters}, model_dir=model_dir, batches=3)
    assert [(each.per_slot, each.records_per_second is not None) for each in found.sizes] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]
    assert (found.suggestion.global_batch_size * found.suggestion.aggregation_frequency) == 2


@pytest.mark.slow
def test_another_error_ends_the_probe_with_the_line_of_the_users_code(model_dir: Path) -> None:
    faulty = {"entrypoint": "probed:Faulty", "resources": {"slots_per_trial": 1, "slot": "cpu"}}
    with pytest.raises(ExperimentError, match=r"(?s)global_batch_size 4, 4 per slot.*probed.py:\d+, in spend"):
        probe.probe({**CONFIG, **faulty}, model_dir=model_dir)


def report(batches: int, epochs: float, records: float) -> Report:
    figures = {"records_per_second": 10 * records, "batches_per_second": 10.0}
    return Report(batches=batches, epochs=epochs, system=figures)


@pytest.mark.parametrize(
    ("epochs", "means", "trained"),
    [
        (2.5, (64.0, 64.0), True),
        (2.5, (64.0, 32.5), True),  # of the last batches of epochs, every other has one record
        (2.5, (32.0, 32.0), False),  # the loader has its own batch size
        (5.0, (20.0, 20.0), True),  # 20 records, all in one batch
    ],
)
def test_a_loader_that_ignores_the_batch_size_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: float, means: tuple[float, float], trained: bool
) -> None:
    job = {"trial_seed": 0, "model_dir": str(tmp_path), "reports": [3, 5], "hparams": {"global_batch_size": 64}}
    host = probe_rank.ProbeHost(tmp_path, job)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    host.publish(report(3, 3 * epochs / 5, means[0]))
    assert codes == []
    host.publish(report(5, epochs, means[1]))
    assert codes == [0]
    outcome = json.loads((tmp_path / "rank_0.json").read_text())
    if trained:
        assert outcome == {"kind": "trained", "records_per_second": 10 * means[1], "has_all_data": epochs == 5}
    else:
        assert outcome["kind"] == "error"
        assert "batches have 32 records with global_batch_size 64" in outcome["error"]


def test_an_interrupt_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return started[-1]

    def interrupt(ranks: list[object], directory: Path) -> None:
        assert directory.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(probe, "_start", start)
    monkeypatch.setattr(probe, "decisive_outcome", interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe.train_group({}, 2, {})
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2
    assert list(tmp_path.iterdir()) == []


class Process:
    """A rank that has ended with this code; None: it runs."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def poll(self) -> int | None:
        return self._code


OOM = {"kind": "oom", "error": "CUDA out of memory"}
ERROR = {"kind": "error", "error": "KeyError: 'lrr'"}
LOST = {"kind": "collective", "error": "Connection closed by peer"}
TRAINED = {"kind": "trained", "records_per_second": 9.0, "has_all_data": False}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([TRAINED, None], TRAINED),
        ([LOST, OOM], OOM),
        ([None, OOM], OOM),
        ([LOST, ERROR], ERROR),
        ([LOST, LOST], LOST),
        ([LOST, -signal.SIGKILL], {"kind": "oom", "error": "rank 1 exited with code -9"}),
        ([LOST, -signal.SIGSEGV], {"kind": "died", "error": "rank 1 exited with code -11"}),
    ],
)
def test_the_failure_of_a_group_is_that_of_the_rank_that_has_caused_it(
    tmp_path: Path, ranks: list[Any], expected: dict[str, Any]
) -> None:
    for rank, outcome in enumerate(ranks):
        (tmp_path / f"rank_{rank}.log").write_text("Fatal Python error\n")
        if isinstance(outcome, dict):
            (tmp_path / f"rank_{rank}.json").write_text(json.dumps(outcome))
    codes = [each if isinstance(each, int) else None for each in ranks]
    found = probe.decisive_outcome(cast("list[subprocess.Popen[bytes]]", list(map(Process, codes))), tmp_path)
    assert found["kind"] == expected["kind"]
    assert found.get("error", "").startswith(expected.get("error", ""))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"entrypoint": "probed:Trial", "hyperparameters": {"lr": 0.1}}, "hyperparameters.global_batch_size: missing"),
        ({"entrypoint": "python3 probed.py"}, "entrypoint: must be a trial class.* python3 probed.py"),
        ({"entrypoint": "probed:TwoRank"}, "entrypoint: probed has no class TwoRank; did you mean TwoRanks"),
        ({"resources": {"slot": "gpu"}}, "resources.slot: gpu, but torch sees none"),
    ],
)
def test_bad_input_is_one_error_before_any_process_starts(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], error: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delattr(probe, "train_group")
    with pytest.raises(ConfigError, match=error) as raised:
        probe.probe({**CONFIG, **changed}, model_dir=model_dir)
    assert len(raised.value.faults) == 1


def test_a_group_larger_than_the_machine_is_an_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=re.escape("slots_per_trial: 2, but this machine has 1 GPU(s)")):
        probe.probe({**CONFIG, "resources": {"slots_per_trial": 2}}, model_dir=model_dir)


def test_each_size_keeps_the_optimizers_batch_and_trains_past_its_first_step(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for 6 records: 2 slots, 8 records per optimizer step."""
    jobs: dict[int, Any] = {}

    def train(job: dict[str, Any], slots: int, environment: dict[str, str | None]) -> dict[str, Any]:
        jobs[job["hparams"]["global_batch_size"]] = job
        assert (slots, environment["CUDA_VISIBLE_DEVICES"]) == (2, "")
        return OOM if job["hparams"]["global_batch_size"] > 12 else TRAINED

    monkeypatch.setattr(probe, "train_group", train)
    found = probe.probe(CONFIG, model_dir=model_dir, batches=3)
    frequencies = {each.global_batch_size: each.aggregation_frequency for each in found.sizes}
    assert frequencies == {4: 2, 8: 1, 12: 1, 14: 1, 16: 1}
    assert {size: job["reports"] for size, job in jobs.items()} == {
        4: [4, 8],
        **{size: [3, 6] for size in (8, 12, 14, 16)},
    }
    assert {job["aggregation_frequency"] for job in jobs.values()} == {1, 2}
    assert len({job["hparams"]["lr"] for job in jobs.values()}) == 1


def test_sigterm_interrupts_the_probe(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "train_group", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            probe.probe(CONFIG, model_dir=model_dir)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_record_fits(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "train_group", lambda *_: OOM)
    with pytest.raises(ExperimentError, match="2, 1 per slot failed:\nCUDA out of memory"):
        probe.probe(CONFIG, model_dir=model_dir)
