"""A checkpoint of dray's written as Determined 0.38.1 does: the same files, and read by the real one."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.records.checkpoints import export_determined
from dray.storage import Location
from tests.golden.determined import make
from tests.pytorch.test_determined_checkpoints import EPOCH, LENGTH, OTHER_MACHINE, golden, models, resumed

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DETERMINED_PYTHON", ROOT / "build" / "determined" / "bin" / "python"))
CUT = 2 * EPOCH


def exported(checkpoint: Path, target: Path) -> tuple[Path, list[str]]:
    return target, export_determined(Location.of(checkpoint), target)[1]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the middle of an epoch."""
    directory = tmp_path_factory.mktemp("ours")
    resumed("scaled", directory, checkpoint_period=pytorch.Batch(10))
    return directory / "checkpoint_10"


def shape(value: Any) -> Any:
    """What a state is made of, without what it says."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), len(value), shape(value[0]) if value else None
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


@pytest.mark.api("9.2", "9.3")
def test_what_is_exported_is_made_as_determined_makes_it(ours: Path, tmp_path: Path) -> None:
    made, notes = exported(ours, tmp_path / "made")
    _, theirs, _ = golden("scaled")
    # As data: Determined's own need weights_only=False, for an array of numpy's.
    mine = torch.load(made / "state_dict.pth", weights_only=True)
    real = torch.load(theirs / "state_dict.pth", weights_only=False)
    name, keys, *rest = real["rng_state"]["np_rng_state"]
    real["rng_state"]["np_rng_state"] = (name, keys.tolist(), *rest)
    del real["callbacks"]["ids"]  # of the script that made it
    assert shape(mine) == shape(real)
    position = pickle.loads((made / "trial_state.pkl").read_bytes())
    assert position.keys() == pickle.loads((theirs / "trial_state.pkl").read_bytes()).keys()
    assert (position["batches_trained"], position["epochs_trained"], position["last_val"]) == (10, 1, 6)
    load_data = json.loads((made / "load_data.json").read_text())
    assert load_data.keys() == json.loads((theirs / "load_data.json").read_text()).keys()
    assert load_data["hparams"] == {"width": 5, "records": 22, "global_batch_size": 4}
    assert json.loads((made / "metadata.json").read_text())["steps_completed"] == 10
    assert notes == []


@pytest.mark.api("9.8")
def test_dray_goes_on_from_what_it_has_exported(ours: Path, tmp_path: Path) -> None:
    made, _ = exported(ours, tmp_path / "made")
    run, _, _ = golden("scaled")
    trial = resumed("scaled", tmp_path / "run", latest=made)
    assert trial.losses == pytest.approx(run["ranks"][0]["losses"][10:], rel=OTHER_MACHINE)


def test_what_determined_will_not_have_is_noted(tmp_path: Path) -> None:
    resumed("plain", tmp_path / "run", max_length=pytorch.Batch(9))
    ours = tmp_path / "run" / "checkpoint_9"
    (ours / "manifest.json").unlink()
    (ours / "code").mkdir()
    (ours / "code" / "model.py").write_text("import draynage\nfrom dray import pytorch\n")
    progress = json.loads((ours / "progress.json").read_text())
    (ours / "progress.json").write_text(json.dumps({**progress, "epoch_length": None}))
    from dray.storage.manifest import write_manifest

    write_manifest(ours, {})
    _, notes = exported(ours, tmp_path / "made")
    assert (tmp_path / "made" / "code" / "model.py").exists()
    assert ["epochs from 0" in notes[0], "(model.py)" in notes[1]] == [True, True]


def test_one_of_determineds_is_not_exported_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already is a Determined checkpoint"):
        exported(golden("plain")[1], tmp_path / "made")


# ------------------------------------------------------------------------------------------- with the real determined


needs_determined = pytest.mark.skipif(
    not PYTHON.exists(), reason="no environment with determined 0.38.1: make test-determined"
)


def dray_run(directory: Path, trial: str, processes: int) -> tuple[Path, list[float]]:
    """train.py with dray in determined's place: its checkpoint at CUT batches, the chief's losses."""
    model_dir, out, home = make.models(directory / "models"), directory / "out", directory / "home"
    script = str(make.HERE / "with_dray.py")
    run = [sys.executable, script, "train.py", trial, str(LENGTH), str(out), "--save", str(CUT // processes)]
    make.run(
        model_dir,
        out,
        *run,
        processes=processes,
        environment={"PYTHONPATH": str(ROOT), "DRAY_HOME": str(home)},
    )
    ids = json.loads((out / "checkpoints.json").read_text())
    losses = json.loads((out / "losses_0.json").read_text())["losses"]
    return home / "local" / ids[str(CUT // processes)], losses


REAL = [pytest.mark.slow, pytest.mark.long, pytest.mark.determined, pytest.mark.timeout(300), needs_determined]


def marked(test: Any) -> Any:
    for mark in REAL:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("name", ["two", "still-2"])
def test_the_golden_losses_are_those_of_the_real_determined(name: str, tmp_path: Path) -> None:
    run, at, _ = golden(name)
    model_dir, out = make.models(tmp_path / "models"), tmp_path / "out"
    save = ["--save", at.name.removeprefix("at-")]
    train = [str(PYTHON), "train.py", run["trial"], str(LENGTH), str(out), *save]
    make.run(model_dir, out, *train, processes=run["processes"])
    for rank, theirs in enumerate(run["ranks"]):
        found = json.loads((out / f"losses_{rank}.json").read_text())
        assert found["losses"] == pytest.approx(theirs["losses"], rel=OTHER_MACHINE)


@marked
@pytest.mark.api("9.4", "9.5", "9.7", "9.9")
@pytest.mark.parametrize(("trial", "processes"), [("Plain", 1), ("Two", 1), ("Plain", 2)])
def test_the_real_determined_loads_and_goes_on_from_it(trial: str, processes: int, tmp_path: Path) -> None:
    checkpoint, losses = dray_run(tmp_path / "dray", trial, processes)
    cut = CUT // processes
    made, notes = exported(checkpoint, tmp_path / "made")
    assert notes == []
    loaded: Any = pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=getattr(models(), trial))
    for model in loaded.context.models:
        model.eval()
    with torch.no_grad():
        expected = loaded.model(torch.linspace(0, 1, 12).reshape(2, 6)).flatten().tolist()
    model_dir, out = make.models(tmp_path / "determined"), tmp_path / "out"
    for given in ([], [trial]):
        said = make.run(model_dir, out, str(PYTHON), "load.py", str(made), *given)
        [line] = [line for line in said.splitlines() if line.startswith("LOADED ")]
        name, found = json.loads(line.removeprefix("LOADED "))
        assert name == trial
        assert found == pytest.approx(expected, rel=1e-6)
    # At the end of an epoch: in the middle of one Determined's local mode begins its data anew.
    make.run(
        model_dir,
        out,
        str(PYTHON),
        "train.py",
        trial,
        str(LENGTH),
        str(out),
        "--latest",
        str(made),
        processes=processes,
    )
    theirs = json.loads((out / "losses_0.json").read_text())["losses"]
    until = min(LENGTH, cut + EPOCH // processes)  # the next validation draws numbers
    assert theirs[: until - cut] == pytest.approx(losses[cut:until], rel=1e-6)
