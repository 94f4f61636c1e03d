"""A trial out of its checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.pytorch import Batch
from dray.storage import CheckpointError
from tests.forks.process import run_script
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight

MODEL_DEF = textwrap.dedent(
    """
    import torch
    from dray import pytorch
    import helper

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context, width=1):
            self.context = context
            self.width = width
            self.lr = context.get_hparam("lr")
            self.model = context.wrap_model(helper.model())
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=self.lr))

        def build_training_data_loader(self):
            return pytorch.DataLoader(torch.ones(4, 1), batch_size=2)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch, epoch_idx, batch_idx):
            loss = ((self.model(batch) - 1) ** 2).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return loss

        def evaluate_batch(self, batch):
            return {"validation_loss": ((self.model(batch) - 1) ** 2).mean()}

    if __name__ == "__main__":
        with pytorch.init(hparams={"lr": 0.25}) as context:
            pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(3))
    """
)
HELPER = (
    "import torch\n\ndef model():\n    m = torch.nn.Linear(1, 1, bias=False)\n    m.weight.data.zero_()\n    return m\n"
)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that a script wrote, whose directory is no more."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "model_def.py").write_text(MODEL_DEF)
    (source / "helper.py").write_text(HELPER)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    run_script(source / "model_def.py", directory=source)
    (checkpoint,) = (tmp_path / "results" / "local").glob("*/checkpoint_3")
    shutil.rmtree(source)
    return checkpoint


@pytest.mark.api("9.3", "9.4")
@pytest.mark.slow
def test_a_trial_is_built_from_the_checkpoints_own_code(saved: Path) -> None:
    metadata = json.loads((saved / "metadata.json").read_text())
    assert metadata["trial_cls_spec"] == "model_def:Trial"
    before = sys.modules.get("model_def")  # of another test in this process
    trial: Any = pytorch.load_trial_from_checkpoint_path(str(saved), trial_kwargs={"width": 3})
    assert trial.model.weight.item() == one_weight(3)
    assert (trial.lr, trial.width) == (0.25, 3)
    assert sys.modules.get("model_def") is before
    assert "helper" not in sys.modules


@pytest.mark.api("9.4")
def test_the_error_of_a_constructor_with_more_arguments_names_trial_kwargs(fit: Fit, host: FakeHost) -> None:
    class Wide(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext, width: int) -> None:
            super().__init__(context)
            self.width = width

    fit(OneWeight, max_length=Batch(4))
    with pytest.raises(
        ValueError, match="can't construct Wide: missing a required argument: 'width'; pass trial_kwargs="
    ):
        pytorch.load_trial_from_checkpoint_path(host.checkpoints()[0], trial_class=Wide)
    trial: Any = pytorch.load_trial_from_checkpoint_path(
        host.checkpoints()[0], trial_class=Wide, trial_kwargs={"width": 3}
    )
    assert trial.width == 3


@pytest.mark.api("9.6")
def test_a_context_in_trial_kwargs_gives_other_hyperparameters(fit: Fit, host: FakeHost) -> None:
    class Tuned(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.lr = context.get_hparam("lr")
            super().__init__(context)

    fit(Tuned, init={"hparams": {"lr": 0.25}}, max_length=Batch(2))
    path = host.checkpoints()[0]
    loaded: Any = pytorch.load_trial_from_checkpoint_path(path, trial_class=Tuned)
    assert (loaded.lr, loaded.model.training) == (0.25, False)
    context = pytorch.CheckpointLoadContext(hparams={"lr": 0.5}, exp_conf={"name": "x"})
    assert context.get_experiment_config() == {"name": "x"}
    trial: Any = pytorch.load_trial_from_checkpoint_path(path, trial_class=Tuned, trial_kwargs={"context": context})
    assert (trial.lr, trial.weight) == (0.5, one_weight(2))


@pytest.mark.api("9.1", "9.2")
def test_the_state_has_exactly_the_documented_keys(fit: Fit, host: FakeHost) -> None:
    fit(OneWeight, max_length=Batch(2))
    state = torch.load(Path(host.checkpoints()[0]) / "state-dict.pth", weights_only=True)
    assert sorted(state) == ["callbacks", "lr_schedulers_state_dict", "models_state_dict", "optimizers_state_dict"]
    assert list(state["models_state_dict"][0]) == ["weight"]


@pytest.mark.api("9.4")
def test_a_damaged_checkpoint_and_a_missing_class_say_so(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    class Hidden(OneWeight):
        """Within a function, where no import finds it."""

    fit(Hidden, max_length=Batch(1))
    path = Path(host.checkpoints()[0])
    with pytest.raises(ValueError, match=r"can't import the trial's class.*pass trial_class="):
        pytorch.load_trial_from_checkpoint_path(path)
    (path / "manifest.json").unlink()
    (path / "progress.json").unlink()
    with pytest.raises(CheckpointError, match="never completed"):
        pytorch.load_trial_from_checkpoint_path(path, trial_class=OneWeight)
    with pytest.raises(FileNotFoundError):
        pytorch.load_trial_from_checkpoint_path(tmp_path / "nowhere", trial_class=OneWeight)
