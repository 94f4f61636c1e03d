"""`pytorch.pretrained`: one copy of frozen weights for all trials of a process, and none in their checkpoints."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray import memory, pytorch
from dray.core import DistributedContext
from dray.pytorch import Batch
from dray.training.optimisation import bare
from dray.training.parallel.exchange import on_failure
from dray.training.pretrained import (
    Pretrained,
    check_same,
    digest_of,
    hash_on_chiefs,
    share_on_machine,
    without_shared,
)
from dray.training.pretrained import _bytes as bytes_of
from tests.core.test_distributed import nodes, on_ranks
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight
from tests.pytorch.resuming import assert_equal

MODULE: Any = sys.modules["dray.pytorch.cached"]
WIDTH = 1024
loaded: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    loaded.clear()
    yield
    MODULE.drop_all()


def made(name: str) -> nn.Sequential:
    """Stands for what a library loads from files: other weights for each name."""
    loaded.append(name)
    torch.manual_seed(sum(name.encode()))
    return nn.Sequential(nn.Linear(1, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@pytorch.pretrained
def base(name: str) -> nn.Sequential:
    return made(name)


@pytorch.pretrained
def no_module() -> Any:
    return {"weight": torch.ones(2)}


class Finetuned(OneWeight):
    """A head on a frozen base."""

    weights = "a"

    def at_init(self) -> None:
        self.context.models.clear()
        self.context.optimizers.clear()
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"base": self.load(), "head": nn.Linear(WIDTH, 1)})
        self.prepare()
        self.net = self.context.wrap_model(self.net)
        self.optimizer = self.context.wrap_optimizer(torch.optim.Adam(self.net.parameters(), lr=1e-2))

    def load(self) -> nn.Module:
        return base(self.weights)

    def prepare(self) -> None:
        """Called before the model is wrapped."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        spread = batch * torch.arange(1, len(batch) + 1)[:, None]
        loss: torch.Tensor = ((self.net["head"](self.net["base"](spread)) - 1) ** 2).mean()
        return loss


class OtherWeights(Finetuned):
    weights = "b"


class NotShared(Finetuned):
    def load(self) -> nn.Module:
        return made(self.weights)


class LastLayerToo(Finetuned):
    def prepare(self) -> None:
        self.net["base"][2].requires_grad_(True)


class InFile(Finetuned):
    """Kept as for a sharded model."""

    def prepare(self) -> None:
        share_on_machine(self.net, self.context.distributed)


class Merging(Finetuned):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.net["base"][2].weight.data += 1  # as PEFT merges an adapter
        return super().train_batch(batch, epoch_idx, batch_idx)


class Reordering(Finetuned):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        weight = self.net["base"][2].weight
        weight.data = weight.data.flip(0)
        return super().train_batch(batch, epoch_idx, batch_idx)


def addresses(module: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


def saved(checkpoint: str) -> dict[str, Any]:
    return torch.load(Path(checkpoint, "state-dict.pth"), weights_only=True)  # type: ignore[no-any-return]


def weights(trial: Finetuned) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in bare(trial.net).state_dict().items()}


def test_modules_are_the_callers_own_and_their_weights_are_loaded_once() -> None:
    first, second = base("a"), base("a")
    first.append(nn.ReLU())
    first[1].running_mean += 1
    assert len(second) == 3
    assert not second[1].running_mean.any()
    assert addresses(first) == addresses(second)
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert loaded == ["a"]
    assert addresses(base("b")) != addresses(first)


def test_a_checkpoint_has_what_was_trained_and_the_next_run_continues_from_it(fit: Fit, tmp_path: Path) -> None:
    whole = fit(Finetuned, FakeHost(tmp_path / "whole"), max_length=Batch(6))
    half = FakeHost(tmp_path / "half")
    fit(Finetuned, half, max_length=Batch(3))
    [checkpoint] = half.checkpoints()
    # It has the head, and the buffers of the BatchNorm.
    [names] = [set(each) for each in saved(checkpoint)["models_state_dict"]]
    assert names == {"head.weight", "head.bias"} | {
        f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    model_bytes = sum(each.nbytes for each in whole.net.parameters())
    assert sum(file.stat().st_size for file in Path(checkpoint).rglob("*.pth")) <= 0.02 * model_bytes
    MODULE.drop_all()  # as in another process
    resumed = fit(Finetuned, FakeHost(tmp_path / "other"), max_length=Batch(6), latest_checkpoint=checkpoint)
    assert_equal(weights(resumed), weights(whole))
    assert loaded == ["a", "a"]


def test_a_trial_is_loaded_with_its_pretrained_weights(fit: Fit, host: FakeHost) -> None:
    trained = fit(Finetuned, max_length=Batch(3))
    [checkpoint] = host.checkpoints()
    trial: Any = pytorch.load_trial_from_checkpoint_path(checkpoint, Finetuned)
    assert_equal(weights(trial), weights(trained))


@pytest.mark.parametrize(
    ("trial_class", "error"),
    [
        (OtherWeights, r"model 0 .* other pretrained weights than the trial has loaded: 'base\.0\.weight' differs"),
        (NotShared, r"model 0 .* has no 'base\.0\.weight', a pretrained weight, .* @pytorch\.pretrained"),
    ],
)
def test_other_weights_are_refused(fit: Fit, host: FakeHost, tmp_path: Path, trial_class: Any, error: str) -> None:
    fit(Finetuned, max_length=Batch(1))
    [checkpoint] = host.checkpoints()
    with pytest.raises(ValueError, match=error):
        fit(trial_class, FakeHost(tmp_path / "other"), max_length=Batch(2), latest_checkpoint=checkpoint)


def test_a_checkpoint_with_all_weights_leaves_the_shared_ones_as_they_are(
    fit: Fit, host: FakeHost, tmp_path: Path
) -> None:
    fit(NotShared, max_length=Batch(2))  # trains all of them
    [checkpoint] = host.checkpoints()
    before = [parameter.clone() for parameter in base("a").parameters()]
    trial = fit(Finetuned, FakeHost(tmp_path / "other"), max_length=Batch(2), latest_checkpoint=checkpoint)
    assert_equal(saved(checkpoint)["models_state_dict"][0]["base.2.weight"], weights(trial)["base.2.weight"])
    assert all(map(torch.equal, base("a").parameters(), before))


def test_parts_that_are_trained_have_memory_of_their_own(fit: Fit, host: FakeHost) -> None:
    before = [parameter.clone() for parameter in base("a").parameters()]
    trial = fit(LastLayerToo, max_length=Batch(2))
    assert not torch.equal(trial.net["base"][2].weight, before[-2])
    assert all(map(torch.equal, base("a").parameters(), before))
    assert loaded.count("a") == 1
    [checkpoint] = host.checkpoints()
    [names] = [set(each) for each in saved(checkpoint)["models_state_dict"]]
    assert {"base.2.weight", "base.2.bias"} <= names
    assert not names & {"base.0.weight", "base.0.bias"}


def test_a_weight_that_a_trial_has_overwritten_is_saved_and_loaded_again_for_the_next(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    before = base("a")[2].weight.clone()
    fit(Merging, max_length=Batch(2))
    [checkpoint] = host.checkpoints()
    assert torch.equal(saved(checkpoint)["models_state_dict"][0]["base.2.weight"], before + 1 + 1)
    assert "base.0.weight" not in saved(checkpoint)["models_state_dict"][0]
    assert torch.equal(base("a")[2].weight, before)
    assert "base() is called again: an earlier trial has changed its weights" in caplog.text


def test_a_weight_that_a_trial_has_replaced_by_one_of_the_same_sum_is_saved(fit: Fit, host: FakeHost) -> None:
    fit(Reordering, max_length=Batch(1))
    [checkpoint] = host.checkpoints()
    reordered = saved(checkpoint)["models_state_dict"][0]["base.2.weight"]
    assert torch.equal(reordered, base("a")[2].weight.flip(0))


def test_weights_in_a_file_are_those_that_were_loaded_and_no_trial_changes_them(
    fit: Fit, host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fit(Finetuned, max_length=Batch(2))
    for kind in (InFile, Finetuned):  # which finds them in the file
        trial = fit(kind, at := FakeHost(tmp_path / kind.__name__), max_length=Batch(2))
        assert_equal(weights(trial), weights(expected))
        assert saved(*at.checkpoints())["models_state_dict"][0].keys().isdisjoint({"base.0.weight", "base.2.weight"})
    assert MODULE.kept_bytes() == (0, 0)
    monkeypatch.setattr(memory, "available_memory", lambda: 0)  # it would not free any
    merged = FakeHost(tmp_path / "merged")
    fit(Merging, merged, max_length=Batch(2))
    change = saved(*merged.checkpoints())["models_state_dict"][0]["base.2.weight"] - base("a")[2].weight
    torch.testing.assert_close(change, torch.full_like(change, 2.0))
    assert torch.equal(base("a")[2].weight, expected.net["base"][2].weight)
    assert loaded == ["a"]


def test_weights_that_a_trial_has_changed_before_it_shards_them_are_in_no_file() -> None:
    model = base("a")
    before = model[2].weight.clone()
    model[2].weight.data += 1
    share_on_machine(model, DistributedContext())
    assert torch.equal(base("a")[2].weight, before)
    assert loaded == ["a", "a"]


def test_weights_that_a_trial_has_cast_or_replaced_before_it_shards_them_stay_so() -> None:
    model = base("a")
    before = model[2].weight.clone()
    model[0].to(torch.bfloat16)
    model[2].weight.data = before.flip(0)  # of the same sum
    share_on_machine(model, DistributedContext())
    assert model[0].weight.dtype is torch.bfloat16
    assert torch.equal(model[2].weight, before.flip(0))
    assert torch.equal(base("a")[2].weight, before)
    assert loaded == ["a"]


@pytorch.cached
def common(name: str) -> nn.Linear:
    return nn.Linear(2, 2)


@pytorch.pretrained
def of_common(name: str) -> nn.Module:
    return nn.Sequential(common(name))


def test_a_module_that_others_have_too_keeps_its_weights_when_they_go_to_a_file() -> None:
    before = common("a").weight.clone()
    share_on_machine(of_common("a"), DistributedContext())
    assert torch.equal(common("a").weight, before)
    assert torch.equal(of_common("a")[0].weight, before)  # type: ignore[index]


class Quantised(nn.Module):
    """Eight bits a weight, of which some are a part of other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.float8 = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.part = nn.Parameter(torch.arange(9, dtype=torch.uint8)[1:], requires_grad=False)


@pytorch.pretrained
def quantised(name: str) -> nn.Module:
    return Quantised()


def test_quantised_weights_are_kept_in_a_file_too() -> None:
    expected = Quantised().state_dict()
    model = quantised("a")
    share_on_machine(model, DistributedContext())
    for each in (model, quantised("a")):
        assert without_shared(each)[0] == {}
        assert all(torch.equal(*map(bytes_of, pair)) for pair in zip(each.parameters(), expected.values(), strict=True))


def test_weights_are_hashed_by_one_rank_of_each_machine_and_by_those_that_have_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, hashed = hashlib.sha256, Counter[int]()

    def counted(data: bytes) -> Any:
        hashed[threading.get_ident()] += data.startswith(b"torch.")
        return real(data)

    monkeypatch.setattr("dray.training.pretrained.hashlib.sha256", counted)
    models = [Pretrained(made(name)).copy() for name in ("a", "a", "a", "b")]

    def digest(peers: DistributedContext) -> tuple[str, int]:
        model = models[peers.rank]
        hash_on_chiefs([model], peers)
        return digest_of([model]), hashed[threading.get_ident()]

    ranks = on_ranks(nodes(2, 2), digest)
    assert [count for _, count in ranks] == [6, 0, 6, 4], "the fourth rank has the same normalisation, and other layers"
    digests = [digest for digest, _ in ranks]
    assert digests[:3] == [digest_of([Pretrained(made("a")).copy()])] * 3
    with pytest.raises(RuntimeError, match="ranks 0 and 3 have loaded different pretrained weights"):
        check_same(digests)


def test_weights_for_which_the_disk_has_no_space_stay_in_memory(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dray.training.pretrained.torch.save", full)
    model = base("a")
    reported: list[BaseException] = []
    with on_failure(reported.append):
        on_ranks(nodes(2), lambda peers: share_on_machine(model, peers))
    assert reported == [], "the trial goes on"
    assert addresses(base("a")) == addresses(model)
    assert "in memory; set TMPDIR to a larger disk: [Errno 28] No space left" in caplog.text


def test_a_model_that_is_larger_than_the_gpu_is_kept_in_the_cpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dray.memory.gpu_in_use", lambda: True)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 20, 1 << 30))
    monkeypatch.setattr("torch._C._host_emptyCache", lambda: None, raising=False)
    assert base("a")[0].weight.device.type == "cpu"


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(TypeError, match=r"@pytorch\.pretrained keeps modules, but no_module\(\) returned {'weight'"):
        no_module()
    with pytest.raises(ValueError, match=r"pretrained\(\) can't keep values of .*; define it at the top level"):
        pytorch.pretrained(lambda: nn.Linear(1, 1))
