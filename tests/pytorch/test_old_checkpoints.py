"""Loading and resuming checkpoints as versions 0.18 to 0.38 of Determined wrote them."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training import rng
from dray.training.checkpoint import determined
from dray.training.checkpoint import files as checkpoint
from dray.training.progress import Progress
from tests.pytorch import resuming
from tests.pytorch.fakes import FakeHost, state_of
from tests.pytorch.resuming import assert_equal

pytestmark = pytest.mark.api("9.11")

TRAINED = 5  # batches, in the middle of an epoch
LENGTH = 9
HPARAMS = {"global_batch_size": 8}


class Trial(resuming.Plain):
    """One model, optimizer and schedule, as the oldest layouts had it; dropout, so that random numbers matter."""

    dropout = 0.4
    momentum = 0.9

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        context.wrap_lr_scheduler(self.schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)


class Adaptive(Trial):
    """Adam's state has changed its types since."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.optimizers.clear()
        context.lr_schedulers.clear()
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))


Whole = dict[type[Trial], tuple[Trial, Path]]


def train(trial_class: type[Trial], directory: Path, length: int, **fit: Any) -> tuple[Trial, FakeHost]:
    host = FakeHost(directory)
    with use_host(host), pytorch.init(hparams=HPARAMS) as context:
        trial = trial_class(context)
        pytorch.Trainer(trial, context).fit(max_length=Batch(length), **fit)
    return trial, host


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Runs that were never cut, with our own checkpoint of what Determined's are made of."""
    found = {}
    for trial_class in (Trial, Adaptive):
        trial, host = train(trial_class, tmp_path_factory.mktemp("whole"), LENGTH, checkpoint_period=Batch(TRAINED))
        found[trial_class] = (trial, Path(host.checkpoints()[0]))
    return found


def old_state(ours: Path) -> dict[str, Any]:
    """Our checkpoint's state with the keys and the random numbers of Determined 0.18 to 0.38."""
    state = torch.load(ours / "state-dict.pth", weights_only=True)
    now = rng.capture(torch.device("cpu"))
    rng.restore(torch.load(ours / "rng" / "rank_0.pth", weights_only=True), torch.device("cpu"))
    state["rng_state"] = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
    }
    rng.restore(now, torch.device("cpu"))
    return state


def describe(directory: Path, entrypoint: str = "model_def:Trial") -> None:
    config = {"name": "old", "entrypoint": entrypoint, "searcher": {"name": "single"}}
    content = {"trial_type": "PyTorchTrial", "trial_cls_spec": entrypoint, "experiment_config": config}
    (directory / "load_data.json").write_text(json.dumps({**content, "hparams": HPARAMS}))


def write_old(directory: Path, version: str, ours: Path) -> Path:
    """A checkpoint's directory as a version of Determined left it."""
    state = old_state(ours)
    directory.mkdir(parents=True)
    torch.save(state, directory / "state_dict.pth")
    position: dict[str, Any] = {"trial_id": 17, "last_ckpt": 0, "last_val": 3, "step_id": 2}
    if version == "0.38":
        position |= {"batches_trained": TRAINED, "epochs_trained": TRAINED // 3}
        (directory / "trial_state.pkl").write_bytes(pickle.dumps(position))
        (directory / "metadata.json").write_text(json.dumps({"steps_completed": TRAINED, "format": "pickle"}))
    else:
        (directory / "workload_sequencer.pkl").write_bytes(pickle.dumps({**position, "steps_completed": TRAINED}))
    describe(directory)
    return directory


@pytest.mark.parametrize("version", ["0.38", "0.18"])
def test_a_run_resumed_from_an_old_checkpoint_equals_an_uninterrupted_one(
    whole: Whole, tmp_path: Path, version: str
) -> None:
    uncut, ours = whole[Trial]
    old = write_old(tmp_path / "old", version, ours)
    resumed, host = train(Trial, tmp_path / "new", LENGTH, latest_checkpoint=str(old))
    assert_equal(state_of(resumed.context), state_of(uncut.context))
    assert resumed.seen == uncut.seen[TRAINED:]
    assert resumed.watch.calls[0] == ("trial_startup", TRAINED, str(old))
    assert resumed.watch.epochs == uncut.watch.epochs
    assert host.reports[-1].batches == LENGTH


def test_a_checkpoint_without_a_position_restores_weights_optimizer_and_schedule(
    whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = write_old(tmp_path / "old", "0.38", whole[Trial][1])
    (old / "trial_state.pkl").unlink()
    loaded: list[dict[str, Any]] = []

    class Looking(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if not loaded:
                loaded.append(pickle.loads(pickle.dumps(state_of(self.context))))
            return super().train_batch(batch, epoch_idx, batch_idx)

    resumed, _ = train(Looking, tmp_path / "new", 2, latest_checkpoint=str(old))
    expected = torch.load(whole[Trial][1] / "state-dict.pth", weights_only=True)
    assert_equal(loaded[0], {key: expected[key] for key in loaded[0]})
    assert [batch for _, batch, _ in resumed.seen] == [0, 1]
    assert "so its position is unknown" in caplog.text


def test_adams_state_of_older_versions_of_torch_resumes_bit_for_bit(whole: Whole, tmp_path: Path) -> None:
    uncut, ours = whole[Adaptive]
    old = write_old(tmp_path / "old", "0.18", ours)
    state = torch.load(old / "state_dict.pth", weights_only=False)
    (adam,) = state["optimizers_state_dict"]
    for moments in adam["state"].values():
        moments["step"] = int(moments["step"])
    known = {"lr", "betas", "eps", "weight_decay", "amsgrad", "params"}  # torch 1.4
    adam["param_groups"] = [{key: group[key] for key in known} for group in adam["param_groups"]]
    torch.save(state, old / "state_dict.pth")
    resumed, _ = train(Adaptive, tmp_path / "new", LENGTH, latest_checkpoint=str(old))
    assert_equal(resumed.model.state_dict(), uncut.model.state_dict())


def test_names_of_numpy_1_and_of_numpy_2_are_known(whole: Whole, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", "0.18", whole[Trial][1])
    path = old / "state_dict.pth"
    state = torch.load(path, weights_only=False)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    names = [b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"]
    assert sum(name in content for name in names) == 1
    path.write_bytes(content.replace(*sorted(names, key=content.count, reverse=True)))
    found = determined.rng_of(checkpoint.read_state(old, []))
    assert found is not None
    assert np.array_equal(found["numpy"]["keys"].numpy(), state["rng_state"]["np_rng_state"][1])


def test_a_models_own_submodule_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    state = {"models_state_dict": [Holder().state_dict(), {"module.module.weight": 1, "module.module.bias": 2}]}
    adapted = determined.adapt(state, [Holder(), Holder()])
    assert [list(model) for model in adapted["models_state_dict"]] == [["module.weight", "module.bias"]] * 2


@pytest.mark.parametrize(
    ("file", "content", "batches", "validated"),
    [
        ("trial_state.pkl", {"batches_trained": 7, "last_val": 4}, 7, 4),
        ("trial_state.pkl", {"batches_trained": 7, "last_val": 0, "epochs_trained": None}, 7, None),
        ("workload_sequencer.pkl", {"steps_completed": 6}, 6, None),
    ],
)
def test_the_position_is_read_from_either_file(
    tmp_path: Path, file: str, content: dict[str, Any], batches: int, validated: int | None
) -> None:
    (tmp_path / file).write_bytes(pickle.dumps(content))
    assert determined.read_progress(tmp_path) == Progress(batches=batches, validated=validated, saved=batches)


@pytest.mark.parametrize("content", [[7], {"epochs_trained": 1}, {"batches_trained": True}, {"batches_trained": -1}])
def test_a_position_that_is_none_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "trial_state.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"trial_state\.pkl must .*" + re.escape(repr(content))):
        determined.read_progress(tmp_path)


def test_an_incomplete_dray_checkpoint_is_not_mistaken_for_a_determined_one(whole: Whole, tmp_path: Path) -> None:
    rest = tmp_path / "checkpoint_5"
    shutil.copytree(whole[Trial][1], rest)
    (rest / "manifest.json").unlink()
    (rest / "state_dict.pth").write_bytes(b"a callback's")
    pytorch.load_trial_from_checkpoint_path(rest, trial_class=Trial)  # from its own state-dict.pth
    (rest / "state-dict.pth").unlink()
    with pytest.raises(ValueError, match=r"has no state-dict\.pth"):
        pytorch.load_trial_from_checkpoint_path(rest, trial_class=Trial)


class Best:
    """The state of a callback in an old checkpoint."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


def test_a_type_that_the_user_allows_is_loaded(whole: Whole, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", "0.38", whole[Trial][1])
    state = old_state(whole[Trial][1])
    torch.save({**state, "callbacks": {"watch": {"epochs": 1, "best": Best(0.5)}}}, old / "state_dict.pth")
    with pytest.raises(ValueError, match=r"it names tests\.pytorch\.test_old_checkpoints\.Best;.*add_safe_globals"):
        train(Trial, tmp_path / "new", LENGTH, latest_checkpoint=str(old))
    with torch.serialization.safe_globals([Best]):
        resumed, _ = train(Trial, tmp_path / "new", TRAINED, latest_checkpoint=str(old))
    (loaded,) = (call[1] for call in resumed.watch.calls if call[0] == "load_state_dict")
    assert loaded["best"].loss == 0.5


def test_the_state_of_apex_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    found = determined.adapt({"models_state_dict": [{"w": 1}], "amp_state": {"x": 1}}, [])
    assert found == {
        "models_state_dict": [{"w": 1}],
        "optimizers_state_dict": [],
        "lr_schedulers_state_dict": [],
        "callbacks": {},
    }
    assert "ignoring the checkpoint's state of NVIDIA apex" in caplog.text


def test_an_entrypoint_that_is_a_command_names_no_class(tmp_path: Path) -> None:
    for entrypoint in ("python3 -m determined.launch.torch_distributed python3 train.py", ["python3", "train.py"]):
        (tmp_path / "load_data.json").write_text(
            json.dumps({"trial_cls_spec": None, "hparams": None, "experiment_config": {"entrypoint": entrypoint}})
        )
        assert determined.describe(tmp_path)["trial_cls_spec"] is None
