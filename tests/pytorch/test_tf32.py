"""The hint that float32 matrix products don't use TF32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.training import precision
from dray.worker.isolation import settings
from tests.pytorch.fakes import FakeHost, OneWeight

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    [setting] = [each for each in settings.TORCH if each.name == "the precision of float32"]
    before = setting.get()
    yield
    setting.put(before)


def loss(dtype: torch.dtype | None = None) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        return nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1))


def test_a_trial_gets_the_hint_once(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with use_host(host), pytorch.init() as context:
        monkeypatch.setattr(context, "_checks_tf32", True)  # as on the chief's GPU
        pytorch.Trainer(OneWeight(context), context).fit(max_length=pytorch.Batch(3))
    assert caplog.text.count('torch.set_float32_matmul_precision("high")') == 1


@pytest.mark.parametrize("why", ["autocast", "high", "highest", "older"])
def test_there_is_none_with_autocast_or_if_the_precision_was_chosen_or_on_older_gpus(
    why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "highest" and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("to this torch it is the default")
    if why == "older":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    elif why != "autocast":
        torch.set_float32_matmul_precision(why)
    precision.warn_if_tf32_is_off(loss(torch.bfloat16 if why == "autocast" else None), GPU)
    assert not caplog.records
