"""The contents of checkpoints besides the state, their use in a resumed run, and trials loaded from them."""

from __future__ import annotations

import enum
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.storage import CheckpointError, CheckpointStore, verify
from dray.training.checkpoint import files as checkpoint
from dray.training.parallel.mesh import Division
from tests.forks.process import run_script
from tests.pytorch import resuming
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, callback, one_weight, trial


@pytest.mark.api("9.3")
@pytest.mark.parametrize("config", [None, {"name": "digits", "searcher": {"name": "single"}}])
def test_a_checkpoint_has_code_config_and_hyperparameters(
    fit: Fit, host: FakeHost, tmp_path: Path, config: dict[str, Any] | None
) -> None:
    """Hyperparameters also where there is no config."""
    host.code_dir = tmp_path / "model"
    host.code_dir.mkdir()
    (host.code_dir / "model_def.py").write_text("x = 1\n")
    hparams = {"global_batch_size": 8, "net": {"layers": [1, 2]}}
    fit(OneWeight, init={"hparams": hparams, "exp_conf": config}, max_length=Batch(2))
    (saved,) = map(Path, host.checkpoints())
    assert (saved / "code" / "model_def.py").read_text() == "x = 1\n"
    assert json.loads((saved / "hparams.json").read_text()) == hparams
    if config is None:
        assert not (saved / "experiment.yaml").exists()
    else:
        assert yaml.safe_load((saved / "experiment.yaml").read_text()) == config
    metadata = json.loads((saved / "metadata.json").read_text())
    assert metadata["trial_cls_spec"] == "tests.pytorch.fakes:OneWeight"
    assert (metadata["experiment_id"], metadata["trial_id"], metadata["trial_seed"]) == (4, 9, 1)
    assert (metadata["hparams"], metadata["experiment_config"]) == (hparams, config)
    assert metadata["framework"] == f"torch-{torch.__version__}"
    progress = {"batches": 2, "validated": 2, "saved": 2, "size": 1, "division": {"replicas": 1, "batch_size": 2}}
    progress |= {"epoch_length": 5, "total_batches": 2, "sharing": 1}
    assert json.loads((saved / "progress.json").read_text()) == progress


class Color(enum.Enum):
    RED = "red"


def test_hyperparameters_that_checkpoints_hold_only_as_text_are_warned_of(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"lr": np.float32(0.5), "sizes": (1, 2), "net": {"depth": 3, "name": None}}
    given = plain | {
        "act": torch.relu,
        "norm": nn.ReLU(),
        "nets": [{"color": Color.RED}],
        "seen": {7},
        "by": {(1, 2): 3},
    }
    fit(OneWeight, init={"hparams": given}, max_length=Batch(4), checkpoint_period=Batch(2))
    saved = json.loads((Path(host.checkpoints()[0]) / "hparams.json").read_text())
    assert {name: saved[name] for name in plain} == {"lr": 0.5, "sizes": [1, 2], "net": {"depth": 3, "name": None}}
    assert (saved["norm"], saved["nets"], saved["by"]) == ("ReLU()", [{"color": "Color.RED"}], {"(1, 2)": 3})
    [warning] = [text for text in caplog.messages if "hyperparameter" in text]
    for named in (
        "act (builtin_function_or_method)",
        "norm (ReLU)",
        "nets[0].color (Color)",
        "seen (set)",
        "the key (1, 2) of by",
    ):
        assert named in warning
    assert "lr" not in warning.split(";")[0]


@pytest.mark.api("9.3b")
def test_metadata_that_a_callback_adds_is_part_of_the_checkpoint(fit: Fit, host: FakeHost) -> None:
    def note(checkpoint_dir: str) -> None:
        path = Path(checkpoint_dir) / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": "2026-11"}))
        (Path(checkpoint_dir) / "notes.txt").write_text("mine")

    fit(OneWeight, callbacks=callback(on_checkpoint_write_end=note), max_length=Batch(1))
    (saved,) = map(Path, host.checkpoints())
    assert json.loads((verify(saved) / "metadata.json").read_text())["data"] == "2026-11"
    pytorch.load_trial_from_checkpoint_path(saved, trial_class=OneWeight)
    (saved / "notes.txt").write_text("else")
    with pytest.raises(CheckpointError, match=r"notes\.txt does not match its checksum"):
        verify(saved)


@pytest.mark.slow  # imports Ray
@pytest.mark.api("9.3b")
def test_metadata_can_be_added_to_an_existing_checkpoint(fit: Fit, host: FakeHost) -> None:
    """By Ray's own means: what `Result.best_trial.checkpoint` is."""
    from ray.train import Checkpoint

    fit(OneWeight, max_length=Batch(1))
    (saved,) = host.checkpoints()
    Checkpoint.from_directory(saved).update_metadata({"verdict": "good"})
    assert Checkpoint.from_directory(str(verify(Path(saved)))).get_metadata() == {"verdict": "good"}


@pytest.mark.api("2.6")
def test_the_first_batch_is_known_where_the_host_knows_the_checkpoint(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    class Asking(OneWeight):
        def at_init(self) -> None:
            self.asked = [self.context.get_initial_batch()]

        def build_training_data_loader(self) -> pytorch.DataLoader:
            self.asked.append(self.context.get_initial_batch())
            return super().build_training_data_loader()

    assert fit(Asking, max_length=Batch(3)).asked == [0, 0]
    (saved,) = host.checkpoints()
    again = FakeHost(tmp_path / "again")
    again.latest_checkpoint = saved
    assert fit(Asking, again, max_length=Batch(4), latest_checkpoint=saved).asked == [3, 3]
    # Unknown until fit() gets the checkpoint.
    told = FakeHost(tmp_path / "told")
    assert fit(Asking, told, max_length=Batch(4), latest_checkpoint=saved).asked == [0, 3]


@pytest.mark.api("2.5", "9.8")
def test_a_resumed_run_has_the_seed_of_its_checkpoint(tmp_path: Path) -> None:
    seeds = []

    class Asking(resuming.Shuffled):
        def build_training_data_loader(self) -> Any:
            seeds.append(self.context.get_trial_seed())
            return super().build_training_data_loader()

    def run(name: str, seed: int, **fit: Any) -> str:
        host = FakeHost(tmp_path / name, trial_seed=seed)
        with use_host(host), pytorch.init(hparams={"global_batch_size": 8}) as context:
            pytorch.Trainer(Asking(context), context).fit(**fit)
        return host.checkpoints()[-1]

    first = run("first", 11, max_length=Batch(2))
    second = run("second", 22, max_length=Batch(3), latest_checkpoint=first)
    run("third", 33, max_length=Batch(4), latest_checkpoint=second)
    assert seeds == [11, 11, 11]


def test_a_rank_new_to_the_trial_gets_its_own_random_numbers(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    """After a move from one process to two, the new rank does not repeat the random numbers of the first batches."""
    draws: list[float] = []

    drawing = trial(at_batch=lambda self, _: draws.append(torch.rand(()).item()))
    fit(drawing, max_length=Batch(2))
    (saved,) = map(Path, host.checkpoints())
    for file in ("rng/rank_0.pth", "manifest.json"):
        (saved / file).unlink()
    moved = Path(CheckpointStore(tmp_path).commit(saved, 2))
    again = FakeHost(tmp_path / "again")
    for _ in range(2):
        fit(drawing, again, max_length=Batch(4), latest_checkpoint=str(moved))
    assert len(set(draws[:4])) == 4
    assert draws[2:4] == draws[4:6], "but the same each time"


@pytest.mark.parametrize(("later", "warns"), [(8, False), (6, True)])
def test_resuming_with_another_global_batch_size_warns(
    host: FakeHost, tmp_path: Path, caplog: pytest.LogCaptureFixture, later: int, warns: bool
) -> None:
    def run(host: FakeHost, size: int, **fit: Any) -> resuming.Plain:
        with use_host(host), pytorch.init(hparams={"global_batch_size": size}) as context:
            trial = resuming.Plain(context)
            pytorch.Trainer(trial, context).fit(**fit)
        return trial

    run(host, 8, max_length=Batch(1))
    (saved,) = host.checkpoints()
    assert checkpoint.read_division(Path(saved)) == Division(replicas=1, batch_size=8)
    trial = run(FakeHost(tmp_path / "b"), later, max_length=Batch(2), latest_checkpoint=saved)
    assert trial.seen[0][2] == list(range(later, 2 * later))
    told = (
        "the checkpoint was written with 1 process(es) and batches of 8 in each, this run has 1 process(es) and "
        "batches of 6 in each: steps no longer train on the same records"
    )
    assert (told in caplog.text) is warns


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
