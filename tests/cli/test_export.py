"""`dray checkpoint export --format determined`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import torch

from dray.records.directory import ExperimentDirectory
from tests.cli.conftest import WEIGHT
from tests.cli.said import Said
from tests.golden.determined.make import GOLDEN

Dray = Callable[..., Said]


def test_a_checkpoint_is_written_as_determined_does(digits: ExperimentDirectory, dray: Dray) -> None:
    said = dray("c", "export", "digits", "4", "--format", "determined", "-o", "out")
    assert said.code == 0
    names = ["state_dict.pth", "trial_state.pkl", "load_data.json", "metadata.json"]
    assert said.out.splitlines() == [str(Path("out") / name) for name in names]
    assert "older dray wrote it" in said.err, "the epoch's length is not in it"
    assert torch.equal(torch.load("out/state_dict.pth", weights_only=True)["models_state_dict"][0]["weight"], WEIGHT)
    assert pickle.loads(Path("out/trial_state.pkl").read_bytes())["batches_trained"] == 10
    load_data = json.loads(Path("out/load_data.json").read_text())
    assert (load_data["trial_cls_spec"], load_data["hparams"]) == ("model_def:DigitsTrial", {"hidden": 16})
    # It is one of Determined's now, for dray too.
    assert dray("c", "export", "out", "-o", "weights").code == 0
    assert torch.equal(torch.load("weights/model.pt", weights_only=True)["weight"], WEIGHT)


def test_one_of_determineds_is_not_written_again(home: Path, dray: Dray) -> None:
    said = dray("c", "export", GOLDEN / "plain" / "at-8", "--format", "determined", "-o", "out")
    assert said.code == 2
    assert "already is a Determined checkpoint; copy it with dray checkpoint download" in said.is_one_line()
    assert not Path("out").exists()


def test_a_format_that_there_is_not(home: Path, dray: Dray) -> None:
    assert dray("c", "export", "digits", "--format", "onnx").code == 2
