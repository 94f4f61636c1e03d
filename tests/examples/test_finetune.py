"""The fine-tuning example: an adapter learns, a checkpoint has only that, and the next trial shares the base model."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dray import import_from_path, pytorch
from dray.config.load import load_config
from dray.hosts import use_host
from tests.pytorch.fakes import FakeHost

pytestmark = pytest.mark.slow  # it imports transformers and peft

FINETUNE = Path(__file__).parents[2] / "examples" / "finetune"
HPARAMS = {"global_batch_size": 8, "model": "", "block": 32, "rank": 4, "lr": 1e-2, "fully_shard": False}
CACHED: Any = sys.modules["dray.pytorch.cached"]


@pytest.fixture(scope="module")
def model_def() -> Iterator[ModuleType]:
    with import_from_path(FINETUNE):
        yield importlib.import_module("model_def")
    CACHED.drop_all()


def train(model_def: ModuleType, directory: Path, batches: int, **hparams: Any) -> tuple[Any, FakeHost]:
    host = FakeHost(directory, max_length=pytorch.Batch(batches))
    with use_host(host), pytorch.init(hparams={**HPARAMS, **hparams}) as context:
        trial = model_def.FinetuneTrial(context)
        pytorch.Trainer(trial, context).fit()
    return trial, host


def test_the_config_is_valid() -> None:
    config = load_config(FINETUNE / "asha.yaml")
    assert set(config.hyperparameters) == set(HPARAMS)


@pytest.mark.long  # tests/pytorch/test_pretrained.py has such checkpoints without a language model
def test_it_learns_and_its_checkpoint_is_the_adapter(model_def: ModuleType, tmp_path: Path) -> None:
    trial, host = train(model_def, tmp_path / "first", batches=12)
    validation = host.reports[-1].validation
    assert validation is not None
    assert validation["validation_loss"] < math.log(256) - 0.5  # it begins with all bytes alike
    [checkpoint] = host.checkpoints()
    saved = torch.load(Path(checkpoint, "state-dict.pth"), weights_only=True)["models_state_dict"][0]
    assert len(saved) == 2 * 2 * 4  # two matrices for q and v of each layer
    assert all("lora_" in name for name in saved)
    size = sum(file.stat().st_size for file in Path(checkpoint).glob("*.pth"))
    assert size <= 0.02 * sum(each.nbytes for each in trial.model.parameters())
    other, _ = train(model_def, tmp_path / "second", batches=1, rank=2)
    weight = "base_model.model.model.embed_tokens.weight"
    assert trial.model.get_parameter(weight).data_ptr() == other.model.get_parameter(weight).data_ptr()


@pytest.mark.long
def test_a_sharded_model_learns_the_same(model_def: ModuleType, tmp_path: Path) -> None:
    (_, plain), (_, sharded) = (
        train(model_def, tmp_path / str(shards), batches=3, fully_shard=shards) for shards in (False, True)
    )
    expected, found = (host.reports[-1].validation for host in (plain, sharded))
    assert expected is not None
    assert found == pytest.approx(expected)
    base_model = model_def.base_model("")
    assert all(type(each) is torch.nn.Parameter for each in base_model.parameters()), "the kept model is not sharded"


@pytest.mark.long
def test_a_model_comes_from_a_directory(model_def: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    AutoModelForCausalLM.from_config(model_def.base_model("").config).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "return": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    trial, host = train(model_def, tmp_path / "run", batches=4, model=str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == trial.model.config.vocab_size
    assert trial.training.tensors[0].max() == 2
    assert host.reports[-1].validation is not None
