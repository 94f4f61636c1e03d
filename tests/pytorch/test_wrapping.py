"""Models that are wrapped with settings of DDP's, or compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight


class CompiledBefore(OneWeight):
    """Wrapped as `torch.compile` returns it."""

    def at_init(self) -> None:
        self.context.models.clear()
        # The compiler's own backend takes seconds; what surrounds the model is the same.
        self.model = self.context.wrap_model(torch.compile(self.model, backend="eager"))  # type: ignore[assignment]


class CompiledAfter(OneWeight):
    """Compiled as `wrap_model` returns it."""

    def at_init(self) -> None:
        self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.api("2.16")
@pytest.mark.parametrize("trial_class", [CompiledBefore, CompiledAfter])
def test_a_compiled_model_trains_and_its_checkpoints_are_those_of_the_model(
    fit: Fit, host: FakeHost, tmp_path: Path, trial_class: type[OneWeight]
) -> None:
    trial = fit(trial_class, max_length=Batch(6), checkpoint_period=Batch(3))
    assert isinstance(trial.model, torch._dynamo.OptimizedModule)
    assert float(trial.model.weight.detach()) == pytest.approx(one_weight(6))
    first, last = host.checkpoints()
    assert list(torch.load(Path(last) / "state-dict.pth", weights_only=True)["models_state_dict"][0]) == ["weight"]
    plain = fit(OneWeight, FakeHost(tmp_path / "plain"), max_length=Batch(8), latest_checkpoint=last)
    assert plain.weight == pytest.approx(one_weight(8))
    again = fit(trial_class, FakeHost(tmp_path / "again"), max_length=Batch(6), latest_checkpoint=first)
    assert float(again.model.weight.detach()) == pytest.approx(one_weight(6))


@pytest.mark.api("2.16")
def test_settings_of_ddp_are_checked_with_one_process_too(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        model = context.wrap_model(nn.Linear(1, 1), ddp_kwargs={"find_unused_parameters": True})
        assert type(model) is nn.Linear
        with pytest.raises(TypeError, match=r"takes no 'find_unused'; ddp_kwargs may hold .*find_unused_parameters"):
            context.wrap_model(nn.Linear(1, 1), ddp_kwargs={"find_unused": True})
        wrong: Any = [("find_unused_parameters", True)]
        with pytest.raises(TypeError, match="ddp_kwargs must be a dict, got"):
            context.wrap_model(nn.Linear(1, 1), ddp_kwargs=wrong)
        assert context.models == [model]
