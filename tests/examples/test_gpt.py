"""The GPT example: its text, its model, its schedule, and that it learns to read Python."""

from __future__ import annotations

import doctest
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import dray.cli
from dray import import_from_path, pytorch
from dray.config.load import load_config
from dray.hosts import use_host
from tests.forks.process import run_script, torchrun
from tests.pytorch.fakes import FakeHost

GPT = Path(__file__).parents[2] / "examples" / "gpt"
CONFIG = yaml.safe_load((GPT / "const.yaml").read_text())
SMALL = {**CONFIG["hyperparameters"], "global_batch_size": 4, "block": 16, "layers": 1, "width": 16, "heads": 2}


@pytest.fixture
def data() -> Iterator[ModuleType]:
    with import_from_path(GPT):
        yield importlib.import_module("data")


@pytest.fixture
def model_def() -> Iterator[ModuleType]:
    with import_from_path(GPT):
        yield importlib.import_module("model_def")


def test_text_comes_back_but_for_tabs_and_foreign_letters(data: ModuleType) -> None:
    text = "def f(x):\n    return {x: '~'}  # \\\n"
    assert data.decode(data.encode(text)) == text
    assert data.decode(data.encode("a\tb")) == "a   b"
    assert data.decode(data.encode("é→")) == "\N{REPLACEMENT CHARACTER}?"


def test_held_out_modules_are_one_in_ten_and_are_real_python(data: ModuleType) -> None:
    training, held_out = data.texts()
    assert len(training) > 1_000_000
    assert 0.02 < len(held_out) / len(training) < 0.3
    assert "import" in data.decode(held_out[:20_000])


def test_target_of_each_character_is_the_next_one(data: ModuleType) -> None:
    text = data.encode("abcdefghijk")
    blocks = data.Blocks(text, 4)
    assert [tuple(map(data.decode, blocks[i])) for i in range(len(blocks))] == [("abcd", "bcde"), ("efgh", "fghi")]
    assert len(data.Blocks(text, 2, most=3)) == 3


def test_scores_know_nothing_of_what_comes_later(model_def: ModuleType) -> None:
    torch.manual_seed(0)
    model = model_def.GPT(characters=97, block=16, layers=2, width=16, heads=2).eval()
    text = torch.randint(97, (1, 16))
    changed = text.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 97
    scores, other = model(text), model(changed)
    assert torch.allclose(scores[0, :9], other[0, :9], atol=1e-6)
    assert not torch.allclose(scores[0, 9:], other[0, 9:], atol=1e-3)
    assert len(model.write(text[0], 5)) == 21


def test_learning_rate_goes_up_by_optimizer_steps_and_then_down(model_def: ModuleType) -> None:
    failed, tried = doctest.testmod(model_def)
    assert (failed, tried) == (0, 1)


@pytest.mark.api("2.19", "2.20", "5.4")
def test_optimizer_and_schedule_step_every_second_batch(model_def: ModuleType, tmp_path: Path) -> None:
    host = FakeHost(tmp_path, max_length=pytorch.Batch(6))
    with use_host(host), pytorch.init(hparams=SMALL, aggregation_frequency=2) as context:
        trial = model_def.GPTTrial(context)
        norms: list[float] = []
        first = trial.model.character.weight.detach().clone()

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            gradients = [p.grad for p in trial.model.parameters() if p.grad is not None]
            norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))

        trial.optimizer.register_step_pre_hook(before)
        pytorch.Trainer(trial, context).fit()
    assert len(norms) == 3
    assert all(norm <= 1.0 + 1e-5 for norm in norms)
    assert not torch.equal(first, trial.model.character.weight)
    expected = SMALL["lr"] * model_def.share_of_lr(3, SMALL["warm_up_steps"], 3)
    assert trial.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.slow
def test_sharded_model_learns_the_same(model_def: ModuleType, tmp_path: Path) -> None:
    losses = {}
    for fsdp in (False, True):
        host = FakeHost(tmp_path / str(fsdp), max_length=pytorch.Batch(6))
        with use_host(host), pytorch.init(hparams={**SMALL, "fsdp": fsdp}, aggregation_frequency=2) as context:
            torch.manual_seed(3)
            trial = model_def.GPTTrial(context)
            assert type(trial.model).__name__ == ("FSDPGPT" if fsdp else "GPT")
            pytorch.Trainer(trial, context).fit()
        losses[fsdp] = host.reports[-1].validation
    assert losses[True] == pytest.approx(losses[False])


def test_the_config_is_valid() -> None:
    assert load_config(GPT / "const.yaml").searcher.metric == "validation_loss"


@pytest.mark.gpu
@pytest.mark.api("2.25")
def test_computes_in_bf16_on_a_gpu_with_weights_in_float32(model_def: ModuleType, tmp_path: Path) -> None:
    host, seen = FakeHost(tmp_path, max_length=pytorch.Batch(4)), []
    with use_host(host), pytorch.init(hparams=SMALL, aggregation_frequency=2) as context:
        trial = model_def.GPTTrial(context)
        trial.model.next_character.register_forward_hook(lambda module, inputs, scores: seen.append(scores.dtype))
        pytorch.Trainer(trial, context).fit()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in trial.model.parameters()} == {torch.float32}
    assert host.reports[-1].validation is not None


@pytest.mark.slow
def test_experiment_runs_the_script_with_its_hyperparameters(tmp_path: Path) -> None:
    """A process of its own: the script sets up logging, and sys.path is put before it."""
    hparams = {**SMALL, "aggregation_frequency": 3}
    config = {
        **CONFIG,
        "hyperparameters": hparams,
        "searcher": {**CONFIG["searcher"], "max_length": {"batches": 6}},
    }
    (tmp_path / "const.yaml").write_text(yaml.safe_dump({**config, "entrypoint": "python3 train.py --characters 8"}))
    command = ["experiment", "create", str(tmp_path / "const.yaml"), str(GPT), "--local"]
    home = {"DRAY_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    run_script(Path(dray.cli.__file__).with_name("__main__.py"), *command, directory=tmp_path, **home)
    [run] = (tmp_path / "home" / "local").iterdir()
    [saved] = run.glob("checkpoint_6/hparams.json")
    assert json.loads(saved.read_text()) == hparams


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.api("2.16", "3.5")
def test_script_learns_under_torchrun(tmp_path: Path) -> None:
    # From another directory: it must find its own files, and it is not this one's code that is copied.
    printed = torchrun(
        GPT / "train.py", "--batches", "45", "--characters", "50", directory=tmp_path, DRAY_HOME=str(tmp_path)
    )
    [run] = (tmp_path / "local").iterdir()
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert list(run.glob("checkpoint_*/manifest.json"))
    assert printed.startswith("\n\ndef ")
    assert reports[-1]["batches"] == 45
    # An untrained one's is ln 97 = 4.6; knowing how often each character is, and no more, gives some 3.2.
    assert reports[-1]["validation"]["validation_loss"] < 3.0
