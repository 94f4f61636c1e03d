"""A data set processed batch by batch: alone, on two ranks that are threads here, and going on after a pause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from dray.core import ClusterInfo, DistributedContext, TrialInfo
from dray.hosts import LocalHost, use_host
from dray.pytorch.experimental import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process
from dray.storage import Location, RemoteDirectory, store_at
from dray.training.errors import PeerFailed
from tests.core.test_distributed import nodes, on_ranks

pytestmark = pytest.mark.usefixtures("home")

DATA = TensorDataset(torch.arange(10.0))


class Doubling(TorchBatchProcessor):
    """Writes the double of each record, when progress is saved; and adds them all up."""

    fails_at: int | None = None

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context
        self.model = context.prepare_model_for_inference(torch.nn.Dropout(0.9))
        self.total = context.wrap_reducer(sum, name="total")
        self.held: dict[str, list[float]] = {}

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails_at and self.context.get_distributed_rank() == 0:
            raise OSError("no such record")
        (values,) = self.context.to_device(batch)
        self.held[f"{batch_idx}.json"] = (2 * self.model(values)).tolist()
        self.total.update(values.sum().item())

    def on_checkpoint_start(self) -> None:
        with self.context.upload_path() as path:
            for name, values in self.held.items():
                (path / name).write_text(json.dumps(values))
        self.held = {}

    def on_finish(self) -> None:
        self.context.report_metrics("inference", 1, {"finished": True})


def outputs(home: Path) -> dict[str, list[float]]:
    (place,) = home.glob("local/*/outputs")
    return {path.relative_to(place).as_posix(): json.loads(path.read_text()) for path in sorted(place.rglob("*.json"))}


def reported(home: Path, kind: str) -> list[dict[str, Any]]:
    (file,) = home.glob("local/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row[kind] for row in rows if kind in row]


def test_every_batch_is_processed_once(home: Path) -> None:
    torch_batch_process(Doubling, DATA, batch_size=4, checkpoint_interval=2)
    assert outputs(home) == {
        "rank_0/0.json": [0, 2, 4, 6],
        "rank_0/1.json": [8, 10, 12, 14],
        "rank_0/2.json": [16, 18],
    }
    assert reported(home, "validation") == [{"total": 45.0}]
    assert sorted(path.name for path in home.glob("local/*/checkpoint_*")) == ["checkpoint_2", "checkpoint_3"]


def test_two_ranks_share_the_batches_and_their_metric_is_that_of_both(home: Path) -> None:
    def one(peers: DistributedContext) -> None:
        torch_batch_process(
            Doubling, DATA, dataloader_kwargs={"batch_size": 4}, checkpoint_interval=1, distributed_context=peers
        )

    on_ranks(nodes(2), one)
    assert outputs(home) == {
        "rank_0/0.json": [0, 2, 4, 6],
        "rank_0/1.json": [16, 18],
        "rank_1/0.json": [8, 10, 12, 14],
    }
    assert reported(home, "validation") == [{"total": 45.0}]


def test_what_fails_on_one_rank_fails_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubling, "fails_at", 1)

    def one(peers: DistributedContext) -> str:
        with pytest.raises((OSError, PeerFailed)) as error:
            torch_batch_process(Doubling, DATA, batch_size=2, distributed_context=peers)
        return str(error.value)

    assert on_ranks(nodes(2), one) == [
        "no such record",
        "rank 0 failed while processing batches: OSError('no such record')",
    ]


class Paused(LocalHost):
    """Is asked to stop."""

    def stop_requested(self) -> bool:
        return True


@pytest.fixture
def paused(tmp_path: Path, set_info: Any) -> Any:
    def run(latest: str | None, host: type[LocalHost], **arguments: Any) -> None:
        trial = TrialInfo(trial_id=1, experiment_id=1, trial_seed=0, hparams={"width": 3}, config={})
        set_info(ClusterInfo(trial=trial, latest_checkpoint=latest))
        with host(tmp_path / "results/local/trial") as here, use_host(here):
            torch_batch_process(Doubling, DATA, batch_size=2, checkpoint_interval=2, **arguments)

    return run


def test_a_paused_run_resumes_after_the_batches_that_it_has_processed(paused: Any, home: Path) -> None:
    paused(None, Paused)
    assert sorted(outputs(home)) == ["rank_0/0.json", "rank_0/1.json"]
    for path in home.glob("local/*/outputs/rank_0/*"):
        path.write_text("[]")
    paused(str(home / "local/trial/checkpoint_2"), LocalHost)
    assert [len(values) for values in outputs(home).values()] == [0, 0, 2, 2, 2]


def test_it_ends_after_max_batches(home: Path) -> None:
    torch_batch_process(Doubling, DATA, batch_size=2, max_batches=3)
    assert sorted(outputs(home)) == [f"rank_0/{i}.json" for i in range(3)]


def test_hyperparameters_are_those_of_the_experiment(
    paused: Any, set_info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(Doubling, "on_finish", lambda self: seen.append(self.context.get_hparams()))
    paused(None, LocalHost)
    assert seen == [{"width": 3}]
    set_info(None)
    with pytest.raises(RuntimeError, match="a local run has no hyperparameters"):
        torch_batch_process(Doubling, DATA)


def test_outputs_go_to_the_object_store_of_the_checkpoints(tmp_path: Path) -> None:
    place = Location.of(f"memory://results/{tmp_path.name}/trial_1")
    with LocalHost(tmp_path / "trial", store=store_at(place, tmp_path / "scratch")) as here, use_host(here):
        torch_batch_process(Doubling, DATA, batch_size=5)
    there = RemoteDirectory(place.child("outputs"))
    assert sorted(there.sizes()) == ["rank_0/0.json", "rank_0/1.json"]
    assert json.loads(there.read("rank_0/1.json")) == [10, 12, 14, 16, 18]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_interval": 0}, "checkpoint_interval must be an int >= 1, got 0"),
        ({"dataloader_kwargs": {"shuffle": True}}, "can't contain shuffle: .* leave it out"),
        ({"dataloader_kwargs": {"sampler": [1]}}, "can't contain sampler: "),
        (
            {"batch_size": 2, "dataloader_kwargs": {"batch_size": 2}},
            "batch_size is given both as an argument and in dataloader_kwargs",
        ),
    ],
)
def test_arguments_that_can_not_be(arguments: dict[str, Any], message: str, home: Path) -> None:
    with pytest.raises(ValueError, match=message):
        torch_batch_process(Doubling, DATA, **arguments)
    assert not home.exists()


def test_a_data_set_needs_a_length() -> None:
    class Endless(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="needs a dataset with a length, got Endless"):
        torch_batch_process(Doubling, Endless())
