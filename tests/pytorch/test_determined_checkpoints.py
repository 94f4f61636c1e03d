"""Resuming checkpoints that the real Determined 0.38.1 wrote, with the losses that its own uninterrupted run had.

They are in tests/golden/determined-0.38.1, made by tests/golden/determined/make.py, whose model_def.py is their code.
On the machine that made them the losses are bit-identical; another processor may round differently.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import import_from_path, pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.training import rng
from dray.training.checkpoint import determined
from dray.training.parallel.mesh import Division
from tests.golden.determined import make
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import gloo_first, serve  # noqa: F401 - a fixture

pytestmark = pytest.mark.api("9.11")

GOLDEN = Path(__file__).parents[1] / "golden" / "determined-0.38.1"
MODELS = GOLDEN.parent / "determined"
LENGTH = 15
EPOCH = 6  # batches of one process; of each of two it is half as many
OTHER_MACHINE = 1e-4
"""Relative, after 15 steps with the kernels of another processor: 2e-6 so far. A wrong order is 1e-1 off."""


@cache
def models() -> Any:
    """Its model_def.py, which imports `determined`."""
    with import_from_path(MODELS):
        return importlib.import_module("model_def")


def golden(name: str) -> tuple[dict[str, Any], Path, int]:
    """A run of Determined, a checkpoint of it (`name` or `name/at-8`), and the number of batches trained by then."""
    name, _, which = name.partition("/")
    (at,) = (GOLDEN / name).glob(which or "at-*")
    return json.loads((GOLDEN / name / "run.json").read_text()), at, int(at.name.removeprefix("at-"))


class Drawing(pytorch.PyTorchCallback):
    """Draws what each validation of Determined's takes from torch's random numbers, as its dropout uses them too.

    It is the seed of the loader's workers; dray's loaders have a generator of their own.
    """

    def on_validation_start(self) -> None:
        torch.empty((), dtype=torch.int64).random_()


def resumed(
    name: str,
    directory: Path,
    *,
    latest: Path | str | None = None,
    distributed: DistributedContext | None = None,
    global_batch_size: int = 4,
    **fit: Any,
) -> Any:
    """The trial that has gone on from Determined's checkpoint, or from another one of the same trial."""
    run, at, _ = golden(name)
    rng.seed_all(999)
    hparams = json.loads((at / "load_data.json").read_text())["hparams"] | {"global_batch_size": global_batch_size}
    with (
        use_host(FakeHost(directory)),
        pytorch.init(hparams=hparams, distributed=distributed, enable_tensorboard_logging=False) as context,
    ):
        trial = getattr(models(), run["trial"])(context)
        own = trial.build_callbacks()
        trial.build_callbacks = lambda: {**own, "drawing": Drawing()}
        pytorch.Trainer(trial, context).fit(
            **{"max_length": pytorch.Batch(LENGTH), "validation_period": pytorch.Epoch(1), "latest_checkpoint": at}
            | ({} if latest is None else {"latest_checkpoint": latest})
            | fit
        )
    return trial


@pytest.mark.api("9.8")
@pytest.mark.parametrize("name", ["plain", "own", "two", "scaled"])
def test_a_determined_run_resumes_with_the_losses_that_it_would_have_had(name: str, tmp_path: Path) -> None:
    run, _, batches = golden(name)
    trial = resumed(name, tmp_path)
    assert trial.losses == pytest.approx(run["ranks"][0]["losses"][batches:], rel=OTHER_MACHINE)
    assert trial.best.state_dict()["epochs"] == run["ranks"][0]["best"]["epochs"]


@pytest.mark.api("9.8")
def test_dray_resumes_its_own_checkpoint_of_a_determined_run(tmp_path: Path) -> None:
    resumed("plain", tmp_path / "first", checkpoint_period=pytorch.Batch(10))
    trial = resumed("plain", tmp_path / "second", latest=tmp_path / "first" / "checkpoint_10")
    run, _, _ = golden("plain")
    assert trial.losses == pytest.approx(run["ranks"][0]["losses"][10:], rel=OTHER_MACHINE)


@pytest.mark.parametrize(
    ("name", "global_batch_size", "start"),
    [("still", 4, "epoch 1, batch 6"), pytest.param("still-2", 8, "epoch 1, batch 3", id="one process, saved by two")],
)
def test_a_shuffled_epoch_of_a_determined_run_starts_again(
    name: str, global_batch_size: int, start: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its order is not in the checkpoint."""
    _, _, saved = golden(name)
    trial = resumed(name, tmp_path, global_batch_size=global_batch_size)
    assert len(trial.losses) == LENGTH - int(start.rpartition(" ")[2])
    assert f"Determined wrote after batch {saved}" in caplog.text
    assert f"training resumes at the start of {start}" in caplog.text


@pytest.mark.api("9.4")
@pytest.mark.parametrize("name", ["plain", "plain-2", "two-2"])
def test_its_trial_is_loaded_with_the_class_in_its_code(name: str, tmp_path: Path) -> None:
    run, at, _ = golden(name)
    shutil.copytree(at, tmp_path, dirs_exist_ok=True)
    shutil.copytree(MODELS, tmp_path / "code")
    trial: Any = pytorch.load_trial_from_checkpoint_path(tmp_path)
    assert type(trial).__name__ == run["trial"]
    state = torch.load(at / "state_dict.pth", weights_only=False)
    for model, saved in zip(trial.context.models, state["models_state_dict"], strict=True):
        plain = {key.removeprefix("module."): value for key, value in saved.items()}
        assert all(torch.equal(value, plain[key]) for key, value in model.state_dict().items())


def two(directory: Path) -> dict[str, list[float]]:
    """The losses of each rank."""
    peers = DistributedContext.from_torch_distributed()
    return {
        name: resumed(name, directory / name, distributed=peers, global_batch_size=size).losses
        for name, size in (("plain-2", 8), ("two-2", 8), ("still", 4))
    }


@pytest.mark.slow
@pytest.mark.api("9.8")
@pytest.mark.parametrize("name", ["plain-2", "two-2"])
def test_two_processes_resume_with_their_losses(ranks: list[dict[str, Any]], name: str) -> None:
    run, _, batches = golden(name)
    for rank, mine in enumerate(ranks):
        assert mine["two"][name] == pytest.approx(run["ranks"][rank]["losses"][batches:], rel=OTHER_MACHINE)


@pytest.mark.slow
@pytest.mark.api("9.9")
def test_two_processes_resume_a_checkpoint_of_one(ranks: list[dict[str, Any]]) -> None:
    assert [len(rank["two"]["still"]) for rank in ranks] == [LENGTH - EPOCH] * 2


def test_how_a_determined_run_divided_its_data() -> None:
    assert determined.read_division(golden("still-2")[1]) == Division(replicas=2, batch_size=4)
    assert determined.read_division(golden("still")[1]) == Division(replicas=1, batch_size=4)


DETERMINED_PYTHON = Path(
    os.environ.get("DETERMINED_PYTHON", MODELS.parents[2] / "build" / "determined" / "bin" / "python")
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.determined
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not DETERMINED_PYTHON.exists(), reason="no environment with determined 0.38.1: make test-determined"
)
@pytest.mark.parametrize("name", ["two", "still-2"])
def test_the_golden_losses_are_those_of_the_real_determined(name: str, tmp_path: Path) -> None:
    run, at, _ = golden(name)
    model_dir, out = make.models(tmp_path / "models"), tmp_path / "out"
    save = ["--save", at.name.removeprefix("at-")]
    train = [str(DETERMINED_PYTHON), "train.py", run["trial"], str(LENGTH), str(out), *save]
    make.run(model_dir, out, *train, processes=run["processes"])
    for rank, theirs in enumerate(run["ranks"]):
        found = json.loads((out / f"losses_{rank}.json").read_text())
        assert found["losses"] == pytest.approx(theirs["losses"], rel=OTHER_MACHINE)


if __name__ == "__main__":
    serve([two])
